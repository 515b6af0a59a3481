//! Scenarios with UDP only.

use std::time::Duration;

use anyhow::ensure;

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// Percentage of packets lost in each direction.
const LOSS_PERCENT: u8 = 5;
/// Workload of guests.
const PROBE: &str = "faultprobe --bytes 48M";
const PROBE_BYTES: u64 = 48 << 20;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "udp_loss",
    about: "a guest whose memory comes by UDP boots over a link that loses packets, and no byte is lost",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: loss,
}];

fn loss(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    for (from, to) in [(1, 2), (2, 1)] {
        context
            .testbed
            .netem(from, to, Duration::ZERO, LOSS_PERCENT)?;
    }
    let result = (|| {
        let mut guest = Guest::small(1, PROBE);
        guest.more.extend(["--transport", "udp"]);
        let process = guest.boot(context)?;
        let by_tcp = ["ss", "-Htn", "state", "established", "sport = :7700"];
        let by_tcp = context.testbed.host(2).check(&by_tcp, SHORT)?;
        ensure!(by_tcp.trim().is_empty(), "TCP is used too: {by_tcp}");
        Finished::read(context, process.wait(GUEST_DEADLINE)?)
    })();
    context.testbed.clear_netem()?;
    let guest = result?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(PROBE_BYTES)?;
    let transport = &guest.report["transport"];
    ensure!(transport["kind"] == "udp", "transport {transport}");
    let path = &guest.report["nodes"][1]["path"];
    // With this much loss the measurement may yield nothing.
    ensure!(
        path["faults"] == "udp" && path["bulk"] == "udp" && path["tcp"].is_null(),
        "the way to the donor is {path}"
    );
    let faults = guest.number("/faults/remote/count")?;
    ensure!(faults > 0.0, "nothing was fetched");
    context.note(format!(
        "{faults} remote faults with {LOSS_PERCENT} % of packets lost each way: p50 {:.0} us, p99 {:.0} us (emulated)",
        guest.number("/faults/remote/latency_us/p50")?,
        guest.number("/faults/remote/latency_us/p99")?,
    ));
    let (read, written) = donor.stop(context)?;
    ensure!(read > 0 && written > 0, "{read} read, {written} written");
    Ok(Verdict::Pass)
}
