//! Scenarios of the testbed itself, on which all others rely.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::Host;

const SHORT: Duration = Duration::from_secs(30);
/// Deadline for removing a device that is in use.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(20);

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "bed_commands",
        about: "commands run with their exit codes, signals, outputs and deadlines",
        needs_product: false,
        hosts: Hosts::TWO_6_12,
        run: commands,
    },
    Scenario {
        name: "bed_files",
        about: "files go into a host and come back unharmed",
        needs_product: false,
        hosts: Hosts::TWO_6_12,
        run: files,
    },
    Scenario {
        name: "bed_processes",
        about: "a process is watched, signalled, and killed with all it started",
        needs_product: false,
        hosts: Hosts::TWO_6_12,
        run: processes,
    },
    Scenario {
        name: "bed_kvm_and_userfaultfd",
        about: "every host makes a VM and a userfaultfd that takes kernel faults",
        needs_product: false,
        hosts: Hosts::TWO_6_12,
        run: kvm_and_userfaultfd,
    },
    Scenario {
        name: "bed_link",
        about: "a link is cut, restored, and slowed down",
        needs_product: false,
        hosts: Hosts::TWO_6_12,
        run: link,
    },
    Scenario {
        name: "bed_rdma",
        about: "software RDMA reads between two hosts",
        needs_product: false,
        hosts: Hosts::TWO_6_12,
        run: rdma,
    },
];

/// Returns a script for host 1 that applies netem to packets of this IP protocol to this port of
/// host 2 only.
pub(super) fn on_the_way_to_2((protocol, port): (u8, u16), netem: &str) -> String {
    format!(
        "set -e; d='dev link2'; \
         tc qdisc add $d root handle 1: prio bands 4; \
         tc qdisc add $d parent 1:4 handle 40: netem {netem}; \
         tc filter add $d parent 1: protocol ip u32 match ip protocol {protocol} 0xff \
         match ip dport {port} 0xffff flowid 1:4"
    )
}

fn commands(context: &Context<'_>) -> Result {
    for host in context.testbed.hosts() {
        let output = host.run(&["sh", "-c", "echo out; echo err >&2; exit 7"], SHORT)?;
        ensure!(output.status.code == 7, "exit code {}", output.status);
        ensure!(
            output.stdout == "out\n" && output.stderr == "err\n",
            "{output:?}"
        );
        let output = host.run(&["sh", "-c", "kill -TERM $$"], SHORT)?;
        ensure!(
            output.status.signal == 15,
            "expected signal 15, got {}",
            output.status
        );
        let name = host.check(&["hostname"], SHORT)?;
        ensure!(
            name.trim() == format!("host{}", host.number()),
            "host name is {name}"
        );
    }
    let host = context.testbed.host(1);
    let error = host
        .run(&["no-such-command"], SHORT)
        .err()
        .context("a command that is not there ran")?;
    ensure!(error.to_string().contains("no-such-command"), "{error}");
    let late = host.run(&["sleep", "1000"], Duration::from_secs(1)).err();
    ensure!(
        late.is_some_and(|e| e.to_string().contains("not within 1s")),
        "a deadline was not kept"
    );
    let large = host.check(&["dd", "if=/dev/zero", "bs=1M", "count=3"], SHORT)?;
    ensure!(large.len() == 3 << 20, "{} bytes of output", large.len());
    Ok(Verdict::Pass)
}

fn files(context: &Context<'_>) -> Result {
    let host = context.testbed.host(2);
    let (from, back) = (
        context.artifacts.join("sent"),
        context.artifacts.join("back"),
    );
    let bytes: Vec<u8> = (0..1_000_003_u32)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    std::fs::write(&from, &bytes)?;
    host.put(&from, "/tmp/sent", 0o755)?;
    ensure!(
        host.check(&["stat", "-c", "%s %a", "/tmp/sent"], SHORT)?
            .trim()
            == "4000012 755"
    );
    host.get("/tmp/sent", &back)?;
    ensure!(
        std::fs::read(&back)? == bytes,
        "the file was changed in transit"
    );
    let error = host
        .get("/tmp/absent", &back)
        .err()
        .context("an absent file was got")?;
    ensure!(error.to_string().contains("/tmp/absent"), "{error}");
    let error = host
        .put(&from, "/absent/dir/f", 0o644)
        .err()
        .context("a file went nowhere")?;
    ensure!(error.to_string().contains("/absent/dir/f"), "{error}");
    host.check(
        &["cmp", "/share/cloud-vmlinuz", "/share/cloud-vmlinuz"],
        SHORT,
    )?;
    std::fs::remove_file(from)?;
    std::fs::remove_file(back)?;
    Ok(Verdict::Pass)
}

fn processes(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let script = "trap 'echo caught; exit 3' USR1; echo ready; while :; do sleep 0.1; done";
    let process = host.spawn(&["sh", "-c", script])?;
    process.wait_for_line("ready", SHORT)?;
    process.kill(libc::SIGUSR1)?;
    process.wait_for_line("caught", SHORT)?;
    ensure!(process.wait(SHORT)?.status.code == 3);

    let process = host.spawn(&["sh", "-c", "sleep 1000 & echo child $!; wait"])?;
    let line = process.wait_for_line("child ", SHORT)?;
    let child: i32 = line.trim_start_matches("child ").trim().parse()?;
    host.signal(child, 0).context("the child does not run")?;
    drop(process);
    // The agent kills the process group when the connection closes, which can take a moment.
    let gone = format!(
        "i=0; while [ -e /proc/{child} ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done; [ ! -e /proc/{child} ]"
    );
    host.check(&["sh", "-c", &gone], SHORT)
        .context("the child outlives its parent's connection")?;

    let process = host.spawn(&["sleep", "1000"])?;
    host.signal(process.pid(), libc::SIGKILL)?;
    ensure!(process.wait(SHORT)?.status.signal == libc::SIGKILL);
    Ok(Verdict::Pass)
}

fn kvm_and_userfaultfd(context: &Context<'_>) -> Result {
    for host in context.testbed.hosts() {
        let text = host.check(&["testbed-agent", "check"], SHORT)?;
        ensure!(
            text.contains("kvm api=12") && text.contains("userfaultfd features="),
            "{text}"
        );
        let flags = host.check(&["grep", "-w", "-m1", "svm", "/proc/cpuinfo"], SHORT)?;
        ensure!(flags.starts_with("flags"), "no svm: {flags:?}");
        let limit = host.check(&["sh", "-c", "ulimit -l"], SHORT)?;
        ensure!(limit.trim() == "unlimited", "locked-memory limit {limit}");
    }
    Ok(Verdict::Pass)
}

fn link(context: &Context<'_>) -> Result {
    let testbed = context.testbed;
    let (one, two) = (testbed.host(1), testbed.host(2));
    let address = two.address();
    let reach = ["ping", "-c", "1", "-W", "10", &address];
    one.check(&reach, SHORT)?;
    testbed.cut_link(1, 2)?;
    let cut = one.run(&["ping", "-c", "1", "-W", "1", &address], SHORT)?;
    ensure!(cut.status.code != 0, "a cut link carries packets");
    testbed.restore_link(1, 2)?;
    one.check(&["ping", "-c", "5", "-W", "10", &address], SHORT)
        .context("after the link was restored")?;

    testbed.netem(1, 2, Duration::from_millis(200), 0)?;
    let text = one.check(&["ping", "-c", "3", &address], SHORT);
    testbed.clear_netem()?;
    let fastest = fastest_ping_ms(&text?).context("no times in what ping printed")?;
    ensure!(
        (200.0..2000.0).contains(&fastest),
        "200 ms of delay, but a ping takes {fastest} ms"
    );
    let clear =
        fastest_ping_ms(&one.check(&["ping", "-c", "5", &address], SHORT)?).context("no times")?;
    ensure!(clear < 150.0, "without delay a ping takes {clear} ms");

    // A link that a scenario left cut or lossy must not be mistaken for one that the emulator lost.
    testbed.netem(1, 2, Duration::ZERO, 100)?;
    testbed.cut_link(1, 2)?;
    let stuck = testbed.stuck_link()?;
    ensure!(stuck.is_none(), "{stuck:?} after restoring it");
    let deaf = "/proc/sys/net/ipv4/icmp_echo_ignore_all";
    let set = |value: &str| two.check(&["sh", "-c", &format!("echo {value} > {deaf}")], SHORT);
    set("1")?;
    let stuck = testbed.stuck_link();
    set("0")?;
    let stuck = stuck?;
    ensure!(stuck == Some((1, 2)), "{stuck:?} while nothing answers");
    context.note(format!(
        "fastest ping {clear} ms, {fastest} ms under 200 ms of delay"
    ));
    Ok(Verdict::Pass)
}

/// Parses the minimum round-trip time that ping printed.
fn fastest_ping_ms(text: &str) -> Option<f64> {
    let times = text
        .split("time=")
        .skip(1)
        .filter_map(|t| t.split_whitespace().next()?.parse().ok());
    times.min_by(f64::total_cmp)
}

fn rdma(context: &Context<'_>) -> Result {
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    add_rxe(one)?;
    add_rxe(two)?;
    let typical = bare_read_us(one, two, 200)?;
    context.note(format!(
        "RDMA READ of 4 KiB: {typical} us typical (emulated, only ratios count)"
    ));
    remove_rxe(one)?;
    remove_rxe(two)?;
    Ok(Verdict::Pass)
}

/// Adds a SoftRoCE device on the link to the other host.
pub(crate) fn add_rxe(host: &Host) -> anyhow::Result<()> {
    let link = format!("link{}", 3 - host.number());
    let argv = [
        "rdma", "link", "add", "rxe0", "type", "rxe", "netdev", &link,
    ];
    host.check(&argv, SHORT)?;
    Ok(())
}

/// Removes the device, which fails while it has users.
pub(super) fn remove_rxe(host: &Host) -> anyhow::Result<()> {
    let argv = ["rdma", "link", "delete", "rxe0"];
    host.check(&argv, REMOVAL_DEADLINE)
        .context("the device is still in use")?;
    Ok(())
}

/// Measures the typical latency of this many READs of 4 KiB with perftest.
pub(super) fn bare_read_us(one: &Host, two: &Host, reads: u32) -> anyhow::Result<f64> {
    perftest_of(one, two, "ib_read_lat", 4096, reads)
}

/// Runs a perftest tool for one size, and returns the typical latency in us, or the average
/// bandwidth in MB/s.
pub(super) fn perftest(one: &Host, two: &Host, tool: &str, bytes: u32) -> anyhow::Result<f64> {
    perftest_of(one, two, tool, bytes, 200)
}

fn perftest_of(one: &Host, two: &Host, tool: &str, bytes: u32, count: u32) -> anyhow::Result<f64> {
    let (bytes, count) = (bytes.to_string(), count.to_string());
    let common = [
        tool, "-d", "rxe0", "-x", "1", "-s", &bytes, "-n", &count, "-F",
    ];
    let server = two.spawn(&common)?;
    let address = two.address();
    let listening = "i=0; until ss -Hltn | grep -q :18515; do i=$((i+1)); [ $i -lt 100 ] || exit 1; sleep 0.1; done";
    two.check(&["sh", "-c", listening], SHORT)?;
    let client: Vec<&str> = common.iter().copied().chain([address.as_str()]).collect();
    let text = one.check(&client, SHORT)?;
    ensure!(server.wait(SHORT)?.status.code == 0, "the server failed");
    // The columns are size, count, minimum, maximum, typical for a latency, and size, count, peak,
    // average for a bandwidth, in 2^20 bytes per second.
    let found = if tool.ends_with("_bw") {
        column(&text, &bytes, 3).map(|mib| mib * f64::from(1 << 20) / 1e6)
    } else {
        column(&text, &bytes, 4)
    };
    found.with_context(|| format!("no result in:\n{text}"))
}

/// Returns a column of the row for a size.
fn column(text: &str, bytes: &str, column: usize) -> Option<f64> {
    let mut rows = text.lines().map(|line| line.split_whitespace());
    let mut row = rows.find(|row| row.clone().next() == Some(bytes))?;
    row.nth(column)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_what_the_tools_print() {
        let text = "64 bytes: seq=0 time=5.4 ms\n64 bytes: seq=1 time=1.1 ms\n";
        assert_eq!(fastest_ping_ms(text), Some(1.1));
        assert_eq!(fastest_ping_ms("nothing"), None);
        let row =
            " #bytes #iterations t_min t_max t_typical\n 4096  200  410.1  2000.5  633.20  650.0\n";
        assert_eq!(column(row, "4096", 4), Some(633.2));
        assert_eq!(column(row, "409", 4), None);
    }
}
