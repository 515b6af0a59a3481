//! A scenario that compares the latency of faults as the guest and as the pager measure it.

use std::ops::RangeInclusive;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::control::ask;
use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// A press of the power button is four events of 24 bytes, and becomes a line of the probe's input.
/// The guest has 128 MiB of local memory. A kernel that has just booted allocates pages in the
/// order of their addresses, so a stride in the probe's memory is mostly a stride in the guest's.
const WORK: &str = "exec 3</dev/input/event0; mkfifo /tmp/presses; \
    (while head -c 96 <&3 >/dev/null; do echo; done) >/tmp/presses & \
    faultprobe --bytes 288M --kinds 128M </tmp/presses";
/// The visited pages are compared: twice 3000.
const VERIFIED_BYTES: u64 = 6000 * 4096;
const NAME: &str = "kinds";
/// Share by which both medians may differ.
const DIFFERENCE_MAX: f64 = 0.25;
/// Share of the visits of a phase that must have found their page as it is meant to be there: of
/// the first one remote, as the pager counts remote faults, and of the other one not. The guest's
/// kernel has faults of its own, so they may be more.
const AS_MEANT_MIN: f64 = 0.8;
/// Minor faults that give a median. The pager maps up to 32 pages at once.
const MINOR_MIN: u64 = 60;

/// Compares times.
pub(super) const MEASURED: &[Scenario] = &[Scenario {
    name: "fault_latency_agrees",
    about: "the guest's median of remote faults is the pager's, plus what every fault costs outside the pager",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: fault_latency_agrees,
}];

fn fault_latency_agrees(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let mut guest = Guest::remote(1, WORK);
    guest.cmdline.push_str(" ssi_modules=\"button evdev\"");
    guest.more.extend(["--name", NAME]);
    let process = guest.boot(context)?;
    let socket = format!("vm-{}-{NAME}", process.pid());
    let host = context.testbed.host(1);
    let at = |place: &str| -> anyhow::Result<Value> {
        process.wait_for_line(&format!("FAULTPROBE-AT {place}"), GUEST_DEADLINE)?;
        let report = ask(context, &socket, "GET", "/v1/report", "")?;
        host.check(&["ssi-hv", "shutdown", NAME], SHORT)?;
        Ok(report)
    };
    let filled = at("filled")?;
    let fetched = at("remote pages visited")?;
    let found = at("fetched pages visited")?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let probe = guest.faultprobe_over(VERIFIED_BYTES)?;
    donor.stop(context)?;

    let remote = Compared::remote(&probe["remote"], &filled, &fetched)?;
    let minor = Compared::minor(&probe["ahead"], &fetched, &found)?;
    // A minor fault is short in the pager, so the rest of it is what a fault costs the guest
    // outside. A remote one costs up to as much: some of it passes while the page is on its way.
    let outside = minor.guest_us - minor.pager_us;
    let possible = remote.guest_us - outside..=remote.guest_us;
    let difference = difference(&possible, remote.pager_us);
    context.note(format!(
        "p50 of {} remote faults: {:.0} us in the guest, {:.0} us in the pager; of {} minor faults: {:.0} us in the \
         guest, {:.0} us in the pager, so up to {outside:.0} us of a fault are outside the pager; the pager's \
         differs by {:.1} % (emulated)",
        remote.faults,
        remote.guest_us,
        remote.pager_us,
        minor.faults,
        minor.guest_us,
        minor.pager_us,
        difference * 100.0,
    ));
    ensure!(
        outside > 0.0,
        "minor faults take longer in the pager than in the guest"
    );
    ensure!(
        difference <= DIFFERENCE_MAX,
        "{:.1} % between guest and pager, {:.0} % is the limit",
        difference * 100.0,
        DIFFERENCE_MAX * 100.0
    );
    Ok(Verdict::Pass)
}

/// Returns by which share of `value` it is outside a range, or 0.
fn difference(range: &RangeInclusive<f64>, value: f64) -> f64 {
    let outside = (range.start() - value).max(value - range.end()).max(0.0);
    outside / value
}

/// The medians of one phase.
struct Compared {
    faults: u64,
    guest_us: f64,
    pager_us: f64,
}

impl Compared {
    /// Compares what the guest saw of visits that all were remote faults with what the pager
    /// counted between two reports.
    fn remote(seen: &Value, before: &Value, after: &Value) -> anyhow::Result<Self> {
        let visits = seen["visits"].as_f64().context("visits")?;
        let (faults, pager_us) = faults_between(before, after, "remote")?;
        ensure!(
            faults as f64 >= visits * AS_MEANT_MIN,
            "{faults} remote faults in the pager for {visits} visits"
        );
        Ok(Self {
            faults,
            guest_us: seen["latency_us"]["p50"].as_f64().context("p50")?,
            pager_us,
        })
    }

    /// The same of visits of which some were minor faults, and fewer remote ones.
    fn minor(seen: &Value, before: &Value, after: &Value) -> anyhow::Result<Self> {
        let visits = seen["visits"].as_u64().context("visits")?;
        let slowest_first: Vec<f64> = serde_json::from_value(seen["slowest_first_us"].clone())?;
        let (faults, pager_us) = faults_between(before, after, "minor")?;
        let slower = median_between(
            &distribution(before, "remote")?,
            &distribution(after, "remote")?,
        );
        let slower = slower.map_or(0, |(remote, _)| remote);
        ensure!(
            slower as f64 <= visits as f64 * (1.0 - AS_MEANT_MIN),
            "{slower} remote faults in the pager for {visits} visits of pages that were fetched ahead"
        );
        ensure!(
            faults >= MINOR_MIN && slower < faults,
            "{faults} minor and {slower} remote faults in the pager: a median needs {MINOR_MIN} minor ones, and \
             fewer remote ones"
        );
        let guest_us = at_rank(&slowest_first, slower + faults / 2, visits).context("no visit")?;
        Ok(Self {
            faults,
            guest_us,
            pager_us,
        })
    }
}

/// Returns the latency of the visit than which `rank` of all visits were slower, as far as it is
/// known from some of them.
fn at_rank(slowest_first: &[f64], rank: u64, visits: u64) -> Option<f64> {
    let listed = u64::try_from(slowest_first.len()).ok()?;
    let index = (rank * listed).checked_div(visits)?;
    slowest_first.get(usize::try_from(index).ok()?).copied()
}

/// How many faults of a kind came between two reports, and their median in the pager.
fn faults_between(before: &Value, after: &Value, kind: &str) -> anyhow::Result<(u64, f64)> {
    median_between(&distribution(before, kind)?, &distribution(after, kind)?)
        .with_context(|| format!("the pager counted no {kind} fault"))
}

/// The pairs of a latency and how many faults took up to that and more than the one before.
type Distribution = Vec<(f64, u64)>;

fn distribution(report: &Value, kind: &str) -> anyhow::Result<Distribution> {
    let pairs = report["distributions"][kind].clone();
    serde_json::from_value(pairs).with_context(|| format!("distribution of {kind} faults"))
}

/// How many faults came between two distributions, and their median.
fn median_between(before: &Distribution, after: &Distribution) -> Option<(u64, f64)> {
    let count_before = |latency: f64| {
        let same = before.iter().find(|(other, _)| *other == latency);
        same.map_or(0, |(_, count)| *count)
    };
    let grown: Distribution = after
        .iter()
        .map(|(latency, count)| (*latency, count.saturating_sub(count_before(*latency))))
        .collect();
    let all: u64 = grown.iter().map(|(_, count)| count).sum();
    let mut below = 0;
    let (median, _) = grown.iter().find(|(_, count)| {
        below += count;
        below * 2 >= all && all > 0
    })?;
    Some((all, *median))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_outside_a_range_differs_from_it() {
        for (value, share) in [(100.0, 1.0), (200.0, 0.0), (300.0, 0.0), (400.0, 0.25)] {
            assert_eq!(difference(&(200.0..=300.0), value), share, "{value}");
        }
    }

    #[test]
    fn the_median_of_minor_faults_is_behind_the_remote_ones() {
        let mut slowest_first = vec![3000.0; 3];
        slowest_first.extend([700.0; 30]);
        slowest_first.extend([70.0; 267]);
        // Of 3000 visits 30 were remote and 300 minor faults.
        assert_eq!(at_rank(&slowest_first, 30 + 150, 3000), Some(700.0));
        assert_eq!(at_rank(&slowest_first, 0, 3000), Some(3000.0));
        assert_eq!(at_rank(&slowest_first, 3000, 3000), None);
    }

    #[test]
    fn the_median_is_that_of_the_faults_between() {
        let before = vec![(10.0, 100), (20.0, 5)];
        let after = vec![(10.0, 101), (20.0, 6), (30.0, 1), (40.0, 4)];
        assert_eq!(median_between(&before, &after), Some((7, 40.0)));
        assert_eq!(median_between(&before, &before), None);
        assert_eq!(median_between(&Vec::new(), &before), Some((105, 10.0)));
    }
}
