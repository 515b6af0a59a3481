//! Scenarios of VMs whose vCPUs are on several hosts.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, remove_rxe};
use super::donor::Donor;
use super::guest::{Finished, Guest, SHORT, exit};
use super::stall::{self, Received, STILL_MAX};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::{RemoteProcess, TestbedError};

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
    Scenario {
        name: "nodes_first_program",
        about: "a CPU goes to another host when a stock kernel runs its first program, which reports nothing",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: first_program,
    },
];

/// Run by name: its guest boots until init, and goes on on two hosts.
pub(super) const LONG: &[Scenario] = &[Scenario {
    name: "nodes_and_donor",
    about: "a CPU on each of two hosts, and most of the memory on a third one, which lends no CPU",
    needs_product: true,
    hosts: Hosts::THREE_6_12,
    run: beside_donor,
}];

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
pub(super) fn issue(context: &Context<'_>) -> anyhow::Result<()> {
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
/// Deadline for that: walks of page tables are writes on emulated hosts, and the CPUs take turns, more
/// slowly on a machine that has other work.
const BROUGHT_UP_DEADLINE: Duration = Duration::from_secs(600);

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

/// Waits until both CPUs run, for as long as pages travel. Of a guest in which nothing moves the error
/// says what its nodes do.
fn brought_up(context: &Context<'_>, process: &RemoteProcess) -> anyhow::Result<()> {
    let host = context.testbed.host(1);
    let started = Instant::now();
    let mut received = Received::default();
    loop {
        let error = match process.wait_for_line(BROUGHT_UP, STILL_MAX) {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        let has_ended = process.wait(Duration::ZERO).is_ok();
        if has_ended || !matches!(error, TestbedError::Deadline { .. }) {
            return Err(error).with_context(|| format!("errors: {}", process.stderr()));
        }
        if received.nothing_since(host)? || started.elapsed() > BROUGHT_UP_DEADLINE {
            return Err(stall::examine(context, process, "second CPU", started.elapsed())?.into());
        }
    }
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
            .extend(["--node", "10.77.0.2:7700,cpus=1,name=alpha,from=start"]);
        guest.more.extend(["--credentials", "/tmp/two"]);
    } else {
        guest
            .more
            .extend(["--node", "10.77.0.2:7700,cpus=1,from=start"]);
    }
    if connected == Connected::Rdma {
        guest.more.extend(["--transport", "rdma"]);
    }
    guest.more.extend(["--name", "two"]);
    let started = Instant::now();
    let process = guest.start(context)?;
    brought_up(context, &process)?;
    let time = started.elapsed();
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
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
    returned(context, &node)?;
    let report = node.end(context)?;
    ensure!(report["lent_bytes"] == 0, "the node's report: {report}");
    context.note(format!(
        "2 CPUs on 2 hosts after {:.0} s (emulated)",
        time.as_secs_f64()
    ));
    Ok(Verdict::Pass)
}

/// A program of which nothing tells the VM.
pub(super) const SPINS: &str = "nokaslr rdinit=/bin/sh -- -c \"while :; do :; done\"";
/// What `run` says when the CPU moves.
pub(super) const MOVES: &str = "init runs: a vCPU moves cpu=1 node=1";

fn first_program(context: &Context<'_>) -> Result {
    let node = Donor::lending(context, "512M", &["--cpus", "1"])?;
    let mut guest = Guest {
        memory: "256M",
        cmdline: SPINS.to_owned(),
        ..Guest::local(2, "")
    };
    guest.more.extend(["--node", "10.77.0.2:7700,cpus=1"]);
    let started = Instant::now();
    let process = guest.start(context)?;
    process
        .wait_for_line(MOVES, INIT_DEADLINE)
        .with_context(|| format!("errors: {}", process.stderr()))?;
    let time = started.elapsed();
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    ensure!(
        guest.report["boot"]["to_init_ms"].is_null(),
        "it has reported its boot: {}",
        guest.report["boot"]
    );
    let console = &guest.output.stdout;
    ensure!(console.contains(BROUGHT_UP), "console: {console}");
    returned(context, &node)?;
    let report = node.end(context)?;
    ensure!(report["lent_bytes"] == 0, "the node's report: {report}");
    context.note(format!(
        "a program after {:.0} s (emulated)",
        time.as_secs_f64()
    ));
    Ok(Verdict::Pass)
}

/// Waits until a node has its vCPUs back and no process of a VM, which both follow the VM's end.
fn returned(context: &Context<'_>, node: &Donor) -> anyhow::Result<()> {
    let deadline = Instant::now() + SHORT;
    loop {
        let processes = context.testbed.host(2);
        let processes = processes.check(&["sh", "-c", "pidof ssi-hv | wc -w"], SHORT)?;
        let (count, said) = (processes.trim(), node.stderr());
        if count == "1" && said.contains("vCPUs returned") {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{count} processes on the node, which says: {said}"
        );
    }
}

/// Deadline from the start to init, until when both CPUs are on host 1. That took 149 s on a machine with
/// other work (load 9 on 2 CPUs).
pub(super) const INIT_DEADLINE: Duration = Duration::from_secs(600);
/// Deadline from there until the CPU that went to host 2 has pages.
const WITH_DONOR_DEADLINE: Duration = Duration::from_secs(180);
/// Pages that went to the donor and came back, at least: the kernel and its initramfs alone are more
/// than what host 1 lends.
const DONOR_PAGES_MIN: u64 = 500;
/// Pages that the CPU on host 2 got, at least.
const NODE_PAGES_MIN: u64 = 50;

/// Pages of the VM `beside`: those written to its donor, those fetched from it, and those that its node
/// got.
fn pages_of(status: &Value) -> anyhow::Result<[u64; 3]> {
    let of = |pointer: &str| number(status, &format!("/vms/0/nodes/{pointer}"));
    Ok([
        of("2/pages_written_back")?,
        of("2/pages_fetched")?,
        of("1/transfers/pages_received")?,
    ])
}

fn beside_donor(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let node = Donor::lending(context, "256M", &["--cpus", "1"])?;
    let donor = Donor::third_lending(context, "256M", &[])?;
    let mut guest = Guest {
        memory: "256M",
        ..Guest::local(2, "taskset -c 1 sh -c 'while :; do :; done'")
    };
    guest.cmdline.insert_str(0, "nokaslr ");
    let more = ["--name", "beside", "--local-memory", "32M"];
    guest.more.extend(more);
    let node_arg = "10.77.0.2:7700,cpus=1,memory=32M,from=init";
    guest.more.extend(["--node", node_arg]);
    guest.more.extend(["--donor", "10.77.0.3:7700,memory=192M"]);
    let started = Instant::now();
    let process = guest.start(context)?;
    process
        .wait_for_line(MOVES, INIT_DEADLINE)
        .with_context(|| format!("errors: {}", process.stderr()))?;
    let to_init = started.elapsed();
    let wanted = [DONOR_PAGES_MIN, DONOR_PAGES_MIN, NODE_PAGES_MIN];
    let deadline = Instant::now() + WITH_DONOR_DEADLINE;
    let pages = loop {
        let now = status(host, &["beside"])?;
        let pages = pages_of(&now)?;
        let mut enough = pages.iter().zip(wanted);
        if enough.all(|(pages, least)| *pages >= least) {
            break pages;
        }
        ensure!(Instant::now() < deadline, "{pages:?} pages: {now}");
    };
    let time = started.elapsed();
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    let nodes = &guest.report["nodes"];
    let cpus = &nodes[1]["cpus"];
    ensure!(*cpus == serde_json::json!([1]), "CPUs on the node: {cpus}");
    ensure!(nodes[2]["role"] == "donor", "nodes: {nodes}");
    // On another host.
    ensure!(nodes[2]["sealed"] == true, "the donor: {}", nodes[2]);
    for lender in [node, donor] {
        let report = lender.end(context)?;
        ensure!(report["lent_bytes"] == 0, "a lender's report: {report}");
    }
    let [written, fetched, received] = pages;
    context.note(format!(
        "init after {:.0} s; after {:.0} s {written} pages were written to the donor and {fetched} fetched, and \
         the node had got {received} (emulated)",
        to_init.as_secs_f64(),
        time.as_secs_f64(),
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
