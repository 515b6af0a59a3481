//! Distinguishes a VM that hangs from one whose emulated hosts are slow.
//!
//! A VM hangs when nothing that it counts has changed for as long as a step may take. How long that is
//! follows from the time in which its guest has booted.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;

use crate::e2e::copies::Copies;
use crate::e2e::status::number;

/// How long a step may take on hosts of the usual speed: a connection that was given up is made anew after
/// at most some seconds.
const STEP_USUAL: Duration = Duration::from_secs(60);
/// In what time a guest boots on such hosts.
const BOOT_USUAL: Duration = Duration::from_secs(10);
/// No host is taken to be slower than this many times.
const SLOWER_MAX: u32 = 6;
/// Steps after which a VM that does something, and not what it should, counts as hung.
const STEPS_MAX: u32 = 8;
/// Pages that must travel before a VM counts as recovered. All of them need the donor; the first one may
/// have been on its way.
const TRAVELLED_MIN: u64 = 20;

/// What a VM has done since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Pages that came from donors or went there.
    pub travelled: u64,
    /// Faults of every kind.
    pub faults: u64,
    /// Pages that left local memory.
    pub evicted: u64,
    /// Passes over its memory that the guest has verified.
    pub passes: usize,
    /// Memory that lacks a copy.
    pub degraded_bytes: u64,
    /// Donors that the VM should use and does not.
    pub out: usize,
    /// Whether it has noticed the loss of the one that is lost.
    pub is_loss_known: bool,
}

/// The donors of a VM, by their addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Donors<'a> {
    /// Those that it should use.
    pub used: &'a [&'a str],
    /// The one that was lost last.
    pub lost: Option<&'a str>,
}

impl Progress {
    /// Reads it from a status with one VM, and its console.
    pub fn of(status: &Value, console: &str, donors: Donors<'_>) -> anyhow::Result<Self> {
        let count = |pointer: &str| number(status, &format!("/vms/0/{pointer}"));
        let mut faults = 0;
        for kind in ["remote", "zero", "minor", "write_protect"] {
            faults += count(&format!("faults/{kind}/count"))?;
        }
        let nodes = status.pointer("/vms/0/nodes").and_then(Value::as_array);
        let mut travelled = 0;
        for node in nodes.context("no nodes")?.iter().skip(1) {
            travelled += number(node, "/pages_fetched")? + number(node, "/pages_written_back")?;
        }
        let copies = Copies::of(status)?;
        Ok(Self {
            travelled,
            faults,
            evicted: count("evictions/total")?,
            passes: passes(console),
            degraded_bytes: copies.degraded_bytes,
            out: donors
                .used
                .iter()
                .filter(|used| copies.is_out(used))
                .count(),
            is_loss_known: donors.lost.is_some_and(|lost| copies.is_out(lost)),
        })
    }
}

/// Counts the passes that a guest has verified by its console.
fn passes(console: &str) -> usize {
    console.matches("FAULTPROBE {").count()
}

/// What a VM must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// Pages travel, or the guest has verified a pass.
    Recovered,
    /// The guest has verified so many passes.
    Passes(usize),
    /// The loss of a donor is known, and its copies are on others.
    Repaired,
    /// Every page has all of its copies on donors that are used.
    Whole,
}

impl Goal {
    fn is_reached(self, first: Progress, now: Progress) -> bool {
        let passes = now.passes.saturating_sub(first.passes);
        match self {
            Self::Recovered => {
                passes > 0 || now.travelled.saturating_sub(first.travelled) >= TRAVELLED_MIN
            }
            Self::Passes(wanted) => passes >= wanted,
            Self::Repaired => now.is_loss_known && now.degraded_bytes == 0,
            Self::Whole => now.out == 0 && now.degraded_bytes == 0,
        }
    }

    /// How many steps the goal may take in all.
    fn steps(self) -> u32 {
        match self {
            Self::Recovered | Self::Repaired | Self::Whole => STEPS_MAX,
            // A pass is long, and each of its pages a step.
            Self::Passes(_) => 2 * STEPS_MAX,
        }
    }
}

/// The judgement on a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// The goal is reached.
    Reached,
    /// It may still reach it.
    Pending,
    /// It hangs, and why that is known.
    Hung(String),
}

/// Judges looks at a VM, one after the other.
#[derive(Debug)]
pub(super) struct Judge {
    goal: Goal,
    step: Duration,
    begin: Instant,
    first: Option<Progress>,
    last: Option<Progress>,
    changed: Instant,
}

impl Judge {
    /// Begins to judge a VM whose guest has booted in `booted`.
    pub fn new(goal: Goal, booted: Duration, begin: Instant) -> Self {
        Self {
            goal,
            step: step(booted),
            begin,
            first: None,
            last: None,
            changed: begin,
        }
    }

    /// Judges a look; `None` if the VM did not answer.
    pub fn look(&mut self, now: Instant, progress: Option<Progress>) -> Seen {
        if let Some(progress) = progress {
            let first = *self.first.get_or_insert(progress);
            if self.goal.is_reached(first, progress) {
                return Seen::Reached;
            }
            if self.last.replace(progress) != Some(progress) {
                self.changed = now;
            }
        }
        let limit = self.step * self.goal.steps();
        if now - self.changed > self.step {
            let seconds = self.step.as_secs();
            Seen::Hung(format!("nothing has changed for {seconds} s"))
        } else if now - self.begin > limit {
            let seconds = limit.as_secs();
            let (first, last) = (self.first, self.last);
            Seen::Hung(format!(
                "{:?} not reached in {seconds} s: from {first:?} to {last:?}",
                self.goal
            ))
        } else {
            Seen::Pending
        }
    }
}

/// How long a step may take on hosts on which a guest has booted in this time.
fn step(booted: Duration) -> Duration {
    let slower = booted.as_secs_f64() / BOOT_USUAL.as_secs_f64();
    STEP_USUAL.mul_f64(slower.clamp(1.0, f64::from(SLOWER_MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOTED: Duration = Duration::from_secs(20);

    fn after(begin: Instant, seconds: u64) -> Instant {
        begin + Duration::from_secs(seconds)
    }

    fn evicted(evicted: u64) -> Option<Progress> {
        Some(Progress {
            evicted,
            ..Progress::default()
        })
    }

    #[test]
    fn a_slow_vm_that_does_anything_is_not_hung() {
        let begin = Instant::now();
        let mut judge = Judge::new(Goal::Recovered, BOOTED, begin);
        for step in 0..9 {
            let seen = judge.look(after(begin, step * 100), evicted(step));
            assert_eq!(seen, Seen::Pending, "{step}");
        }
        let mut travelled = evicted(9).unwrap();
        travelled.travelled = TRAVELLED_MIN;
        let seen = judge.look(after(begin, 919), Some(travelled));
        assert_eq!(seen, Seen::Reached);
    }

    #[test]
    fn a_vm_that_does_nothing_is_hung_later_where_hosts_are_slow() {
        let begin = Instant::now();
        let mut judge = Judge::new(Goal::Recovered, BOOTED, begin);
        assert_eq!(judge.look(begin, evicted(7)), Seen::Pending);
        assert_eq!(judge.look(after(begin, 119), evicted(7)), Seen::Pending);
        let seen = judge.look(after(begin, 121), evicted(7));
        assert_eq!(seen, Seen::Hung("nothing has changed for 120 s".into()));
        assert_eq!(step(Duration::from_secs(1)), STEP_USUAL);
        assert_eq!(step(Duration::from_secs(1000)), STEP_USUAL * SLOWER_MAX);
    }

    #[test]
    fn a_vm_that_never_answers_or_never_fetches_is_hung() {
        let begin = Instant::now();
        let mut silent = Judge::new(Goal::Recovered, BOOTED, begin);
        assert_eq!(silent.look(after(begin, 60), None), Seen::Pending);
        assert!(matches!(
            silent.look(after(begin, 121), None),
            Seen::Hung(_)
        ));
        let mut local = Judge::new(Goal::Recovered, BOOTED, begin);
        let seen = (0..=10).map(|step| local.look(after(begin, step * 100), evicted(step)));
        assert!(matches!(seen.last(), Some(Seen::Hung(_))));
    }

    #[test]
    fn a_vm_is_whole_again_when_a_known_loss_is_repaired_and_all_donors_are_used() {
        let mut now = Progress::default();
        assert!(!Goal::Repaired.is_reached(now, now), "not noticed");
        assert!(Goal::Whole.is_reached(now, now));
        now.is_loss_known = true;
        now.degraded_bytes = 2 << 20;
        assert!(!Goal::Repaired.is_reached(now, now) && !Goal::Whole.is_reached(now, now));
        now.degraded_bytes = 0;
        now.out = 1;
        assert!(Goal::Repaired.is_reached(now, now) && !Goal::Whole.is_reached(now, now));
    }

    #[test]
    fn progress_is_that_of_all_donors() {
        let count = serde_json::json!({"count": 1});
        let donor = |id: u32| {
            serde_json::json!({
                "id": id, "address": format!("a:{id}"), "pages_fetched": 10, "pages_written_back": 5,
            })
        };
        let status = serde_json::json!({"vms": [{
            "faults": {"remote": count, "zero": count, "minor": count, "write_protect": count},
            "evictions": {"total": 3},
            "nodes": [{"id": 0, "address": null}, donor(1), donor(2), donor(3)],
            "memory": {"replicas": {"degraded_bytes": 4096, "out": [2, 3]}},
        }]});
        let of = |used: &[&str], lost| {
            let donors = Donors { used, lost };
            Progress::of(&status, "FAULTPROBE {}\n", donors).unwrap()
        };
        let now = of(&["a:1", "a:3"], Some("a:2"));
        assert_eq!((now.travelled, now.faults, now.passes), (45, 4, 1));
        assert_eq!((now.degraded_bytes, now.out), (4096, 1));
        assert!(now.is_loss_known && !of(&[], Some("a:1")).is_loss_known);
        assert!(!of(&[], None).is_loss_known);
    }

    #[test]
    fn passes_are_counted_from_the_first_look() {
        let begin = Instant::now();
        let mut judge = Judge::new(Goal::Passes(2), BOOTED, begin);
        let with = |passes| {
            Some(Progress {
                passes,
                ..Progress::default()
            })
        };
        assert_eq!(judge.look(begin, with(5)), Seen::Pending);
        assert_eq!(judge.look(after(begin, 1), with(6)), Seen::Pending);
        assert_eq!(judge.look(after(begin, 2), with(7)), Seen::Reached);
    }
}
