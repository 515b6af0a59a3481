//! Counters and histograms. Written without locks by the threads that do the work, readable
//! by anyone at any time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Sub-buckets to each power of two: values are known to within 1/32, about 3 %.
const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
/// Powers of two covered: 2^40 ns is 18 minutes, longer than any deadline here.
const POWERS: usize = 40;
const BUCKETS: usize = (POWERS + 1) * SUB;

/// A histogram of durations that many threads may write while others read: log-linear
/// buckets, 10 KiB, nothing allocated after it is made.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
    max: AtomicU64,
}

impl Histogram {
    /// An empty histogram.
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
        self.max.fetch_max(ns, Ordering::Relaxed);
    }

    /// Adds everything that another histogram has recorded.
    pub fn merge(&self, other: &Self) {
        for (mine, others) in self.buckets.iter().zip(&other.buckets) {
            mine.fetch_add(others.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.max
            .fetch_max(other.max.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Percentiles of what was recorded until now.
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

/// The highest duration (ns) that falls into a bucket.
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
    /// How many durations.
    pub count: u64,
    /// Half were at most this long.
    pub p50: Duration,
    /// 90 % were at most this long.
    pub p90: Duration,
    /// 99 % were at most this long.
    pub p99: Duration,
    /// 99.9 % were at most this long.
    pub p999: Duration,
    /// The longest.
    pub max: Duration,
}

/// A count that only grows.
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

    /// The count now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the pager of a node counts.
#[derive(Debug, Default)]
pub struct PagerStats {
    /// Faults on pages whose bytes came from another node, from reading the fault to waking.
    pub remote: Histogram,
    /// First touches, filled with zeros.
    pub zero: Histogram,
    /// Untouched pages filled along with a neighbour that was touched.
    pub zero_around: Counter,
    /// Faults on pages whose bytes were here.
    pub minor: Histogram,
    /// First writes to pages that were mapped read-only.
    pub write_protect: Histogram,
    /// Stage of a remote fault: from reading it to sending the request.
    pub queue: Histogram,
    /// Stage of a remote fault: from sending the request to having the bytes.
    pub fetch: Histogram,
    /// Stage of a remote fault: from having the bytes to waking.
    pub install: Histogram,
    /// Pages taken out of this node's memory.
    pub evictions: Counter,
    /// Of these, pages that were clean and needed no write-back.
    pub evictions_clean: Counter,
    /// Of these, pages that held only zeros and needed no write-back.
    pub evictions_zero: Counter,
    /// Evictions that a fault cancelled.
    pub evictions_cancelled: Counter,
    /// Faults that had to wait because no local memory was free.
    pub stalled_for_memory: Counter,
    /// Pages asked of their home before anybody wanted them.
    pub prefetch_issued: Counter,
    /// Of these, pages that were touched, or mapped along with one that was.
    pub prefetch_used: Counter,
    /// Of these, pages that were evicted without that.
    pub prefetch_wasted: Counter,
    /// Untouched pages that were filled with zeros because an earlier run had touched them.
    pub replayed: Counter,
    /// Faults on pages that were on their way here by a prefetch.
    pub prefetch_late: Counter,
    /// For each donor in order: what went to and fro.
    pub donors: Box<[DonorStats]>,
}

impl PagerStats {
    /// Nothing counted yet, for so many donors.
    #[must_use]
    pub fn new(donors: usize) -> Self {
        Self {
            donors: (0..donors).map(|_| DonorStats::default()).collect(),
            ..Self::default()
        }
    }
}

/// What the pager counts for one donor.
#[derive(Debug, Default)]
pub struct DonorStats {
    /// Pages fetched from it.
    pub pages_fetched: Counter,
    /// Pages written back to it.
    pub pages_written_back: Counter,
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
