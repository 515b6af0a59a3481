//! Scenarios of many RDMA connections at once, without a guest: the program `rdma-faults` has the
//! connections of many VMs.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, remove_rxe};
use super::donor::{DONOR, Donor};
use super::guest::{SHORT, exit};
use super::rdma_faults::{TOUCHES_MORE, after_touches, done, json, walk};
use super::status::status;
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::rdma_tool::PATIENCE;
use crate::rdma_tool::many::kib;
use crate::testbed::{Host, RemoteProcess};

/// Deadline for establishing all connections on emulated hosts.
const MANY_DEADLINE: Duration = Duration::from_secs(480);
/// Longest time that a donor is stopped: less than the grace time of its leases. READs follow one
/// after the other, and each takes as long as emulation does.
const STOPPED_TIME_MAX: Duration = Duration::from_secs(20);
const _: () = assert!(STOPPED_TIME_MAX.as_secs() < PATIENCE.as_secs());

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "rdma_many",
    about: "256 RDMA connections, also of a stopped donor; one more is refused, and auto takes TCP",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: |context| many(context, &VMS_128),
}];

/// Run by name.
pub(super) const LONG: &[Scenario] = &[Scenario {
    name: "rdma_thousand",
    about: "the same with 1,000 connections, whose buffers are small",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: |context| many(context, &VMS_500),
}];

/// Simultaneous connections, two for each lease.
struct Crowd {
    connections: u64,
    /// Further arguments of `rdma-faults many`.
    more: &'static [&'static str],
}

const VMS_128: Crowd = Crowd {
    connections: 256,
    more: &[],
};

const VMS_500: Crowd = Crowd {
    connections: 1000,
    // What 500 VMs with usual buffers pin is more than the memory of a host of the testbed.
    more: &["--depth", "4", "--staging-pages", "8"],
};

fn many(context: &Context<'_>, crowd: &Crowd) -> Result {
    let connections = crowd.connections;
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    add_rxe(one)?;
    add_rxe(two)?;
    let most = connections.to_string();
    let donor = Donor::lending(context, "128M", &["--rdma-connections", &most])?;
    let leases = (connections / 2).to_string();
    // The usual limit of open files is too low for so many VMs in one process.
    let script = "ulimit -n 16384 && exec /share/rdma-faults many \"$@\"";
    let argv = ["sh", "-c", script, "sh", DONOR, "--leases", &leases];
    let process = one.spawn(&[&argv, crowd.more].concat())?;
    process.wait_for_line("LEASED", MANY_DEADLINE)?;
    let before = memory(two, donor.pid())?;
    let line = process.wait_for_line("OPEN ", MANY_DEADLINE)?;
    let after = memory(two, donor.pid())?;
    let open = json(&line, "OPEN ")?;
    ensure!(
        open["connections"] == connections
            && open["reads"] == connections * 4
            && open["corrupt_bytes"] == 0,
        "{open}"
    );
    let full = format!("{connections} of {connections}");
    let refusal = open["refusal"].as_str().unwrap_or_default();
    ensure!(
        refusal.contains(&format!("{full} RDMA connections of this node are in use"))
            && refusal.contains("--rdma-connections")
            && refusal.contains("--transport tcp"),
        "one more: {open}"
    );
    // What the hosts report of the connections.
    let here = &open["resources"][0];
    ensure!(
        here["device"] == "rxe0" && here["queue_pairs"]["in_use"] == connections,
        "{open}"
    );
    let status = status(two, &[])?;
    let rdma = &status["nodes"][0]["rdma"];
    let device = &rdma["resources"][0];
    ensure!(
        rdma["connections"]["in_use"] == connections
            && rdma["connections"]["limit"] == connections
            && device["queue_pairs"]["in_use"] == connections
            && device["queue_pairs"]["limit"].as_u64() > Some(connections)
            && device["completion_queues"]["in_use"] == 1
            && device["memory_regions"]["in_use"] == connections / 2,
        "{rdma}"
    );
    let ends = rdma["endpoints"].as_array().context("no endpoints")?;
    ensure!(
        ends.len() as u64 == connections
            && ends
                .iter()
                .all(|end| end["there"]["address"] == one.address()),
        "{rdma}"
    );
    let said = donor.stderr();
    let warned = said.lines().filter(|line| {
        line.contains("WARN") && line.contains("RDMA connections of this node are in use")
    });
    let warned: Vec<_> = warned.collect();
    ensure!(
        warned.len() == 1
            && warned[0].contains(&format!(
                "{} of {connections}",
                (connections * 4).div_ceil(5)
            )),
        "80 % were not warned of, once: {warned:?}"
    );
    stopped(context, &donor, &process, connections)?;
    // A VM that connects now.
    let only = one.run(&["/share/rdma-faults", "walk", DONOR, "--mib", "20"], SHORT)?;
    ensure!(
        only.status.code == exit::HOST_ERROR && only.stderr.contains(&full),
        "{only:?}"
    );
    let any = walk(one, &["--mib", "20", "--transport", "auto"])?;
    let line = any.wait_for_line("WALKING", SHORT)?;
    ensure!(
        line.contains("WALKING tcp") && line.contains(&full),
        "{line}"
    );
    after_touches(&any, TOUCHES_MORE)?;
    done(any)?;
    process.kill(libc::SIGTERM)?;
    let output = process.wait(SHORT)?;
    ensure!(output.status.code == 0, "{output:?}");
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    // Thousands at most.
    #[allow(clippy::cast_precision_loss)]
    let each = connections as f64;
    context.note(format!(
        "{connections} connections: {:.1} ms each (p50; longest {:.0} ms); VM: {:.0} KiB resident, {:.0} KiB of its host, {:.0} KiB pinned; donor: {} KiB resident, {} KiB of its host (emulated)",
        number(&open["setup_ms_p50"]),
        number(&open["setup_ms_max"]),
        number(&open["resident_bytes_each"]) / 1024.0,
        number(&open["host_bytes_each"]) / 1024.0,
        number(&open["pinned_bytes"]) / 1024.0 / each,
        kib_each(after.0, before.0, connections),
        kib_each(before.1, after.1, connections),
    ));
    donor.stop(context)?;
    remove_rxe(one)?;
    remove_rxe(two)?;
    Ok(Verdict::Pass)
}

/// Checks that a stopped donor process still answers READs, in which it has no part.
fn stopped(
    context: &Context<'_>,
    donor: &Donor,
    process: &RemoteProcess,
    connections: u64,
) -> anyhow::Result<()> {
    let two = context.testbed.host(2);
    two.signal(donor.pid(), libc::SIGSTOP)?;
    let state = two.check(&["cat", &format!("/proc/{}/stat", donor.pid())], SHORT)?;
    process.kill(libc::SIGUSR1)?;
    let again = process.wait_for_line("AGAIN ", STOPPED_TIME_MAX);
    two.signal(donor.pid(), libc::SIGCONT)?;
    ensure!(state.contains(") T "), "it is not stopped: {state}");
    let again = again.context("READs wait for the donor's process")?;
    ensure!(again == format!("AGAIN {connections}"), "{again}");
    context.note(format!(
        "{connections} READs, one on each connection, were answered by a stopped process"
    ));
    Ok(())
}

/// Returns the resident memory of a process and the available memory of its host, in bytes.
fn memory(host: &Host, pid: i32) -> anyhow::Result<(u64, u64)> {
    let text = host.check(
        &["cat", &format!("/proc/{pid}/status"), "/proc/meminfo"],
        SHORT,
    )?;
    let found = kib(&text, "VmRSS:").zip(kib(&text, "MemAvailable:"));
    found.with_context(|| text)
}

/// Returns the growth for each connection, in KiB.
fn kib_each(after: u64, before: u64, connections: u64) -> u64 {
    after.saturating_sub(before) / connections / 1024
}
