//! A scenario in which the guest sees the nodes as NUMA nodes.

mod nodes;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::donor::{DONOR_2, Donor};
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit, faultprobes};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use nodes::Way;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "numa",
    about: "the guest sees donors as NUMA nodes, takes memory of one by mbind, and its kernel moves hot pages near",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: numa,
}];

/// Memory that the first probe binds to one donor, and that the second fills on the other.
const PROBE_BYTES: u64 = 64 << 20;
/// Node to which the first probe is bound, and which the second one's memory is on before it moves.
const BOUND_TO: usize = 2;
const MOVED_FROM: usize = 1;
/// Minimum of pages that the first probe fetches from its donor: in each pass those of its memory
/// that exceed the 48 MiB of the cache.
const FROM_DONOR_MIN: u64 = (PROBE_BYTES - (48 << 20)) / 4096;
/// Between the probes the guest waits for its power button, so that the counters can be read.
const BETWEEN: &str = "echo bound=$((1)); head -c 24 <&3 >/dev/null";

/// One GiB: three quarters of the 192 MiB here as home memory, 48 MiB of cache, the rest on two
/// donors.
const SIZES_KIB: [u64; 3] = [144 << 10, 440 << 10, 440 << 10];

fn numa(context: &Context<'_>) -> Result {
    let here = context.testbed.host(1);
    let (first, second) = (Donor::start(context)?, Donor::second(context)?);
    let work = format!(
        "{}; exec 3</dev/input/event0; faultprobe --bytes 64M --node {BOUND_TO}; {BETWEEN}; \
         echo 1 >/proc/sys/kernel/numa_balancing; \
         faultprobe --bytes 64M --node {MOVED_FROM} --unbind --passes 3; \
         grep -E 'numa_pages_migrated|pgpromote_success' /proc/vmstat",
        nodes::SHOW
    );
    let mut guest = Guest {
        memory: "1G",
        local_memory: Some("192M"),
        more: vec!["--numa", "expose", "--donor", DONOR_2, "--transport", "tcp"],
        ..Guest::remote(1, &work)
    };
    guest.more.extend(["--name", "nodes"]);
    guest.cmdline.push_str(" ssi_modules=\"button evdev\"");
    let process = guest.boot(context)?;
    let fetched = || -> anyhow::Result<[u64; 3]> {
        let status = status(here, &["nodes"])?;
        let of = |node: usize| number(&status, &format!("/vms/0/nodes/{node}/pages_fetched"));
        Ok([0, of(1)?, of(2)?])
    };
    let before = fetched()?;
    process.wait_for_line("bound=1", GUEST_DEADLINE)?;
    let after = fetched()?;
    let grown = |node: usize| after[node] - before[node];
    let said = bound_to(&faultprobes(&process.stdout())?, grown)?;
    context.note(said);
    here.check(&["ssi-hv", "shutdown", "nodes"], SHORT)?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let console = &guest.output.stdout;
    let seen = nodes::read(console)?;
    nodes::check_sizes(&seen, &SIZES_KIB)?;
    let ways = [1, 2].map(|node| Way::of_tcp(&guest.report["nodes"][node]));
    let ways = ways.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    nodes::check_speeds(&seen, &ways)?;

    let probes = faultprobes(console)?;
    let [_, moved] = &probes[..] else {
        bail!("{} of 2 probes ended", probes.len());
    };
    check_bytes(moved)?;
    let passes: Vec<u64> = serde_json::from_value(moved["faults_by_pass"].clone())?;
    context.note(format!(
        "faults by pass while hot pages move near: {passes:?}"
    ));
    let [from, .., to, _] = passes[..] else {
        bail!("passes: {passes:?}");
    };
    ensure!(to * 2 < from, "faults by pass: {passes:?}");
    ensure!(migrated(console)? > 0, "the guest has moved no page");

    for (donor, node) in [(first, 1), (second, 2)] {
        let (read, _) = donor.stop(context)?;
        let fetched = guest.number(&format!("/nodes/{node}/pages_fetched"))?;
        ensure!(
            fetched == read as f64,
            "node {node}: {read} pages read there, {fetched} fetched"
        );
    }
    Ok(Verdict::Pass)
}

/// Checks that the first probe's memory came from the node to which it was bound. `grown` returns
/// the pages that each node has sent in the meantime.
fn bound_to(probes: &[Value], grown: impl Fn(usize) -> u64) -> anyhow::Result<String> {
    let [bound] = probes else {
        bail!("{} probes ended before the second one", probes.len());
    };
    check_bytes(bound)?;
    let faults = number(bound, "/faults")?;
    let (there, elsewhere) = (grown(BOUND_TO), grown(MOVED_FROM));
    let said = format!(
        "bound to node {BOUND_TO}: {faults} of {} touches were faults, {there} pages came from there and {elsewhere} from node {MOVED_FROM}",
        bound["touches"]
    );
    // The guest cannot see of what kind a fault is: some find a local page under eviction.
    ensure!(there >= FROM_DONOR_MIN, "{said}");
    ensure!(there * 4 >= faults * 3, "{said}");
    ensure!(elsewhere * 20 <= there, "{said}");
    Ok(said)
}

/// Checks that a probe found what it had written.
fn check_bytes(probe: &Value) -> anyhow::Result<()> {
    let verified = probe["verified_bytes"].as_u64();
    ensure!(
        probe["corrupt_bytes"] == 0 && verified >= Some(PROBE_BYTES),
        "{probe}"
    );
    Ok(())
}

/// Returns the pages that the guest's kernel has migrated between nodes.
fn migrated(console: &str) -> anyhow::Result<u64> {
    let lines = console.lines().rev();
    let mut counts = lines.filter_map(|line| line.split_once("numa_pages_migrated "));
    let (_, count) = counts
        .next()
        .context("the guest does not count moved pages")?;
    Ok(count.trim().parse()?)
}
