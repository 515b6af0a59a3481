//! Scenarios of VMs whose vCPUs are on several hosts.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::bed::{add_rxe, remove_rxe};
use super::donor::Donor;
use super::guest::{Finished, Guest, SHORT};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "nodes_two_hosts",
        about: "a stock kernel brings up two CPUs on two hosts, and leaves nothing on either when it is ended",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| two_hosts(context, Connected::Plain),
    },
    Scenario {
        name: "nodes_two_hosts_tls",
        about: "the same with certificates, and without --insecure",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| two_hosts(context, Connected::Tls),
    },
    Scenario {
        name: "nodes_two_hosts_rdma",
        about: "the same, and their memory travels by RDMA",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: by_rdma,
    },
];

/// How two hosts are connected.
#[derive(Clone, Copy, PartialEq)]
enum Connected {
    Plain,
    Tls,
    Rdma,
}

/// The files of a member of a cluster.
const CREDENTIALS: [&str; 4] = ["ca.pem", "cert.pem", "crl.pem", "key.pem"];

/// Makes a cluster with a VM, whose certificate is in /tmp/two on host 1, and a node, whose one is
/// in /tmp/alpha on host 2.
fn issue(context: &Context<'_>) -> anyhow::Result<()> {
    let (first, second) = (context.testbed.host(1), context.testbed.host(2));
    first.check(
        &["rm", "-rf", "/tmp/authority", "/tmp/two", "/tmp/alpha"],
        SHORT,
    )?;
    let pki = |arguments: &[&str]| {
        let program = ["/share/ssi-hv", "pki"];
        first.check(&[&program, arguments].concat(), SHORT)
    };
    pki(&["init", "/tmp/authority", "--cluster", "bed"])?;
    pki(&["issue", "/tmp/authority", "vm/two", "-o", "/tmp/two"])?;
    pki(&["issue", "/tmp/authority", "node/alpha", "-o", "/tmp/alpha"])?;
    second.check(&["mkdir", "-p", "/tmp/alpha"], SHORT)?;
    let here = tempfile::tempdir()?;
    for file in CREDENTIALS {
        let (there, local) = (format!("/tmp/alpha/{file}"), here.path().join(file));
        first.get(&there, &local)?;
        second.put(&local, &there, 0o600)?;
    }
    Ok(())
}

/// What the kernel prints when all its CPUs run.
const BROUGHT_UP: &str = "smp: Brought up 1 node, 2 CPUs";
/// Deadline for that: walks of page tables are writes on emulated hosts, and the CPUs take turns.
const BROUGHT_UP_DEADLINE: Duration = Duration::from_secs(240);
/// Exit code of a VM that SIGTERM ends.
const TERMINATED: i32 = 143;

/// Packets that travel by RDMA until both CPUs run, at least: each page takes two, and a kernel that
/// boots moves thousands.
const RDMA_PACKETS_MIN: u64 = 1000;

fn by_rdma(context: &Context<'_>) -> Result {
    let hosts = [context.testbed.host(1), context.testbed.host(2)];
    hosts.iter().try_for_each(|host| add_rxe(host))?;
    let verdict = two_hosts(context, Connected::Rdma)?;
    for host in hosts {
        let counter = "/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts";
        let sent: u64 = host.check(&["cat", counter], SHORT)?.trim().parse()?;
        ensure!(
            sent >= RDMA_PACKETS_MIN,
            "host {} sent {sent} packets by RDMA",
            host.number()
        );
        context.note(format!("host {}: {sent} packets by RDMA", host.number()));
        // Nothing of the VM uses the device any more.
        remove_rxe(host)?;
    }
    Ok(verdict)
}

fn two_hosts(context: &Context<'_>, connected: Connected) -> Result {
    let has_credentials = connected == Connected::Tls;
    let mut flags = vec!["--cpus", "1"];
    if has_credentials {
        issue(context)?;
        flags.extend(["--credentials", "/tmp/alpha", "--allow", "vm/two,cpus=1"]);
    }
    let node = Donor::lending(context, "512M", &flags)?;
    let mut guest = Guest {
        memory: "256M",
        // Without `lpj=`, which the product adds, the second CPU measures its delays for minutes.
        cmdline: "nokaslr".to_owned(),
        ..Guest::local(2, "")
    };
    if has_credentials {
        guest
            .more
            .extend(["--node", "10.77.0.2:7700,cpus=1,name=alpha"]);
        guest.more.extend(["--credentials", "/tmp/two"]);
    } else {
        guest.more.extend(["--node", "10.77.0.2:7700,cpus=1"]);
    }
    if connected == Connected::Rdma {
        guest.more.extend(["--transport", "rdma"]);
    }
    let started = Instant::now();
    let process = guest.start(context)?;
    process
        .wait_for_line(BROUGHT_UP, BROUGHT_UP_DEADLINE)
        .with_context(|| format!("errors: {}", process.stderr()))?;
    let time = started.elapsed();
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(TERMINATED)?;
    let console = &guest.output.stdout;
    for parameter in [" tsc_early_khz=", " lpj="] {
        ensure!(console.contains(parameter), "no{parameter}: {console}");
    }
    let of_100_ms = ms_of_100(console);
    ensure!(
        of_100_ms.is_none_or(|ms| (50..=200).contains(&ms)),
        "100 ms of the guest's clock are {of_100_ms:?} ms"
    );
    ensure!(
        guest.report["guest"]["irqchip"] == "user",
        "report: {}",
        guest.report["guest"]
    );
    let transport = match connected {
        Connected::Plain => "tcp",
        Connected::Tls => "tcp+tls",
        Connected::Rdma => "rdma",
    };
    for node in [0, 1] {
        let peers = &guest.report["nodes"][node]["peers"];
        ensure!(peers[0]["transport"] == transport, "node {node}: {peers}");
    }
    let children = context.testbed.host(2);
    let children = children.check(&["sh", "-c", "pidof ssi-hv | wc -w"], SHORT)?;
    ensure!(
        children.trim() == "1",
        "{} processes on the node",
        children.trim()
    );
    let said = node.stderr();
    ensure!(said.contains("vCPUs returned"), "the node says: {said}");
    let report = node.end(context)?;
    ensure!(report["lent_bytes"] == 0, "the node's report: {report}");
    context.note(format!(
        "2 CPUs on 2 hosts after {:.0} s (emulated)",
        time.as_secs_f64()
    ));
    Ok(Verdict::Pass)
}

/// How many milliseconds of the ACPI timer were 100 ms of the time stamp counter, if the kernel found
/// that they are not as many: the rate that it was told is wrong then.
fn ms_of_100(console: &str) -> Option<u64> {
    let (_, found) = console.split_once("APIC calibration not consistent with PM-Timer: ")?;
    found.split_once("ms instead of 100ms")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_clock_is_found_on_the_console() {
        let console =
            "[ 4.6] APIC calibration not consistent with PM-Timer: 37ms instead of 100ms\r\n";
        assert_eq!(ms_of_100(console), Some(37));
        assert_eq!(ms_of_100("[ 4.6] smp: x\r\n"), None);
    }
}
