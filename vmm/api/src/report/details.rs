//! Parts of the report that not every run has.

use serde::{Deserialize, Serialize};

/// The result of the command of `--exec`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Exec {
    /// The command.
    pub command: String,
    /// Its exit status as a shell reports it; `null` when unknown.
    pub exit_status: Option<u8>,
    /// Bytes written to its standard output.
    pub stdout_bytes: u64,
    /// Bytes written to its standard error.
    pub stderr_bytes: u64,
}

/// A device with limits of its rate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RateLimited {
    /// The device: `disk0`, `net0` and so on.
    pub device: String,
    /// Bytes per second, of a network card in each direction; `null` without a limit.
    pub bytes_per_second: Option<u64>,
    /// Requests or packets per second; `null` without a limit.
    pub operations_per_second: Option<u64>,
    /// How often a request or packet had to wait for them.
    pub throttled: u64,
}

/// State of a donor that is drained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DrainState {
    /// Its memory moves to other donors.
    #[default]
    Moving,
    /// All has moved; its lease is ending.
    Leaving,
    /// It holds no memory of this VM any more.
    Done,
    /// Some of it stayed.
    Failed,
}

impl DrainState {
    /// Its word in texts and in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Moving => "moving",
            Self::Leaving => "leaving",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

/// A donor that is drained or was.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DrainUsed {
    /// Its id.
    pub node: u32,
    /// State.
    pub state: DrainState,
    /// Memory of the guest that it held at the beginning.
    pub bytes: u64,
    /// How much of it has moved to other donors.
    pub moved_bytes: u64,
    /// Why some of it stayed; `null` unless that has happened.
    pub error: Option<String>,
}

/// State of a rebalancing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum RebalanceState {
    /// Memory moves to donors with less than their share.
    #[default]
    Moving,
    /// All of it has moved.
    Done,
    /// It was stopped; the rest stays where it was.
    Stopped,
    /// Some of it could not move.
    Failed,
}

impl RebalanceState {
    /// Its word in texts and in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Moving => "moving",
            Self::Done => "done",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

/// Memory that moves, or has moved, to donors with less than their share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RebalanceUsed {
    /// State.
    pub state: RebalanceState,
    /// Bytes at donors, of copies or pieces, that are to move.
    pub bytes: u64,
    /// How much of that has moved.
    pub moved_bytes: u64,
    /// Why some of it stayed; `null` unless that has happened.
    pub error: Option<String>,
}

/// How many faults took how long: rising pairs of a latency in microseconds and the number of
/// faults that took up to that and more than the previous pair. Empty pairs are omitted.
pub type Distribution = Vec<(f64, u64)>;

/// The distributions of all kinds of faults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Distributions {
    /// Remote faults.
    pub remote: Distribution,
    /// Pages filled with zeroes.
    pub zero: Distribution,
    /// Pages whose bytes were local.
    pub minor: Distribution,
    /// First writes.
    pub write_protect: Distribution,
}

/// Limit of samples of a [`Timeline`], an even number: as many as a chart has room for.
pub const TIMELINE_SAMPLES_MAX: usize = 512;

/// Faults in one interval, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FaultCounts {
    /// Remote faults.
    pub remote: u64,
    /// Filled with zeroes.
    pub zero: u64,
    /// Pages whose bytes were local.
    pub minor: u64,
    /// First writes.
    pub write_protect: u64,
}

impl FaultCounts {
    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        self.each(other, u64::saturating_add)
    }

    /// The difference to `earlier`.
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

/// Faults over time since the start of the fabric, in consecutive intervals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Timeline {
    /// The length of an interval, in seconds. It doubles when there are too many intervals.
    pub interval_s: f64,
    /// The faults of each interval; the last one is shorter.
    pub intervals: Vec<FaultCounts>,
}

impl Timeline {
    /// Creates an empty timeline with intervals of this many seconds.
    #[must_use]
    pub const fn new(interval_s: f64) -> Self {
        Self {
            interval_s,
            intervals: Vec::new(),
        }
    }

    /// Adds the faults of the next interval. When the list is full, pairs are merged and the
    /// interval doubles; returns true then.
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

/// Memory on donors with two copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ReplicasUsed {
    /// K+M of stripes; `null` with two copies. What is said of copies holds for pieces.
    #[serde(default)]
    pub stripes: Option<String>,
    /// Memory of the guest that has two copies, unless it is degraded.
    pub bytes: u64,
    /// How much of it has one copy only.
    pub degraded_bytes: u64,
    /// How much of it has both copies in one zone.
    #[serde(default)]
    pub in_one_zone_bytes: u64,
    /// How much got its second copy back.
    pub repaired_bytes: u64,
    /// How often a donor went out of use.
    pub losses: u64,
    /// Pieces of pages that donors sent and that were not those written back last: the pages were
    /// computed from others.
    #[serde(default)]
    pub wrong_pieces: u64,
    /// The ids of the donors that are out of use.
    pub out: Vec<u32>,
}

impl ReplicasUsed {
    /// `degraded` when some memory has one copy only, otherwise `whole`.
    #[must_use]
    pub fn state(&self) -> &'static str {
        if self.degraded_bytes > 0 {
            "degraded"
        } else {
            "whole"
        }
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
    fn states_of_a_drain_have_the_same_word_everywhere() {
        use DrainState::{Done, Failed, Leaving, Moving};
        for state in [Moving, Leaving, Done, Failed] {
            let json = serde_json::to_value(state).expect("JSON");
            assert_eq!(json, state.word());
        }
    }

    #[test]
    fn states_of_a_rebalancing_have_the_same_word_everywhere() {
        use RebalanceState::{Done, Failed, Moving, Stopped};
        for state in [Moving, Done, Stopped, Failed] {
            let json = serde_json::to_value(state).expect("JSON");
            assert_eq!(json, state.word());
        }
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
