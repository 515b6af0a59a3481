//! Scenarios with failures while a guest runs.

use std::time::Duration;

use anyhow::ensure;

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// Grace time of a donor that never returns.
pub(super) const GRACE_SHORT: [&str; 2] = ["--donor-grace", "5"];
/// Grace time of a donor that returns.
pub(super) const GRACE_LONG: [&str; 2] = ["--donor-grace", "120"];
/// Duration of a link cut: longer than a busy host can stall.
pub(super) const CUT_TIME: Duration = Duration::from_secs(5);

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "donor_dies",
        about: "a donor that dies ends the run after the grace time, with its own exit code",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: donor_dies,
    },
    Scenario {
        name: "donor_returns",
        about: "a link that is cut and restored costs the guest time and no byte",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: donor_returns,
    },
    Scenario {
        name: "slow_link",
        about: "a link with delay slows the guest down and loses no byte",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: slow_link,
    },
];

fn donor_dies(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let mut guest = Guest::remote(1, "while :; do faultprobe --bytes 256M; done");
    guest.more.extend(GRACE_SHORT);
    let process = guest.boot(context)?;
    donor.kill()?;
    let output = process.wait(Duration::from_secs(90))?;
    let errors = output.stderr.clone();
    Finished::read(context, output)?.expect_exit(exit::DONOR_LOST)?;
    ensure!(
        errors.contains("10.77.0.2:7700"),
        "the error does not name the donor: {errors}"
    );
    Ok(Verdict::Pass)
}

fn donor_returns(context: &Context<'_>) -> Result {
    let donor = Donor::lending(context, "1G", &["--lease-seconds", "300"])?;
    let mut guest = Guest::small(1, "faultprobe --bytes 64M");
    guest.more.extend(GRACE_LONG);
    let process = guest.boot(context)?;
    context.testbed.cut_link(1, 2)?;
    // The time is what the test checks: the guest must not end within it.
    let early = process.wait(CUT_TIME);
    context.testbed.restore_link(1, 2)?;
    ensure!(
        early.is_err(),
        "the guest ended while its donor was unreachable"
    );
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(64 << 20)?;
    donor.stop(context)?;
    Ok(Verdict::Pass)
}

fn slow_link(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let result = (|| {
        context.testbed.netem(1, 2, Duration::from_millis(2), 0)?;
        Guest::small(1, "faultprobe --bytes 64M").run(context)
    })();
    context.testbed.clear_netem()?;
    let guest = result?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(64 << 20)?;
    donor.stop(context)?;
    Ok(Verdict::Pass)
}
