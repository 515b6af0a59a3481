//! A guest that gets memory while its CPUs are on two hosts.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::{CLOUD, DEADLINE, Layout, QUIET, TWO, end, said};
use crate::e2e::guest::{Finished, faultprobes, reach_end};
use crate::e2e::{Context, Result, Verdict};

/// The hosts lend just what the guest can have.
const GROWS: Layout = Layout {
    second: ["1", "10.77.0.2:7700,cpus=1,memory=192M,from=ready"],
    // The guest does not clear what it gives back: that would fetch it from the other host.
    modules: "module_blacklist=pvpanic_mmio,virtio_balloon ssi_modules=virtio_mem init_on_alloc=0",
    more: &[
        "--name",
        NAME,
        "--local-memory",
        "192M",
        "--hotplug-memory",
        ADDED,
        "--rng",
        "off",
    ],
    ..TWO
};

const NAME: &str = "grows";
/// Memory that is added: one memory block of Linux.
const ADDED: &str = "128M";
const ADDED_BYTES: f64 = (128 << 20) as f64;
/// Bytes that each CPU writes and verifies each time. A kernel gives movable memory to programs first,
/// and only what is added is movable alone.
const PROBE_BYTES: u64 = 8 << 20;

/// Waits until the guest has more memory, and uses it on each CPU; twice, and in between until it has
/// given it back. The shell and what waits stay on CPU 0.
const WORK: &str = "taskset -p 1 $$; t() { read k t u < /proc/meminfo; }; t; a=$t; \
    for i in 1 2; do echo begins $i; \
    until [ $t -gt $((a+100000)) ]; do usleep 500000; t; done; echo grown $i; \
    for c in 1 0; do taskset -c $c faultprobe --bytes 8M || exit 1; done; echo probed $i; \
    [ $i = 2 ] || until [ $t -lt $((a+30000)) ]; do usleep 500000; t; done; done";

/// Limit of a change of the plugged memory.
const PLUG_DEADLINE: Duration = Duration::from_secs(610);

/// Sets the plugged memory, and waits until the guest has it. Returns the time that took.
fn plug(context: &Context<'_>, size: &str) -> anyhow::Result<Duration> {
    let asked = Instant::now();
    let flags = ["--memory", size, "--wait", "600"];
    let argv = [&["ssi-hv", "hotplug", NAME], &flags[..]].concat();
    context.testbed.host(1).check(&argv, PLUG_DEADLINE)?;
    Ok(asked.elapsed())
}

pub(super) fn grows(context: &Context<'_>) -> Result {
    let nodes = GROWS.nodes(context)?;
    let exec = format!("{QUIET}; {WORK}");
    let process = GROWS.guest(CLOUD, &exec).start(context)?;
    let mut changes = Vec::new();
    let waits_for = |line: &str| {
        let waited = process.wait_for_line(line, DEADLINE);
        waited.map(drop).with_context(|| said(&process, &nodes))
    };
    for turn in ["1", "2"] {
        waits_for(&format!("begins {turn}"))?;
        changes.push(plug(context, ADDED).with_context(|| said(&process, &nodes))?);
        if turn == "1" {
            waits_for("probed 1")?;
            changes.push(plug(context, "0").with_context(|| said(&process, &nodes))?);
        }
    }
    let output = reach_end(context, &process, DEADLINE);
    let output = output.with_context(|| said(&process, &nodes))?;
    let guest = Finished::read(context, output)?;
    GROWS.check(&guest)?;
    let probes = faultprobes(&guest.output.stdout)?;
    let is_right = |probe: &serde_json::Value| {
        probe["corrupt_bytes"] == 0 && probe["verified_bytes"].as_u64() >= Some(PROBE_BYTES)
    };
    ensure!(
        probes.len() == 4 && probes.iter().all(is_right),
        "on CPU 1 and CPU 0, and again: {probes:?}"
    );
    let plugged = guest.number("/memory/hotplug/plugged_bytes")?;
    ensure!(plugged.total_cmp(&ADDED_BYTES).is_eq(), "{plugged} bytes");
    let received = guest.number("/nodes/1/transfers/pages_received")?;
    end(context, nodes)?;
    let seconds: Vec<_> = changes.iter().map(Duration::as_secs).collect();
    context.note(format!(
        "{ADDED} came, went and came in {seconds:?} s; the other host received {received} pages (emulated)"
    ));
    Ok(Verdict::Pass)
}
