//! Scenarios of guests that gain memory at run time from a donor that joins, and return it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::bed::{add_rxe, remove_rxe};
use super::donor::{DONOR_2, DONOR_3, Donor};
use super::guest::{BOOT_DEADLINE, Finished, GUEST_DEADLINE, Guest, SHORT, exit, faultprobes};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::RemoteProcess;

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "hotplug",
        about: "a donor on a third host joins, a running guest uses its memory, gives it back, and the donor leaves",
        needs_product: true,
        hosts: Hosts::THREE_6_12,
        run: hotplug,
    },
    Scenario {
        name: "hotplug_rdma",
        about: "the same by RDMA, where what is added is a NUMA node, and nothing of its connections stays",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: hotplug_rdma,
    },
];

/// Memory of the guest at the start.
const MEMORY_BYTES: u64 = 176 << 20;
const MEMORY: &str = "176M";
/// Memory that is added.
const ADDED_BYTES: u64 = 256 << 20;
const ADDED: &str = "256M";
/// Memory that the guest writes and verifies: more than it has without the added memory.
const PROBE_BYTES: u64 = 128 << 20;
const PROBE: &str = "faultprobe --bytes 128M";
/// Prints the guest's memory in KiB.
const TOTAL: &str = "grep MemTotal /proc/meminfo | tr -dc 0-9";

/// The guest does not clear pages that it returns: clearing remote pages would fetch them.
const GIVES_AS_IT_IS: &str = " init_on_alloc=0";
/// Initial memory of the RDMA guest, which leaves room for a program after the added memory was
/// removed.
const ROOMY_BYTES: u64 = 256 << 20;
const ROOMY: &str = "256M";
/// Memory that is added to it, and pinned at its donor: one memory block of Linux.
const NODE_BYTES: u64 = 128 << 20;
const NODE: &str = "128M";
/// Bytes that are written and verified in it, more than the cache can hold; and, after its removal,
/// in the memory of the initial donor.
const NODE_PROBE_BYTES: u64 = 48 << 20;
const NODE_PROBE: &str = "faultprobe --bytes 48M --node 2";
const AFTER_PROBE_BYTES: u64 = 8 << 20;
const AFTER_PROBE: &str = "faultprobe --bytes 8M --node 1";
/// Prints the memory in KiB of the node to which it is added; the node may not exist without it.
const NODE_TOTAL: &str = "f=/sys/devices/system/node/node2/meminfo; \
    [ ! -e $f ] && echo 0 || grep MemTotal $f | tr -s ' ' | cut -d' ' -f4";

/// Returns a script that waits until `total` has grown by more than `more_kib`, runs `probe`, and
/// waits until less than `rest_kib` of the growth remains. It then waits for the power button, so
/// that the host can inspect the guest before it continues. While the kernel reports the added
/// memory to the balloon as free, it can have none to give, and kills the probe (status 137), which
/// then is tried again.
fn work(total: &str, more_kib: u64, probe: &str, rest_kib: u64) -> String {
    format!(
        "exec 3</dev/input/event0; total() {{ {total}; }}; a=$(total); \
         echo begins=$a.; until [ $(total) -gt $((a+{more_kib})) ]; do usleep 200000; done; \
         echo grown=$(total).; s=137; while [ $s = 137 ]; do {probe}; s=$?; done; echo probed=$s.; \
         until [ $(total) -lt $((a+{rest_kib})) ]; do usleep 200000; done; \
         echo shrunk=$(total).; head -c 24 <&3 >/dev/null"
    )
}

/// Presses the power button.
const GO_ON: &[&str] = &["ssi-hv", "shutdown", "grows"];

/// Returns a guest with this workload to which memory can be added.
fn guest(memory: &'static str, work: &str) -> Guest {
    let mut guest = Guest {
        memory,
        local_memory: Some("128M"),
        ..Guest::remote(1, work)
    };
    guest
        .cmdline
        .push_str(" ssi_modules=\"virtio_mem button evdev\"");
    guest.cmdline.push_str(GIVES_AS_IT_IS);
    guest
        .more
        .extend(["--name", "grows", "--hotplug-memory", "1280M"]);
    guest
}

/// Starts the guest and waits until its work begins.
fn start(context: &Context<'_>, guest: &Guest) -> anyhow::Result<RemoteProcess> {
    let process = guest.boot(context)?;
    process.wait_for_line("begins=", BOOT_DEADLINE)?;
    Ok(process)
}

/// Sets the plugged memory: growth comes from a donor that joins, shrinking returns memory to its
/// donor. Returns the message and the duration.
fn plug(
    context: &Context<'_>,
    size: &str,
    donor: Option<&str>,
) -> anyhow::Result<(String, Duration)> {
    let mut argv = vec![
        "ssi-hv", "hotplug", "grows", "--memory", size, "--wait", "55",
    ];
    argv.extend(donor.into_iter().flat_map(|donor| ["--donor", donor]));
    let asked = Instant::now();
    let said = context.testbed.host(1).check(&argv, SHORT)?;
    Ok((said, asked.elapsed()))
}

/// Checks the status that the host gives for a guest with this initial and this plugged memory.
fn status_with(context: &Context<'_>, memory: u64, plugged: u64) -> anyhow::Result<Value> {
    let status = status(context.testbed.host(1), &["grows"])?;
    for (pointer, wanted) in [
        ("/vms/0/memory/hotplug/plugged_bytes", plugged),
        ("/vms/0/guest/memory_bytes", memory),
    ] {
        ensure!(number(&status, pointer)? == wanted, "{pointer}: {status}");
    }
    Ok(status)
}

/// Returns the status of the joining donor on this host with this address.
fn joiner(context: &Context<'_>, (host, listen): (usize, &str)) -> anyhow::Result<Value> {
    let nodes = status(context.testbed.host(host), &[])?;
    let nodes = nodes["nodes"].as_array().into_iter().flatten();
    let joiner = nodes.into_iter().find(|node| node["listen"] == listen);
    joiner.cloned().context("no status of the donor that joins")
}

/// Waits until that donor has all of its memory back.
fn wait_until_left(context: &Context<'_>, donor: (usize, &str)) -> anyhow::Result<Value> {
    let deadline = Instant::now() + SHORT;
    loop {
        let node = joiner(context, donor)?;
        match &node {
            node if node["leases"] == 0 && node["lent_bytes"] == 0 => break Ok(node.clone()),
            _ if Instant::now() < deadline => {}
            node => bail!("the donor has not its memory back: {node}"),
        }
    }
}

/// Returns the pages fetched from the joined donor and written to it, of a guest that has ended
/// without plugged memory.
fn travelled(guest: &Finished) -> anyhow::Result<(f64, f64)> {
    guest.expect_exit(exit::SHUTDOWN)?;
    ensure!(guest.number("/memory/hotplug/plugged_bytes")? == 0.0);
    ensure!(guest.number("/nodes/2/memory_bytes")? == 0.0);
    let (fetched, written) = (
        guest.number("/nodes/2/pages_fetched")?,
        guest.number("/nodes/2/pages_written_back")?,
    );
    ensure!(
        written > 1000.0 && fetched > 1000.0,
        "{fetched} fetched, {written} written"
    );
    Ok((fetched, written))
}

fn hotplug(context: &Context<'_>) -> Result {
    let here = context.testbed.host(1);
    let (donor, joins) = (Donor::start(context)?, Donor::third(context)?);
    let work = work(TOTAL, 200_000, PROBE, 50_000) + "; (exit $s)";
    let process = start(context, &guest(MEMORY, &work))?;

    // An address without a donor, and a donor with too little memory. The guest notices neither.
    for (size, donor, why) in [
        (ADDED, "10.77.0.2:7702", "connect"),
        ("1280M", DONOR_3, "refuses"),
    ] {
        let argv = [
            "ssi-hv", "hotplug", "grows", "--memory", size, "--donor", donor,
        ];
        let refused = here.run(&argv, SHORT)?;
        ensure!(
            refused.status.code == exit::HOST_ERROR && refused.stderr.contains(why),
            "{refused:?}"
        );
    }
    let (said, grew) = plug(context, ADDED, Some(DONOR_3))?;
    ensure!(said.contains("256 MiB plugged of 256 MiB"), "{said}");
    process.wait_for_line("grown=", SHORT)?;
    let status = status_with(context, MEMORY_BYTES, ADDED_BYTES)?;
    ensure!(
        number(&status, "/vms/0/nodes/2/memory_bytes")? == ADDED_BYTES,
        "{status}"
    );

    process.wait_for_line("probed=0.", GUEST_DEADLINE)?;
    let (_, shrank) = plug(context, "0", None)?;
    process.wait_for_line("shrunk=", SHORT)?;
    wait_until_left(context, (3, DONOR_3))?;
    here.check(GO_ON, SHORT)?;

    let guest = Finished::read(context, process.wait(SHORT)?)?;
    let (fetched, written) = travelled(&guest)?;
    guest.faultprobe_over(PROBE_BYTES)?;
    let (read, stored) = joins.stop(context)?;
    ensure!(
        stored.to_string() == written.to_string() && read.to_string() == fetched.to_string(),
        "the donor sent {read} and stored {stored}, the guest's host counts {fetched} and {written}"
    );
    donor.stop(context)?;
    context.note(format!(
        "256M came in {} ms and went in {} ms, emulated; {fetched} pages came from the donor that joined",
        grew.as_millis(),
        shrank.as_millis()
    ));
    Ok(Verdict::Pass)
}

fn hotplug_rdma(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let (donor, joins) = (Donor::start(context)?, Donor::second(context)?);
    // Adds all of the node's memory, and removes all of it.
    let work = work(NODE_TOTAL, NODE_BYTES / 1024 - 1, NODE_PROBE, 1)
        + &format!("; {AFTER_PROBE} && (exit $s)");
    let mut guest = guest(ROOMY, &work);
    guest
        .more
        .extend(["--transport", "rdma", "--numa", "expose"]);
    let process = start(context, &guest)?;
    process.wait_for_line("begins=0.", SHORT)?;
    let before = status_with(context, ROOMY_BYTES, 0)?;

    let (_, grew) = plug(context, NODE, Some(DONOR_2))?;
    let grown = process.wait_for_line("grown=", SHORT)?;
    let grown_to = format!("grown={}.", NODE_BYTES / 1024);
    ensure!(grown.contains(&grown_to), "node 2 of the guest: {grown}");
    let status = status_with(context, ROOMY_BYTES, NODE_BYTES)?;
    let joined = &status["vms"][0]["nodes"][2];
    ensure!(
        joined["memory_bytes"] == NODE_BYTES && joined["link"]["rdma"] == true,
        "{joined}"
    );
    let held = |status: &Value| held(&status["vms"][0]["rdma"]);
    let (first, more) = (held(&before)?, held(&status)?);
    let lends = joiner(context, (2, DONOR_2))?;
    let lent = held_by_node(&lends)?;
    // One queue pair for each class of traffic; the lent memory is registered with the adapter.
    ensure!(
        more.queue_pairs == first.queue_pairs + CLASSES
            && lent.queue_pairs == CLASSES
            && lent.pinned_bytes >= NODE_BYTES,
        "{first:?} before, {more:?} with it; {lends}"
    );

    process.wait_for_line("probed=0.", GUEST_DEADLINE)?;
    let (_, shrank) = plug(context, "0", None)?;
    process.wait_for_line("shrunk=0.", SHORT)?;
    let left = wait_until_left(context, (2, DONOR_2))?;
    // Connections end before the lease does, on both sides.
    let after = status_with(context, ROOMY_BYTES, 0)?;
    ensure!(
        held_by_node(&left)? == Held::default() && held(&after)? == first,
        "left behind: {left}; {first:?} before, {:?} after",
        held(&after)?
    );
    context.testbed.host(1).check(GO_ON, SHORT)?;

    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    let (fetched, written) = travelled(&guest)?;
    guest.faultprobe_over(NODE_PROBE_BYTES)?;
    let probes = faultprobes(&guest.output.stdout)?;
    let last = probes.last().context("no probe")?;
    ensure!(
        probes.len() == 2
            && last["corrupt_bytes"] == 0
            && last["verified_bytes"].as_u64() >= Some(AFTER_PROBE_BYTES),
        "{probes:?}"
    );
    let rdma = |name: &str| guest.number(&format!("/nodes/2/rdma/{name}"));
    let (by_read, by_write) = (rdma("pages_read")?, rdma("pages_written")?);
    let (served, stored) = joins.stop(context)?;
    ensure!(
        rdma("failures")? == 0.0 && by_read == fetched && served == 0,
        "{fetched} pages fetched, {by_read} by READ, {served} by the donor's process"
    );
    // Write-backs queued behind discards of free pages travel by TCP.
    ensure!(
        by_write > 1000.0 && by_write + stored as f64 == written,
        "{written} pages written, {by_write} by WRITE, {stored} by the donor's process"
    );
    donor.stop(context)?;
    hosts.iter().try_for_each(remove_rxe)?;
    context.note(format!(
        "{NODE} came in {} ms and went in {} ms, emulated; {fetched} pages came by READ, {by_write} of {written} went by WRITE",
        grew.as_millis(),
        shrank.as_millis()
    ));
    Ok(Verdict::Pass)
}

/// Number of traffic classes, each with a connection.
const CLASSES: u64 = 3;

/// RDMA resources of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Held {
    queue_pairs: u64,
    memory_regions: u64,
    pinned_bytes: u64,
}

/// Reads the RDMA resources from the status of a process.
fn held(rdma: &Value) -> anyhow::Result<Held> {
    let devices = rdma["resources"].as_array().context("no resources")?;
    let sum = |name: &str| {
        let each = devices.iter().map(|device| &device[name]["in_use"]);
        each.map(|count| count.as_u64().context("no count"))
            .sum::<anyhow::Result<u64>>()
    };
    Ok(Held {
        queue_pairs: sum("queue_pairs")?,
        memory_regions: sum("memory_regions")?,
        pinned_bytes: number(rdma, "/pinned_bytes/in_use")?,
    })
}

/// Reads those of a donor, which also counts its connections.
fn held_by_node(node: &Value) -> anyhow::Result<Held> {
    let held = held(&node["rdma"])?;
    let endpoints = node["rdma"]["endpoints"].as_array();
    let listed = endpoints.context("no endpoints")?.len() as u64;
    let counted = number(node, "/rdma/connections/in_use")?;
    ensure!(
        listed == held.queue_pairs && counted == held.queue_pairs,
        "{node}"
    );
    Ok(held)
}
