//! Scenarios with failures while a guest runs.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit, parse_faultprobe};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::RemoteProcess;

/// Grace time of a donor that never returns.
pub(super) const GRACE_SHORT: [&str; 2] = ["--donor-grace", "5"];
/// Grace time of a donor that returns.
pub(super) const GRACE_LONG: [&str; 2] = ["--donor-grace", "120"];
/// Passes of the guest over its memory, each of which prints a line.
const PROBES: &str = "while faultprobe --bytes 64M; do :; done";
const PROBE: &str = "FAULTPROBE {";
const PROBED_BYTES: u64 = 64 << 20;
/// Waits until a kernel thread waits for a page, and prints its name.
const WAITING: &str = "for i in $(seq 50); do \
    for f in $(grep -ls handle_userfault /proc/[0-9]*/stack); do cat ${f%stack}comm; done | grep kworker && exit; \
    sleep 0.1; done; exit 1";
/// How often a donor is stopped until a kernel thread waits, and the guest's faults in between.
const STOPS_MAX: usize = 8;
const FAULTS_BETWEEN: u64 = 20;
/// How long a process may take to end after SIGKILL.
const KILL_DEADLINE: Duration = Duration::from_secs(20);
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
        about: "a link that is cut and restored costs the guest time and no byte; killed while faults wait, the VM ends",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: donor_returns,
    },
    Scenario {
        name: "slow_link",
        about: "a link with delay slows the guest down and loses no byte; killed while faults wait, the VM ends",
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
    let mut guest = Guest::small(1, PROBES);
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
    check_probe(&process)?;
    killed_while_faults_wait(context, &process, donor)
}

fn slow_link(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let result = (|| {
        context.testbed.netem(1, 2, Duration::from_millis(2), 0)?;
        let mut guest = Guest::small(1, PROBES);
        guest.more.extend(GRACE_LONG);
        let process = guest.boot(context)?;
        check_probe(&process)?;
        anyhow::Ok(process)
    })();
    context.testbed.clear_netem()?;
    killed_while_faults_wait(context, &result?, donor)
}

/// Waits until the guest has verified a pass over its memory.
fn check_probe(process: &RemoteProcess) -> anyhow::Result<()> {
    let line = process.wait_for_line(PROBE, GUEST_DEADLINE)?;
    let probe = parse_faultprobe(&line)?;
    ensure!(
        probe["corrupt_bytes"] == 0 && probe["verified_bytes"].as_u64() >= Some(PROBED_BYTES),
        "{probe}"
    );
    Ok(())
}

/// Stops a donor, and returns which kernel thread of KVM waits for one of its pages. The guest's first
/// fault then may be one for which the vCPU waits itself, so that no other follows: the donor runs
/// again until the guest has got on, and is stopped once more.
fn stop_until_one_waits(context: &Context<'_>, donor: &Donor) -> anyhow::Result<String> {
    let (host, there) = (context.testbed.host(1), context.testbed.host(2));
    let faults = || number(&status(host, &[])?, "/vms/0/faults/remote/count");
    for _ in 0..STOPS_MAX {
        there.signal(donor.pid(), libc::SIGSTOP)?;
        let waiting = host.run(&["sh", "-c", WAITING], SHORT)?;
        if waiting.status.code == 0 {
            return Ok(waiting.stdout);
        }
        let wanted = faults()? + FAULTS_BETWEEN;
        there.signal(donor.pid(), libc::SIGCONT)?;
        let deadline = Instant::now() + GUEST_DEADLINE;
        while faults()? < wanted {
            ensure!(Instant::now() < deadline, "the guest needs no page");
        }
    }
    anyhow::bail!("no kernel thread waits for a page of a donor that was stopped {STOPS_MAX} times")
}

/// Kills a VM while a kernel thread of KVM waits for a page of a donor that is stopped; its process must end.
/// A bare program in the same state ends too, but not with the descriptors in the other order.
fn killed_while_faults_wait(context: &Context<'_>, vm: &RemoteProcess, donor: Donor) -> Result {
    let host = context.testbed.host(1);
    let waiting = stop_until_one_waits(context, &donor)?;
    host.signal(vm.pid(), libc::SIGKILL)?;
    let killed = vm.wait(KILL_DEADLINE).context("after SIGKILL")?;
    ensure!(killed.status.signal == libc::SIGKILL, "{}", killed.status);
    donor.kill()?;

    let mut seen = Vec::new();
    for (order, end) in [("high", "ended by signal 9"), ("low", "does not end")] {
        let said = host.check(&["testbed-agent", "pending", order], SHORT)?;
        ensure!(
            said.contains("fault of kworker") && said.contains(end),
            "{order}: {said}"
        );
        let outcome = said.lines().nth(1).unwrap_or_default();
        seen.push(format!("{order} number: {}", outcome.trim_end_matches(':')));
        // It was a page that it waited for, and nothing is left behind.
        let rescued = order == "high" || said.contains("ended when its page was filled");
        ensure!(rescued, "{order}: {said}");
    }
    context.note(format!(
        "killed while {} waited for a page; bare, {}",
        waiting.trim(),
        seen.join(", ")
    ));
    Ok(Verdict::Pass)
}
