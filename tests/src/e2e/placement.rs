//! The scenario of a guest whose memory moves by its heat between a fast donor and a slow one.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::donor::Donor;
use super::guest::{Finished, Guest, SHORT, exit, faultprobes, tail};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::{RemoteProcess, TestbedError};

/// Takes minutes, since blocks have to be hot for half of one before they move.
pub(super) const LONG: &[Scenario] = &[Scenario {
    name: "placement_heat",
    about: "with --placement heat what a guest uses of a slow donor's memory moves to a fast one while it verifies it; no byte is lost",
    needs_product: true,
    hosts: Hosts::THREE_6_12,
    run: heat,
}];

const NAME: &str = "heated";
/// Bytes that the guest writes and verifies at random, again and again: more than half of what its
/// donors hold, so that some is at the slow one.
const PROBE_BYTES: u64 = 160 << 20;
const WORK: &str = "while faultprobe --bytes 160M; do :; done";
const PASS: &str = "FAULTPROBE {";
/// Each has room for what the guest uses, and for half of the rest.
const FAST: &str = "10.77.0.2:7700,memory=256M";
const SLOW: &str = "10.77.0.3:7700,memory=256M";
/// Delay of what the slow donor sends. Blocks move to a donor that takes at most a quarter of the time for
/// a page: 2 ms on hosts with little to do, but 4.5 ms on busy ones. With 80 ms the guest is too slow for
/// any block to be hot.
const DELAY: Duration = Duration::from_millis(40);
/// What may be hot at the slow donor in the end: what the kernel uses now and then.
const SLOW_HOT_MAX: u64 = 8 << 20;
/// What has moved then, at least.
const MOVED_MIN: u64 = 16 << 20;
/// Of the moves, and of a pass: on a busy machine one took 310 s.
const DEADLINE: Duration = Duration::from_secs(900);
const LOOK_EVERY: Duration = Duration::from_secs(5);

fn heat(context: &Context<'_>) -> Result {
    let donors = [
        Donor::lending(context, "320M", &[])?,
        Donor::third_lending(context, "320M", &[])?,
    ];
    context.testbed.netem(3, 1, DELAY, 0)?;
    let mut guest = Guest {
        memory: "384M",
        // With other donors than a guest has otherwise.
        local_memory: None,
        ..Guest::small(1, WORK)
    };
    guest.more.extend(["--local-memory", "96M", "--name", NAME]);
    guest
        .more
        .extend(["--transport", "tcp", "--placement", "heat"]);
    guest.more.extend(["--donor", FAST, "--donor", SLOW]);
    let process = guest.boot(context)?;
    let began = Instant::now();
    let found = until_hot_is_fast(context, &process)?;
    let took = began.elapsed().as_secs();
    // The pass that runs verifies what it reads from now on; a whole one more would take minutes.
    let passes = process.stdout().matches(PASS).count();
    process.wait_for_nth_line(PASS, passes, DEADLINE)?;
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    context.testbed.clear_netem()?;
    // The last line may have been cut by the end.
    let console = &guest.output.stdout;
    let whole_lines = console.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let probes = faultprobes(whole_lines)?;
    let is_right = |probe: &Value| {
        probe["corrupt_bytes"] == 0 && probe["verified_bytes"].as_u64() >= Some(PROBE_BYTES)
    };
    ensure!(
        !probes.is_empty() && probes.iter().all(is_right),
        "{probes:?}"
    );
    for donor in donors {
        donor.end(context)?;
    }
    context.note(format!(
        "{} MiB moved within {took} s of init; then {} MiB were hot at the donor with {:.1} ms a page, \
         {} MiB at the one with {:.1} ms; {} passes verified (emulated)",
        found.moved >> 20,
        found.hot[0] >> 20,
        found.page_us[0] / 1e3,
        found.hot[1] >> 20,
        found.page_us[1] / 1e3,
        probes.len(),
    ));
    Ok(Verdict::Pass)
}

/// What the donors hold: the fast one, and the slow one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Placed {
    moved: u64,
    hot: [u64; 2],
    page_us: [f64; 2],
}

impl Placed {
    fn of(status: &Value) -> anyhow::Result<Self> {
        let placement = &status["vms"][0]["placement"];
        let hot = |donor: usize| number(placement, &format!("/donors/{donor}/hot_bytes"));
        let page_us = |donor: usize| {
            let time = placement["donors"][donor]["page_us"].as_f64();
            time.with_context(|| format!("no time of donor {donor}: {placement}"))
        };
        Ok(Self {
            moved: number(placement, "/moved_by_heat_bytes")?,
            hot: [hot(0)?, hot(1)?],
            page_us: [page_us(0)?, page_us(1)?],
        })
    }

    /// Whether what is hot has moved to the fast donor: most of what the guest uses.
    fn is_settled(&self) -> bool {
        self.moved >= MOVED_MIN && self.hot[0] >= PROBE_BYTES / 2 && self.hot[1] <= SLOW_HOT_MAX
    }
}

/// Waits until what is hot is at the fast donor.
fn until_hot_is_fast(context: &Context<'_>, process: &RemoteProcess) -> anyhow::Result<Placed> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let now = status(context.testbed.host(1), &[NAME, "--placement"])?;
        let placed = Placed::of(&now)?;
        if placed.is_settled() {
            return Ok(placed);
        }
        ensure!(
            Instant::now() < deadline,
            "what is hot is not at the fast donor after {} s: {placed:?}",
            DEADLINE.as_secs()
        );
        // A host has one CPU, which the guest shares with whoever looks at it.
        match process.wait(LOOK_EVERY) {
            Err(TestbedError::Deadline { .. }) => {}
            Err(error) => return Err(error.into()),
            Ok(output) => bail!("the guest ended with {}; {}", output.status, tail(&output)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn memory_is_settled_when_what_is_hot_has_moved_to_the_fast_donor() {
        let of = |moved: u64, fast: u64, slow: u64| {
            let donor = |hot: u64| json!({"hot_bytes": hot << 20, "page_us": 2e3});
            let placement = json!({
                "moved_by_heat_bytes": moved << 20,
                "donors": [donor(fast), donor(slow)],
            });
            Placed::of(&json!({"vms": [{"placement": placement}]})).unwrap()
        };
        assert!(of(48, 160, 0).is_settled() && of(16, 80, 8).is_settled());
        assert!(!of(8, 160, 0).is_settled(), "little has moved");
        assert!(!of(48, 40, 0).is_settled(), "the guest rests");
        assert!(!of(48, 120, 40).is_settled(), "some is at the slow one");
        assert!(Placed::of(&json!({"vms": [{}]})).is_err());
        assert!(WORK.contains(&format!(" {}M;", PROBE_BYTES >> 20)));
    }
}
