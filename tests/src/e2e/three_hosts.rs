//! Scenarios of a compute node and two donors, each on a separate host.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use serde_json::Value;

use super::donor::{DONOR_3, Donor};
use super::faults::{CUT_TIME, GRACE_LONG, GRACE_SHORT};
use super::guest::{Finished, GUEST_DEADLINE, Guest, PAUSED, SHORT, exit};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// Bytes that the guest writes and verifies: enough that, with its kernel, both donors hold a part.
const PROBE_BYTES: u64 = 128 << 20;
const PROBE: &str = "faultprobe --bytes 128M";
/// Minimum of pages that each donor must have sent and stored: a quarter of what it lends.
const PAGES_MIN: f64 = 5000.0;
/// Deadline for a guest to end after its donor died: the grace time and a margin for a busy host.
const LOSS_DEADLINE: Duration = Duration::from_secs(120);

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "two_donor_hosts",
        about: "a guest's memory is on two other hosts; one of them is cut off for a while, and no byte is lost",
        needs_product: true,
        hosts: Hosts::THREE_6_12,
        run: two_donor_hosts,
    },
    Scenario {
        name: "one_of_two_hosts_dies",
        about: "a donor that dies ends the run, and the other one gets its memory back and serves the next guest",
        needs_product: true,
        hosts: Hosts::THREE_6_12,
        run: one_of_two_hosts_dies,
    },
];

/// 256 MiB: 72 here as home memory, 24 of cache, and the rest in equal parts on hosts 2 and 3.
fn guest(exec: &str, grace: [&'static str; 2]) -> Guest {
    let mut guest = Guest::small(1, exec);
    guest
        .more
        .extend(["--donor", DONOR_3, "--transport", "tcp", "--name", "spread"]);
    guest.more.extend(grace);
    guest
}

fn two_donor_hosts(context: &Context<'_>) -> Result {
    let lease = ["--lease-seconds", "300"];
    let (second, third) = (
        Donor::lending(context, "1G", &lease)?,
        Donor::third_lending(context, "1G", &lease)?,
    );
    let process = guest(PROBE, GRACE_LONG).boot(context)?;

    context.testbed.cut_link(1, 3)?;
    let cut = Instant::now();
    // Until then the hosts, of one emulated CPU each, have no more to do than without the test.
    let paused = process.wait_for_line(PAUSED, SHORT).map(drop);
    let noticed = wait_for_links(context, [true, false]);
    // The time is what the test checks: the guest must not end within it.
    let early = process.wait(CUT_TIME.saturating_sub(cut.elapsed()));
    context.testbed.restore_link(1, 3)?;
    paused?;
    noticed?;
    ensure!(
        early.is_err(),
        "the guest ended while one of its donors was unreachable"
    );

    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(PROBE_BYTES)?;
    check_donors(context, &guest, second, third)?;
    Ok(Verdict::Pass)
}

fn one_of_two_hosts_dies(context: &Context<'_>) -> Result {
    let (second, third) = (Donor::start(context)?, Donor::third(context)?);
    let process = guest("while :; do faultprobe --bytes 128M; done", GRACE_SHORT).boot(context)?;
    third.kill()?;
    let output = process.wait(LOSS_DEADLINE)?;
    let errors = output.stderr.clone();
    Finished::read(context, output)?.expect_exit(exit::DONOR_LOST)?;
    ensure!(
        errors.contains(DONOR_3),
        "the error does not name the donor: {errors}"
    );
    wait_until_free(context, 2)?;

    // The surviving donor, with a replacement for the other, serves the next guest.
    let third = Donor::third(context)?;
    let guest = guest(PROBE, GRACE_SHORT).run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(PROBE_BYTES)?;
    third.stop(context)?;
    second.stop(context)?;
    Ok(Verdict::Pass)
}

/// Waits until the guest's host reports its donors as reachable, or not, as `wanted`.
fn wait_for_links(context: &Context<'_>, wanted: [bool; 2]) -> anyhow::Result<()> {
    let deadline = Instant::now() + SHORT;
    loop {
        let status = status(context.testbed.host(1), &["spread"])?;
        let reachable = |node: usize| &status["vms"][0]["nodes"][node]["link"]["reachable"];
        if [1, 2].map(reachable) == wanted.map(Value::Bool).each_ref() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("reachable must become {wanted:?}: {status}");
        }
    }
}

/// Waits until the donor of a host has all of its memory back.
fn wait_until_free(context: &Context<'_>, host: usize) -> anyhow::Result<()> {
    let deadline = Instant::now() + SHORT;
    loop {
        let status = status(context.testbed.host(host), &[])?;
        if number(&status, "/nodes/0/leases")? == 0 && number(&status, "/nodes/0/lent_bytes")? == 0
        {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the donor on host {host} has not its memory back: {status}");
        }
    }
}

/// Checks that both donors hold much of the guest, and that their counters match the guest's host.
fn check_donors(
    context: &Context<'_>,
    guest: &Finished,
    second: Donor,
    third: Donor,
) -> anyhow::Result<()> {
    for (donor, node) in [(second, 1), (third, 2)] {
        let fetched = guest.number(&format!("/nodes/{node}/pages_fetched"))?;
        let written = guest.number(&format!("/nodes/{node}/pages_written_back"))?;
        ensure!(
            fetched > PAGES_MIN && written > PAGES_MIN,
            "node {node}: {fetched} pages fetched, {written} written back"
        );
        // Pages requested before the cut may have been requested again.
        let (read, stored) = donor.stop(context)?;
        ensure!(
            read as f64 >= fetched && stored as f64 >= written,
            "node {node} counts {read} and {stored}, the guest's host {fetched} and {written}"
        );
        context.note(format!(
            "node {node}: {fetched} pages fetched, {written} written back"
        ));
    }
    Ok(())
}
