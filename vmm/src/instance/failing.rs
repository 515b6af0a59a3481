//! Donors that fail again and again are drained before they are lost (`--drain-failing`).
//!
//! A failure is a time in which connections to the donor broke, whether or not they could be made
//! again at once. Breaks that are seen within [`APART_MIN`] are one failure: a cable that is pulled
//! breaks all connections. [`FAILURES`] of them within [`WINDOW`] are a donor that is drained. One
//! that cannot be drained stays in use, and is considered again when it had no failure for so long.
//!
//! Where all of two or more donors fail within [`APART_MIN`], the fault is this host's own network,
//! or what they share: none of them is better than another, and it counts against none.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use memory_fabric::NodeId;

use super::drains::{Attempt, Lender, VmDrains};

/// Failures after which a donor is drained: a host that is rebooted, a switch that is replaced and
/// a cable that is moved on the same evening are fewer.
const FAILURES: usize = 5;

/// The time in which they count.
const WINDOW: Duration = Duration::from_secs(600);

/// The shortest time between two failures.
const APART_MIN: Duration = Duration::from_secs(2);

/// Interval between looks at the counters. No donor is lost by a failure that is seen late.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// What is known of a donor.
#[derive(Debug, Default)]
struct Record {
    /// Breaks until the last look, and when the newest was seen.
    breaks: u64,
    broke_at: Option<Instant>,
    /// The failures within [`WINDOW`], the newest [`FAILURES`] of them.
    failures: VecDeque<Instant>,
    /// Whether it was drained, or could not be, since it has failed so often.
    is_settled: bool,
}

impl Record {
    /// Takes the number of breaks so far.
    fn note(&mut self, breaks: u64, now: Instant) {
        let since = |at: &Instant| now.saturating_duration_since(*at);
        self.failures.retain(|at| since(at) < WINDOW);
        if self.failures.is_empty() {
            self.is_settled = false;
        }
        let is_apart = self.failures.back().is_none_or(|at| since(at) >= APART_MIN);
        if breaks > self.breaks && is_apart {
            if self.failures.len() == FAILURES {
                self.failures.pop_front();
            }
            self.failures.push_back(now);
        }
        if breaks > self.breaks {
            self.broke_at = Some(now);
        }
        self.breaks = breaks;
    }

    fn broke_just_now(&self, now: Instant) -> bool {
        let broke_at = self.broke_at;
        broke_at.is_some_and(|at| now.saturating_duration_since(at) < APART_MIN)
    }

    /// Takes back what was counted just now.
    fn forgive(&mut self, now: Instant) {
        let is_new = |at: &Instant| now.saturating_duration_since(*at) < APART_MIN;
        if self.failures.back().is_some_and(is_new) {
            self.failures.pop_back();
        }
    }

    /// Returns whether the donor is to be drained.
    fn is_failing(&self) -> bool {
        self.failures.len() == FAILURES && !self.is_settled
    }
}

/// Takes the number of breaks so far of each donor that lends.
fn note_all(records: &mut HashMap<NodeId, Record>, breaks: &[(NodeId, u64)], now: Instant) {
    for &(node, breaks) in breaks {
        records.entry(node).or_default().note(breaks, now);
    }
    records.retain(|node, _| breaks.iter().any(|(lender, _)| lender == node));
    if records.len() > 1 && records.values().all(|record| record.broke_just_now(now)) {
        records.values_mut().for_each(|record| record.forgive(now));
    }
}

/// Drains donors that fail again and again, in a thread of its own, until the guest ends.
///
/// # Errors
///
/// If the thread cannot be started.
pub fn start(drains: &VmDrains) -> io::Result<()> {
    let (drains, ended) = (drains.clone(), drains.until_end());
    let thread = std::thread::Builder::new().name("drain-failing".into());
    thread.spawn(move || watch(&drains, &ended))?;
    Ok(())
}

/// Looks at the donors until the guest ends, which disconnects `ended`.
fn watch(drains: &VmDrains, ended: &Receiver<()>) {
    let mut records: HashMap<NodeId, Record> = HashMap::new();
    while ended.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let (lenders, mut breaks) = (drains.lenders(), drains.view().breaks());
        breaks.retain(|(node, _)| lenders.iter().any(|lender| lender.node == *node));
        note_all(&mut records, &breaks, Instant::now());
        for lender in lenders {
            let record = records.get_mut(&lender.node);
            if let Some(record) = record.filter(|record| record.is_failing()) {
                record.is_settled = drain(&lender, drains);
            }
        }
    }
}

/// Begins to drain a donor. Returns false to try it again at the next look.
fn drain(lender: &Lender, drains: &VmDrains) -> bool {
    let (name, minutes) = (lender.name(), WINDOW.as_secs() / 60);
    match drains.attempt(lender.node) {
        Attempt::Begun => {
            tracing::warn!(
                "connections to donor {name} have failed {FAILURES} times within {minutes} minutes: its \
                 memory moves to other donors before it is lost (--drain-failing on)"
            );
            true
        }
        // Another drain ends, and a donor that is out of use comes back or is lost.
        Attempt::Later => false,
        Attempt::Empty => true,
        Attempt::Refused(why) => {
            tracing::warn!(
                "connections to donor {name} have failed {FAILURES} times within {minutes} minutes, and it \
                 cannot be drained, so that it stays in use: {why}"
            );
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes failures at these seconds; returns after how many the donor was to be drained.
    fn drained_after(seconds: impl IntoIterator<Item = u64>) -> Option<usize> {
        let start = Instant::now();
        let mut record = Record::default();
        let failures = (1..).zip(seconds);
        let mut decided = failures.map(|(breaks, at)| {
            record.note(breaks, start + Duration::from_secs(at));
            record.is_failing()
        });
        decided
            .position(|is_drained| is_drained)
            .map(|index| index + 1)
    }

    #[test]
    fn five_failures_within_ten_minutes_drain_a_donor() {
        assert_eq!(drained_after([0, 10, 20, 30, 40]), Some(5));
        assert_eq!(drained_after([0, 140, 280, 420, 599]), Some(5));
        assert_eq!(drained_after([0]), None);
        assert_eq!(drained_after([0, 10, 20, 30]), None);
        assert_eq!(drained_after([0, 150, 300, 450, 600]), None, "too seldom");
        assert_eq!(drained_after((0..100).map(|at| at * 151)), None, "for ever");
    }

    #[test]
    fn breaks_at_one_time_are_one_failure() {
        assert_eq!(drained_after([0, 1, 1, 1, 1, 1]), None);
        assert_eq!(drained_after((0..30).map(|at| at / 3)), Some(25));
    }

    #[test]
    fn one_that_cannot_be_drained_is_considered_again_after_a_quiet_time_only() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut record = Record::default();
        let fail = |record: &mut Record, from: u64| {
            let breaks = record.breaks;
            (1..=5_u64).any(|one| {
                record.note(breaks + one, at(from + 10 * one));
                record.is_failing()
            })
        };
        assert!(fail(&mut record, 0));
        record.is_settled = true;
        assert!(!fail(&mut record, 100), "it was refused");
        assert!(!fail(&mut record, 700), "it was not quiet");
        let breaks = record.breaks;
        record.note(breaks, at(1_400));
        assert!(!record.is_failing());
        assert!(fail(&mut record, 1_400));
    }

    /// Passes breaks of three donors at these times in milliseconds; returns their failures.
    fn failures(breaks_at: [&[u64]; 3]) -> [usize; 3] {
        let (start, mut records) = (Instant::now(), HashMap::new());
        for look in (0..60_000).step_by(500) {
            let breaks = breaks_at.map(|all| all.iter().filter(|at| **at <= look).count() as u64);
            let nodes = [1, 2, 3].map(NodeId);
            let all: Vec<_> = nodes.into_iter().zip(breaks).collect();
            note_all(&mut records, &all, start + Duration::from_millis(look));
        }
        [1, 2, 3].map(|node| records[&NodeId(node)].failures.len())
    }

    #[test]
    fn a_fault_of_the_own_network_counts_against_no_donor() {
        let every: Vec<u64> = (1..6).map(|one| one * 10_000).collect();
        assert_eq!(failures([&every, &every, &every]), [0; 3]);
        // It is not seen at all of them in one look.
        let later: Vec<u64> = every.iter().map(|at| at + 600).collect();
        assert_eq!(failures([&every, &later, &every]), [0; 3]);
        assert_eq!(failures([&every, &every, &[]]), [5, 5, 0]);
        assert_eq!(failures([&every, &every, &[30_000]]), [4, 4, 0]);
    }

    #[test]
    fn the_only_donor_fails_by_itself() {
        let mut records = HashMap::new();
        note_all(&mut records, &[(NodeId(1), 1)], Instant::now());
        assert_eq!(records[&NodeId(1)].failures.len(), 1);
    }
}
