//! The demo's path for machines with hardware virtualization, which a testbed host has.

use anyhow::{Context as _, ensure};
use kernel_images::programs;

use super::guest::{GUEST_DEADLINE, SHORT, tail};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// Bytes that the demo's small guest writes and verifies.
const PROBE_BYTES: u64 = 64 << 20;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "demo_on_hardware",
    about: "the demo runs donor and guest on one machine with hardware virtualization, and no byte is lost",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: demo_on_hardware,
}];

fn demo_on_hardware(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let demo = [
        "/share/demo",
        "--share",
        "/share",
        "--small",
        "--transport",
        "tcp",
    ];
    let output = host.run(&demo, GUEST_DEADLINE)?;
    ensure!(
        output.status.code == 0,
        "the demo ended with {}; {}",
        output.status,
        tail(&output)
    );
    ensure!(
        output.stdout.contains("over loopback") && output.stdout.contains("0 corrupt bytes"),
        "{}",
        tail(&output)
    );
    let there = programs::workspace().join("target/demo/report.json");
    let here = context.artifacts.join("report.json");
    host.get(&there.display().to_string(), &here)?;
    let text = std::fs::read_to_string(&here)?;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    ensure!(report["demo"]["hosts"] == "this machine", "{report}");
    let probe = &report["faultprobe"];
    ensure!(
        probe["corrupt_bytes"] == 0 && probe["verified_bytes"].as_u64() >= Some(PROBE_BYTES),
        "{probe}"
    );
    let fetched = report["nodes"][1]["pages_fetched"].as_u64();
    ensure!(
        fetched > Some(1000),
        "{fetched:?} pages came from the donor"
    );
    let time = |name: &str| report["boot"][name].as_f64().context("no time to init");
    context.note(format!(
        "init after {:.0} ms, {:.0} ms with all memory local (emulated)",
        time("to_init_ms")?,
        time("local_to_init_ms")?
    ));
    let left = "grep -lx ssi-hv /proc/[0-9]*/comm";
    let left = host.run(&["sh", "-c", left], SHORT)?;
    ensure!(left.stdout.is_empty(), "left behind: {}", left.stdout);
    Ok(Verdict::Pass)
}
