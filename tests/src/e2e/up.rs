//! The scenario of a cluster with a node on another host, started by ssh.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::donor::DONOR;
use super::guest::{BOOT_DEADLINE, GUEST_DEADLINE, SHORT, exit, parse_faultprobe, reach_init};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::published::Published;
use crate::testbed::{Host, RemoteProcess};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "up_by_ssh",
    about: "`up` boots a guest with memory on a node that it starts by ssh; Ctrl-C, SIGKILL and a cut leave nothing there",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: up_by_ssh,
}];

/// How long a node keeps running without a sign of life from `up`, and lends without a renewal. TCP
/// waits twice as long after each loss, so both survive a link that carries nothing for half as long.
const LEASE: Duration = Duration::from_secs(15);
/// Margin until that is detected under emulation.
const MARGIN: Duration = Duration::from_secs(10);

/// Bytes that the guest has on its node and verifies.
const PROBED_BYTES: u64 = 16 << 20;

/// Path of the node's final counters.
const NODE_REPORT: &str = "/tmp/up-node.json";

/// Starts an SSH server. Clients must know its host key and have a key of their own; there is no
/// password.
const SERVER: &str = "rm -rf /tmp/up && mkdir -p /tmp/up /root/.ssh && chmod 700 /root /root/.ssh && \
    dropbearkey -t ed25519 -f /tmp/up/host-key | grep ^ssh-";
const CLIENT: &str = "rm -rf /tmp/up && mkdir /tmp/up && : >/tmp/up/known_hosts && \
    ssh-keygen -q -t ed25519 -N '' -C up -f /tmp/up/key && cat /tmp/up/key.pub";
const SERVE: &[&str] = &[
    "dropbear",
    "-F",
    "-E",
    "-s",
    "-j",
    "-k",
    "-r",
    "/tmp/up/host-key",
    "-p",
    "10.77.0.2:22",
];

const CLUSTER: &str = r#"
[vm]
name = "web"
kernel = "/share/cloud-vmlinuz"
initrd = "/share/guest.cpio"
cmdline = 'loglevel=4 ssi_exec="faultprobe --bytes 16M; sleep 1000"'
memory = "192M"
local-memory = "64M"
donor-grace = 1
insecure = true

[[node]]
name = "far"
ssh = "root@10.77.0.2"
ssh-options = ["-F", "none", "-i", "/tmp/up/key", "-oStrictHostKeyChecking=yes",
               "-oUserKnownHostsFile=/tmp/up/known_hosts"]
program = "/share/ssi-hv"
listen = "@DONOR@"
memory = "256M"
lease-seconds = @LEASE@
report = "@REPORT@"
insecure = true
"#;

/// Runs `up` as a child of a shell that stays. The testbed kills a process group when its first
/// process ends, which would hide how the others end by themselves.
const IN_SHELL: &str = "ssi-hv up /tmp/up/cluster.toml & echo up-pid=$!; wait; sleep 1000";

/// Waits until a host has no process of the product, no socket of one, and no listener on the
/// node's port; prints what remains otherwise. The deadline is between `LEASE + MARGIN` and `SHORT`.
const GONE: &str = "left() { pidof ssi-hv || ss -Hltn | grep :7700 || ls /run/ssi-hv 2>/dev/null | grep .; }
    last=$(($(date +%s) + 27)); while left; do usleep 100000; [ $(date +%s) -lt $last ] || break; done
    left || exit 0; { ps -o pid,stat,args | grep [s]si-hv; ls /run/ssi-hv; } >&2; exit 1";

fn up_by_ssh(context: &Context<'_>) -> Result {
    let (here, there) = (context.testbed.host(1), context.testbed.host(2));
    let sshd = prepare(here, there)?;

    // ssh refuses a host with an unknown key.
    let refused = start(context)?.wait(SHORT)?;
    let expected = "node far ended with exit code 255 and has not started to lend: ";
    ensure!(
        refused.status.code == exit::DONOR_UNAVAILABLE
            && refused.stderr.contains(expected)
            && refused.stderr.contains("Host key verification failed."),
        "{refused:?}"
    );
    nothing_is_left(here, there)?;
    let known = "printf '10.77.0.2 %s\\n' \"$1\" >/tmp/up/known_hosts";
    here.check(&["sh", "-c", known, "sh", &sshd.host_key], SHORT)?;

    let up = start(context)?;
    reach_init(context, &up, BOOT_DEADLINE)?;
    up.wait_for_line("FAULTPROBE", GUEST_DEADLINE)?;
    let probe = parse_faultprobe(&up.stdout())?;
    ensure!(
        probe["corrupt_bytes"] == 0 && probe["verified_bytes"].as_u64() >= Some(PROBED_BYTES),
        "{probe}"
    );
    lends(&up, there)?;
    // Ctrl-C.
    up.kill(libc::SIGINT)?;
    let ended = up.wait(SHORT)?;
    ensure!(
        ended.status.code == exit::INTERRUPTED
            && ended.stderr.contains("node far: ended with exit code 0"),
        "{ended:?}"
    );
    nothing_is_left(here, there)?;
    let report = there.check(&["cat", NODE_REPORT], SHORT)?;
    let report = Published::NodeReport.parse(&report)?;
    ensure!(
        number(&report, "/pages_read")? > 0 && number(&report, "/leases")? == 0,
        "the VM has given its lease back: {report}"
    );

    let shell = here.spawn(&["sh", "-c", IN_SHELL])?;
    lends(&shell, there)?;
    let pid = shell.wait_for_line("up-pid=", SHORT)?;
    let pid = pid.trim_start_matches("up-pid=").parse()?;
    let begin = Instant::now();
    here.signal(pid, libc::SIGKILL)?;
    nothing_is_left(here, there).context("after SIGKILL")?;
    let killed = begin.elapsed();
    ensure!(killed < LEASE + MARGIN, "{killed:?} after SIGKILL");
    drop(shell);

    let up = start(context)?;
    lends(&up, there)?;
    let begin = Instant::now();
    context.testbed.cut_link(1, 2)?;
    there.check(&["sh", "-c", GONE], SHORT).context("cut off")?;
    let cut = begin.elapsed();
    ensure!(
        cut < LEASE + MARGIN,
        "a node that was cut off has ended after {cut:?}, its lease is {LEASE:?}"
    );
    // The two sessions before; this one still waits for its client, which the node has not done.
    let said = sshd.process.stderr();
    ensure!(
        said.matches("Exit (root)").count() == 2,
        "its connection has ended: {said}"
    );
    context.testbed.restore_link(1, 2)?;
    let ended = up.wait(SHORT).inspect_err(|_| keep_threads(context))?;
    ensure!(ended.status.code == exit::DONOR_LOST, "{ended:?}");
    nothing_is_left(here, there)?;

    let said = sshd.process.stderr();
    ensure!(
        said.matches("Pubkey auth succeeded").count() == 3,
        "three times by its key: {said}"
    );
    sshd.process.kill(libc::SIGTERM)?;
    sshd.process.wait(SHORT)?;
    context.note(format!(
        "nothing is left {:.1} s after SIGKILL; a node that is cut off, with a lease of {} s, ends after {:.1} s (emulated)",
        killed.as_secs_f64(),
        LEASE.as_secs(),
        cut.as_secs_f64(),
    ));
    Ok(Verdict::Pass)
}

/// A running SSH server.
struct Sshd {
    process: RemoteProcess,
    host_key: String,
}

/// Creates keys on both hosts, starts the server on one, and writes the cluster file on the other,
/// which does not know the server's key yet.
fn prepare(here: &Host, there: &Host) -> anyhow::Result<Sshd> {
    // A scenario that ran before on the same hosts may have killed a process, whose socket stays.
    for host in [here, there] {
        host.check(&["rm", "-rf", "/run/ssi-hv"], SHORT)?;
    }
    let host_key = there.check(&["sh", "-c", SERVER], SHORT)?.trim().to_owned();
    let key = here.check(&["sh", "-c", CLIENT], SHORT)?;
    let write = "printf '%s\\n' \"$2\" >$1";
    let keys = "/root/.ssh/authorized_keys";
    there.check(&["sh", "-c", write, "sh", keys, key.trim()], SHORT)?;
    let cluster = CLUSTER
        .replace("@DONOR@", DONOR)
        .replace("@LEASE@", &LEASE.as_secs().to_string())
        .replace("@REPORT@", NODE_REPORT);
    let file = "/tmp/up/cluster.toml";
    here.check(&["sh", "-c", write, "sh", file, &cluster], SHORT)?;
    let process = there.spawn(SERVE)?;
    process.wait_for_line("Not backgrounding", SHORT)?;
    Ok(Sshd { process, host_key })
}

fn start(context: &Context<'_>) -> anyhow::Result<RemoteProcess> {
    let argv = ["/share/ssi-hv", "up", "/tmp/up/cluster.toml"];
    Ok(context.testbed.host(1).spawn(&argv)?)
}

/// Waits until the VM has a lease from its node.
fn lends(up: &RemoteProcess, there: &Host) -> anyhow::Result<()> {
    up.wait_for_line("on 1 donor(s)", BOOT_DEADLINE)?;
    let lent = status(there, &[])?;
    ensure!(number(&lent, "/nodes/0/leases")? == 1, "{lent}");
    Ok(())
}

/// Writes the states of the product's threads on host 1, which do not end, to `threads.txt`.
fn keep_threads(context: &Context<'_>) {
    let script = "for t in /proc/[0-9]*/task/*; do case $(cat $t/comm) in exe|sh|cat) continue;; esac; \
        grep -q ssi-hv $t/cmdline 2>/dev/null || grep -q ^ssi-hv $t/../../comm || continue; \
        echo $t $(cat $t/comm) $(cut -d' ' -f3,14,15 $t/stat) $(cat $t/syscall); cat $t/stack; done";
    if let Ok(output) = context.testbed.host(1).run(&["sh", "-c", script], SHORT) {
        // Best effort: the error is what matters.
        let _ = std::fs::write(context.artifacts.join("threads.txt"), output.stdout);
    }
}

fn nothing_is_left(here: &Host, there: &Host) -> anyhow::Result<()> {
    for host in [there, here] {
        host.check(&["sh", "-c", GONE], SHORT)
            .with_context(|| format!("something is left on host {}", host.number()))?;
    }
    Ok(())
}
