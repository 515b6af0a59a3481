//! Counters and histograms, which worker threads update without locks, and any thread may read at
//! any time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Sub-buckets per power of two: values are known to within 1/32, about 3 %.
const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
/// Powers of two covered: 2^40 ns is 18 minutes, longer than any deadline here.
const POWERS: usize = 40;
const BUCKETS: usize = (POWERS + 1) * SUB;

/// A histogram of durations that many threads may update while others read: log-linear buckets, 10
/// KiB, without allocation after its creation.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
    max: AtomicU64,
}

impl Histogram {
    /// Creates an empty histogram.
    #[must_use]
    pub fn new() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            max: AtomicU64::new(0),
        }
    }

    /// Adds a duration.
    pub fn record(&self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: counts are independent; a reader's snapshot need not be consistent.
        self.buckets[bucket_of(ns)].fetch_add(1, Ordering::Relaxed);
        // Few durations are a new maximum, and a load is cheaper than a locked instruction.
        if ns > self.max.load(Ordering::Relaxed) {
            self.max.fetch_max(ns, Ordering::Relaxed);
        }
    }

    /// Adds everything that another histogram has recorded.
    pub fn merge(&self, other: &Self) {
        for (mine, others) in self.buckets.iter().zip(&other.buckets) {
            mine.fetch_add(others.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.max
            .fetch_max(other.max.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Iterates over the recorded durations in ascending order: each bucket's upper bound with its
    /// count.
    pub fn counts(&self) -> impl Iterator<Item = (Duration, u64)> {
        let counts = self.buckets.iter().enumerate().map(|(index, bucket)| {
            let upper = Duration::from_nanos(highest_in(index));
            (upper, bucket.load(Ordering::Relaxed))
        });
        counts.filter(|&(_, count)| count > 0)
    }

    /// Returns the percentiles of all durations so far.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let counts: Vec<u64> = self
            .buckets
            .iter()
            .map(|bucket| bucket.load(Ordering::Relaxed))
            .collect();
        let count: u64 = counts.iter().sum();
        let max = self.max.load(Ordering::Relaxed);
        let at = |quantile: f64| {
            // Counts stay far below 2^52.
            #[allow(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss
            )]
            let rank = ((count as f64 * quantile).ceil() as u64).max(1);
            let mut seen = 0;
            let bucket = counts.iter().position(|&in_bucket| {
                seen += in_bucket;
                seen >= rank
            });
            Duration::from_nanos(bucket.map_or(0, highest_in).min(max))
        };
        Summary {
            count,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: Duration::from_nanos(max),
        }
    }
}

/// The samples of a histogram since the previous call.
#[derive(Debug, Default)]
pub struct Recent {
    before: Vec<u64>,
}

impl Recent {
    /// Returns the 25th percentile of the samples since the last call. Returns `None` if there are
    /// fewer than `count_min`; they then count in the next call.
    pub fn quarter(&mut self, histogram: &Histogram, count_min: u64) -> Option<Duration> {
        let now: Vec<u64> = histogram
            .buckets
            .iter()
            .map(|bucket| bucket.load(Ordering::Relaxed))
            .collect();
        self.before.resize(BUCKETS, 0);
        let new = now.iter().zip(&self.before);
        let new: Vec<u64> = new
            .map(|(now, before)| now.saturating_sub(*before))
            .collect();
        let count: u64 = new.iter().sum();
        if count < count_min.max(1) {
            return None;
        }
        self.before = now;
        let mut seen = 0;
        let bucket = new.iter().position(|&in_bucket| {
            seen += in_bucket;
            seen * 4 >= count
        });
        bucket.map(|bucket| Duration::from_nanos(highest_in(bucket)))
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

fn bucket_of(ns: u64) -> usize {
    let ns = ns.min((1 << POWERS) - 1);
    let power = (ns | 1).ilog2();
    if power < SUB_BITS {
        return usize::try_from(ns).unwrap_or(0);
    }
    let shift = power - SUB_BITS;
    let sub = usize::try_from(ns >> shift).unwrap_or(0) & (SUB - 1);
    (shift as usize + 1) * SUB + sub
}

/// Returns the largest duration (ns) of a bucket.
fn highest_in(bucket: usize) -> u64 {
    let (row, sub) = (bucket / SUB, (bucket % SUB) as u64);
    match row {
        0 => sub,
        row => ((SUB as u64 + sub + 1) << (row - 1)) - 1,
    }
}

/// Percentiles of a [`Histogram`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Summary {
    /// Number of durations.
    pub count: u64,
    /// Half were at most this long.
    pub p50: Duration,
    /// 90 % were at most this long.
    pub p90: Duration,
    /// 99 % were at most this long.
    pub p99: Duration,
    /// 99.9 % were at most this long.
    pub p999: Duration,
    /// The maximum.
    pub max: Duration,
}

/// A monotonic counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the current count.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Replaces the value.
    pub fn set(&self, value: u64) {
        // Relaxed, as all counters: it says nothing about other memory.
        self.0.store(value, Ordering::Relaxed);
    }

    /// Sets the value if it is lower.
    pub fn raise(&self, value: u64) {
        self.0.fetch_max(value, Ordering::Relaxed);
    }

    /// Returns the value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentiles_are_within_three_percent() {
        let histogram = Histogram::new();
        for us in 1..=1000 {
            histogram.record(Duration::from_micros(us));
        }
        let summary = histogram.summary();
        assert_eq!(summary.count, 1000);
        for (found, wanted) in [
            (summary.p50, 500),
            (summary.p90, 900),
            (summary.p99, 990),
            (summary.p999, 999),
        ] {
            let wanted = Duration::from_micros(wanted);
            assert!(
                found >= wanted && found <= wanted + wanted / 30,
                "{found:?} for {wanted:?}"
            );
        }
        assert_eq!(summary.max, Duration::from_millis(1));
    }

    #[test]
    fn the_quarter_is_of_what_is_new_and_waits_for_enough() {
        let histogram = Histogram::new();
        let mut recent = Recent::default();
        let record = |count: u32, us| {
            for _ in 0..count {
                histogram.record(Duration::from_micros(us));
            }
        };
        let about = |found: Option<Duration>, us: u64| {
            let found = found.expect("enough").as_micros();
            assert!(
                found >= u128::from(us) && found <= u128::from(us + us / 30 + 1),
                "{found}"
            );
        };
        record(30, 1000);
        record(10, 100);
        about(recent.quarter(&histogram, 16), 100);
        record(15, 500);
        assert_eq!(recent.quarter(&histogram, 16), None);
        record(5, 900);
        about(recent.quarter(&histogram, 16), 500);
        assert_eq!(recent.quarter(&histogram, 16), None);
    }

    #[test]
    fn an_empty_histogram_is_all_zero() {
        assert_eq!(Histogram::new().summary(), Summary::default());
    }

    proptest! {
        #[test]
        fn a_duration_is_at_most_the_highest_of_its_bucket(ns in 0_u64..1 << 40) {
            let bucket = bucket_of(ns);
            prop_assert!(highest_in(bucket) >= ns);
            prop_assert!(bucket == 0 || highest_in(bucket - 1) < ns);
        }
    }
}
