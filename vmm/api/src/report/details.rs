//! Parts of the report that not every run has.

use serde::{Deserialize, Serialize};

/// What came of the command of `--exec`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Exec {
    /// The command.
    pub command: String,
    /// How it ended, as a shell has it; `null` when that is not known.
    pub exit_status: Option<u8>,
    /// What it has written to its standard output.
    pub stdout_bytes: u64,
    /// What it has written to its standard error.
    pub stderr_bytes: u64,
}

/// How many faults took how long: pairs of a latency in microseconds and how many took up to that,
/// and more than the pair before. Rising; without pairs that nothing fell into.
pub type Distribution = Vec<(f64, u64)>;

/// The distributions of all kinds of faults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Distributions {
    /// Of remote faults.
    pub remote: Distribution,
    /// Of pages filled with zeroes.
    pub zero: Distribution,
    /// Of pages that were still here.
    pub minor: Distribution,
    /// Of first writes.
    pub write_protect: Distribution,
}

/// The most samples of a [`Timeline`]: as many as a picture has room for. An even number.
pub const TIMELINE_SAMPLES_MAX: usize = 512;

/// Faults in one interval, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FaultCounts {
    /// Remote faults.
    pub remote: u64,
    /// Filled with zeroes.
    pub zero: u64,
    /// Still here.
    pub minor: u64,
    /// First writes.
    pub write_protect: u64,
}

impl FaultCounts {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        self.each(other, u64::saturating_add)
    }

    /// What was added since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        self.each(earlier, u64::saturating_sub)
    }

    fn each(self, other: Self, f: fn(u64, u64) -> u64) -> Self {
        Self {
            remote: f(self.remote, other.remote),
            zero: f(self.zero, other.zero),
            minor: f(self.minor, other.minor),
            write_protect: f(self.write_protect, other.write_protect),
        }
    }
}

/// Faults over time: from the start of the fabric, an interval after the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Timeline {
    /// The length of an interval, in seconds. It doubles when there are too many of them.
    pub interval_s: f64,
    /// The faults of each; the last is shorter.
    pub intervals: Vec<FaultCounts>,
}

impl Timeline {
    /// Nothing yet, with intervals of so many seconds.
    #[must_use]
    pub const fn new(interval_s: f64) -> Self {
        Self {
            interval_s,
            intervals: Vec::new(),
        }
    }

    /// Adds the faults of the next interval. When the list is full pairs become one, and each
    /// interval is twice as long; true then.
    pub fn push(&mut self, counts: FaultCounts) -> bool {
        self.intervals.push(counts);
        if self.intervals.len() < TIMELINE_SAMPLES_MAX {
            return false;
        }
        let pairs = self.intervals.chunks(2);
        self.intervals = pairs
            .map(|pair| pair.iter().fold(FaultCounts::default(), |a, b| a.plus(*b)))
            .collect();
        self.interval_s *= 2.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_has_longer_intervals_and_loses_no_fault() {
        let mut timeline = Timeline::new(1.0);
        let fault = FaultCounts {
            remote: 1,
            ..FaultCounts::default()
        };
        let doubled = (0..2000).filter(|_| timeline.push(fault)).count();
        assert!(doubled > 1 && timeline.intervals.len() < TIMELINE_SAMPLES_MAX);
        let seconds = 2_f64.powi(i32::try_from(doubled).expect("a few"));
        assert!((timeline.interval_s - seconds).abs() < 1e-9);
        let sum: u64 = timeline.intervals.iter().map(|counts| counts.remote).sum();
        assert_eq!(sum, 2000);
    }

    #[test]
    fn counts_are_compared_by_kind() {
        let (less, more) = (1, 5);
        let counts = |n| FaultCounts {
            zero: n,
            ..FaultCounts::default()
        };
        assert_eq!(counts(more).since(counts(less)), counts(4));
        assert_eq!(counts(less).since(counts(more)), counts(0));
    }
}
