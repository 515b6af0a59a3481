//! The scenario of a guest whose donors of the start are both drained onto new ones.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::donor::{DONOR_2, DONOR_3, DONOR_4, Donor};
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit, faultprobes};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "drain",
    about: "both donors of a guest are drained onto new ones on another host while it verifies its memory, then killed; no byte is lost",
    needs_product: true,
    hosts: Hosts::THREE_6_12,
    run: drain,
}];

/// Bytes that the guest writes and verifies, again and again.
const PROBE_BYTES: u64 = 64 << 20;
/// Verifies memory until the power button is pressed.
const WORK: &str = "head -c 24 </dev/input/event0 >/tmp/pressed & \
    until [ -s /tmp/pressed ]; do faultprobe --bytes 64M || break; echo round=$?.; done";

/// Drains a donor of the guest, and returns the message.
fn leave(context: &Context<'_>, node: &str, to: &str) -> anyhow::Result<String> {
    let argv = [
        "ssi-hv", "drain", "leaves", "--node", node, "--to", to, "--wait", "300",
    ];
    let said = context.testbed.host(1).check(&argv, GUEST_DEADLINE)?;
    ensure!(said.contains("has left"), "{said}");
    Ok(said)
}

/// Returns the leases and the lent bytes of all nodes on a host.
fn lent(context: &Context<'_>, host: usize) -> anyhow::Result<(u64, u64)> {
    let status = status(context.testbed.host(host), &[])?;
    let nodes = status["nodes"].as_array().context("no nodes")?;
    ensure!(nodes.len() == 2, "{status}");
    let sum = |pointer: &str| -> anyhow::Result<u64> {
        nodes.iter().map(|node| number(node, pointer)).sum()
    };
    Ok((sum("/leases")?, sum("/lent_bytes")?))
}

fn held(status: &Value) -> anyhow::Result<[u64; 4]> {
    let held = |node: usize| number(status, &format!("/vms/0/nodes/{node}/memory_bytes"));
    Ok([held(1)?, held(2)?, held(3)?, held(4)?])
}

fn drain(context: &Context<'_>) -> Result {
    let here = context.testbed.host(1);
    let old = [Donor::start(context)?, Donor::second(context)?];
    let new = [Donor::third(context)?, Donor::fourth(context)?];
    let mut guest = Guest::small(1, WORK);
    // No more than the guest verifies, so that each round needs the donors.
    guest.local_memory = Some("64M");
    guest.cmdline.push_str(" ssi_modules=\"button evdev\"");
    guest.more.extend(["--donor", DONOR_2, "--name", "leaves"]);
    let process = guest.boot(context)?;
    process.wait_for_line("round=0.", GUEST_DEADLINE)?;

    leave(context, "1", DONOR_3)?;
    leave(context, DONOR_2, DONOR_4)?;
    ensure!(lent(context, 2)? == (0, 0), "{:?}", lent(context, 2)?);
    let now = status(here, &["leaves"])?;
    let [first, second, third, fourth] = held(&now)?;
    ensure!(
        first + second == 0 && third > 0 && fourth > 0 && now["vms"][0]["errors_total"] == 0,
        "{now}"
    );
    old.into_iter().try_for_each(Donor::kill)?;
    let before = process.stdout().matches("round=0.").count();
    // The round that runs, and a whole one after it.
    process.wait_for_nth_line("round=0.", before + 1, GUEST_DEADLINE)?;
    here.check(&["ssi-hv", "shutdown", "leaves"], SHORT)?;

    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let probes = faultprobes(&guest.output.stdout)?;
    let is_right = |probe: &Value| {
        probe["corrupt_bytes"] == 0 && probe["verified_bytes"].as_u64() >= Some(PROBE_BYTES)
    };
    ensure!(
        probes.len() > 2 && probes.iter().all(is_right),
        "{probes:?}"
    );
    let moved = &guest.report["memory"]["drain"];
    ensure!(
        moved["state"] == "done" && moved["moved_bytes"] == moved["bytes"],
        "{moved}"
    );
    for donor in new {
        let (read, written) = donor.stop(context)?;
        ensure!(read > 0 && written > 0, "{read} read, {written} written");
    }
    context.note(format!(
        "{} rounds of 64M verified; {} MiB left the first donor, {} MiB the second",
        probes.len(),
        third >> 20,
        fourth >> 20
    ));
    Ok(Verdict::Pass)
}
