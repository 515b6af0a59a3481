//! A scenario in which the guest sees the nodes.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::guest::{DONOR_2, Donor, Guest, exit};
use super::{Context, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "numa",
    about: "the guest sees donors as NUMA nodes, takes memory of one by mbind, and its kernel moves hot pages near",
    needs_product: true,
    run: numa,
}];

/// What the guest is asked for, all in `/sys/devices/system/node`.
const NODES: &str = "cd /sys/devices/system/node; \
    for n in 0 1 2; do a=node$n/access0/initiators; \
    echo NODE $n $(grep MemTotal node$n/meminfo | tr -s ' ' | cut -d' ' -f4) \
    $(cat $a/read_latency $a/write_latency) $(cat node$n/distance) $(ls -d $a/node0); done; \
    echo HAS_CPU $(cat has_cpu) HAS_MEMORY $(cat has_memory); cd /";
/// Memory of a donor that the first probe is bound to, and of the other that the second fills.
const PROBE_BYTES: u64 = 64 << 20;
const PROBES: &str = "faultprobe --bytes 64M --node 2; \
    echo 1 >/proc/sys/kernel/numa_balancing; \
    faultprobe --bytes 64M --node 1 --unbind --passes 3; \
    grep -E 'numa_pages_migrated|pgpromote_success' /proc/vmstat";

/// One GiB: three quarters of 192 MiB at home here, 48 MiB of cache, the rest on two donors.
const HERE_KIB: f64 = 144.0 * 1024.0;
const DONOR_KIB: f64 = 440.0 * 1024.0;

fn numa(context: &Context<'_>) -> Result {
    let (first, second) = (Donor::start(context)?, Donor::second(context)?);
    let guest = Guest {
        local_memory: Some("192M"),
        more: vec!["--numa", "expose", "--donor", DONOR_2, "--transport", "tcp"],
        ..Guest::remote(1, &format!("{NODES}; {PROBES}"))
    };
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let console = &guest.output.stdout;
    check_nodes(console)?;

    let probes: Vec<Value> = console
        .lines()
        .filter_map(|line| line.split_once("FAULTPROBE "))
        .map(|(_, json)| serde_json::from_str(json.trim()))
        .collect::<std::result::Result<_, _>>()?;
    let [bound, moved] = &probes[..] else {
        anyhow::bail!("{} of 2 probes ended", probes.len());
    };
    for probe in &probes {
        let verified = probe["verified_bytes"].as_u64();
        ensure!(
            probe["corrupt_bytes"] == 0 && verified >= Some(PROBE_BYTES),
            "{probe}"
        );
    }
    let passes: Vec<u64> = serde_json::from_value(moved["remote_faults_by_pass"].clone())?;
    context.note(format!(
        "remote faults by pass while hot pages move near: {passes:?}; bound to node 2: {} of {} touches",
        bound["remote_faults"], bound["touches"]
    ));
    let [from, .., to, _] = passes[..] else {
        anyhow::bail!("passes: {passes:?}");
    };
    ensure!(to * 2 < from, "remote faults by pass: {passes:?}");
    ensure!(migrated(console)? > 0, "the guest has moved no page");

    // The second probe used node 1, and only the first one node 2.
    let fetched = |node: usize| guest.number(&format!("/nodes/{node}/pages_fetched"));
    let (read, _) = second.stop(context)?;
    ensure!(fetched(1)? > 0.0 && fetched(2)? > 0.0, "both were used");
    ensure!(
        fetched(2)? == read as f64,
        "node 2: {read} pages read there"
    );
    first.stop(context)?;
    Ok(Verdict::Pass)
}

fn check_nodes(console: &str) -> anyhow::Result<()> {
    let line = |start: &str| {
        // From the end: the kernel prints the command too.
        let mut lines = console.lines().rev();
        lines.find_map(|line| {
            line.split_once(start)
                .map(|(_, rest)| rest.trim().to_owned())
        })
    };
    for (node, bytes) in [(0, HERE_KIB), (1, DONOR_KIB), (2, DONOR_KIB)] {
        let text = line(&format!("NODE {node} ")).with_context(|| format!("no node {node}"))?;
        let fields: Vec<&str> = text.split(' ').collect();
        let [total, read, write, a, b, c, initiator] = fields[..] else {
            anyhow::bail!("node {node}: {text}");
        };
        let total: f64 = total.parse().context("MemTotal")?;
        // The kernel counts neither itself nor its tables.
        ensure!(
            total <= bytes && total >= bytes * 0.6,
            "node {node} has {total} KiB of {bytes}"
        );
        let [read, write]: [u64; 2] = [read.parse()?, write.parse()?];
        ensure!(read > 0 && read == write, "latency of node {node}: {text}");
        let distances: Vec<u8> = [a, b, c]
            .iter()
            .map(|d| d.parse())
            .collect::<std::result::Result<_, _>>()?;
        ensure!(distances[node] == 10, "{text}");
        let others = (0..3).filter(|other| *other != node);
        ensure!(others.clone().all(|other| distances[other] > 20), "{text}");
        ensure!(initiator.ends_with("initiators/node0"), "{text}");
    }
    let sets = line("HAS_CPU ").context("no sets of nodes")?;
    ensure!(sets == "0 HAS_MEMORY 0-2", "CPUs and memory: {sets}");
    Ok(())
}

/// Pages that the guest's kernel has moved between nodes.
fn migrated(console: &str) -> anyhow::Result<u64> {
    let lines = console.lines().rev();
    let mut counts = lines.filter_map(|line| line.split_once("numa_pages_migrated "));
    let (_, count) = counts
        .next()
        .context("the guest does not count moved pages")?;
    Ok(count.trim().parse()?)
}
