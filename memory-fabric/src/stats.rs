//! Counters and histograms. Written without locks by the threads that do the work, readable
//! by anyone at any time.

use crate::page::PAGE_SIZE;
use crate::wire::TrafficClass;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

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
        // Most durations are no new maximum: a load is cheaper than a locked instruction.
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

    /// What was recorded: how often, and up to which duration, in rising order.
    pub fn counts(&self) -> impl Iterator<Item = (Duration, u64)> {
        let counts = self.buckets.iter().enumerate().map(|(index, bucket)| {
            let upper = Duration::from_nanos(highest_in(index));
            (upper, bucket.load(Ordering::Relaxed))
        });
        counts.filter(|&(_, count)| count > 0)
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

/// What was added to a histogram since it was last looked at.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    before: Vec<u64>,
}

impl Recent {
    /// What the fastest quarter of what came since took at the most. `None` while that is fewer
    /// than `count_min`, which then counts the next time.
    pub(crate) fn quarter(&mut self, histogram: &Histogram, count_min: u64) -> Option<Duration> {
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
    /// Where the time of these went.
    pub zero_stages: LocalStages,
    /// Untouched pages filled along with a neighbour that was touched.
    pub zero_around: Counter,
    /// Faults on pages whose bytes were here.
    pub minor: Histogram,
    /// Where the time of these went.
    pub minor_stages: LocalStages,
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
    /// Pages that the guest does not use.
    pub free_pages: FreePagesStats,
    /// Pages asked of their home before anybody wanted them.
    pub prefetch_issued: Counter,
    /// Of these, pages that were touched, or mapped along with one that was.
    pub prefetch_used: Counter,
    /// Of these, pages that were evicted without that.
    pub prefetch_wasted: Counter,
    /// Untouched pages that were filled with zeros because an earlier run had touched them.
    pub replayed: Counter,
    /// Pages of an earlier run's working set that were not looked at yet.
    pub replay_left: AtomicU64,
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

    /// A page came from a donor, and who waited for it was woken.
    pub(crate) fn record_remote(&self, donor: usize, times: &RemoteTimes) {
        let queue = times.posted_at - times.read_at;
        let fetch = times.arrived_at - times.posted_at;
        let install = times.done_at - times.arrived_at;
        let total = times.done_at - times.read_at;
        let donor = &self.donors[donor];
        donor.pages_fetched.increment();
        for (all, of_donor, time) in [
            (&self.queue, &donor.queue, queue),
            (&self.fetch, &donor.fetch, fetch),
            (&self.install, &donor.install, install),
            (&self.remote, &donor.remote, total),
        ] {
            all.record(time);
            of_donor.record(time);
        }
    }
}

/// When a remote fault got how far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteTimes {
    /// The fault was read.
    pub read_at: Instant,
    /// Its request was posted.
    pub posted_at: Instant,
    /// Its bytes were here.
    pub arrived_at: Instant,
    /// The page was mapped.
    pub done_at: Instant,
}

/// Where the time of faults went that need no other node.
#[derive(Debug, Default)]
pub struct LocalStages {
    /// From reading the fault to serving it: other faults came first, or memory was short.
    pub queue: Histogram,
    /// From there to waking.
    pub install: Histogram,
}

impl LocalStages {
    /// A fault was read, taken up, and served now; `total` has all of it.
    pub(crate) fn record(&self, total: &Histogram, read_at: Instant, taken_up_at: Instant) {
        let done_at = Instant::now();
        self.queue.record(taken_up_at - read_at);
        self.install.record(done_at - taken_up_at);
        total.record(done_at - read_at);
    }
}

/// What is counted of pages that the guest has told to be free.
#[derive(Debug, Default)]
pub struct FreePagesStats {
    /// Pages that were told to be free, each time.
    pub reported: Counter,
    /// Of these, pages that had bytes here, which are gone.
    pub dropped_here: Counter,
    /// Of these, pages that their donor has confirmed to have dropped.
    pub dropped_at_home: Counter,
}

/// What the pager counts for one donor.
#[derive(Debug, Default)]
pub struct DonorStats {
    /// Pages fetched from it.
    pub pages_fetched: Counter,
    /// Pages written back to it.
    pub pages_written_back: Counter,
    /// Faults on pages whose bytes came from it; see [`PagerStats::remote`].
    pub remote: Histogram,
    /// Their stage until the request was sent.
    pub queue: Histogram,
    /// Their stage until the bytes were here.
    pub fetch: Histogram,
    /// Their stage until waking.
    pub install: Histogram,
    /// Pages that vCPUs waited for, as they came over the network.
    pub urgent: Arc<Traffic>,
    /// Pages that were written back, as they went.
    pub bulk: Arc<Traffic>,
    /// Pages that were fetched ahead, as they came.
    pub prefetch: Arc<Traffic>,
    /// What is only measured: no pages.
    pub probe: Arc<Traffic>,
}

impl DonorStats {
    /// What a class of traffic carried.
    #[must_use]
    pub fn traffic(&self, class: TrafficClass) -> &Arc<Traffic> {
        match class {
            TrafficClass::Urgent => &self.urgent,
            TrafficClass::Bulk => &self.bulk,
            TrafficClass::Prefetch => &self.prefetch,
            TrafficClass::Probe => &self.probe,
        }
    }
}

/// What a connection, and its successors, carried over the network. A page that was sent again
/// after a connection broke counts once.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Pages.
    pub pages: Counter,
    /// Bytes that were sent for them, without the headers of frames.
    pub wire_bytes: Counter,
    /// Pages that were sent as less bytes than they have, zeroes included.
    pub pages_compressed: Counter,
    // Relaxed: it tells of nothing else.
    compressing: AtomicBool,
}

impl Traffic {
    /// Pages that came or went as so many bytes.
    pub(crate) fn record(&self, pages: u64, compressed: u64, wire_bytes: usize) {
        self.pages.add(pages);
        self.wire_bytes.add(wire_bytes as u64);
        if compressed > 0 {
            self.pages_compressed.add(compressed);
        }
    }

    /// Bytes that the pages have.
    #[must_use]
    pub fn plain_bytes(&self) -> u64 {
        self.pages.get() * PAGE_SIZE as u64
    }

    pub(crate) fn set_compressing(&self, compressing: bool) {
        self.compressing.store(compressing, Ordering::Relaxed);
    }

    /// Whether pages are compressed just now, but for what is tried now and then.
    #[must_use]
    pub fn is_compressing(&self) -> bool {
        self.compressing.load(Ordering::Relaxed)
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
    fn a_remote_fault_counts_for_its_donor_and_for_all() {
        let stats = PagerStats::new(2);
        let read_at = Instant::now();
        let after = |us| read_at + Duration::from_micros(us);
        for (donor, slower) in [(0, 1), (1, 2), (1, 2)] {
            stats.record_remote(
                donor,
                &RemoteTimes {
                    read_at,
                    posted_at: after(10 * slower),
                    arrived_at: after(110 * slower),
                    done_at: after(115 * slower),
                },
            );
        }
        let of = |histogram: &Histogram| {
            let summary = histogram.summary();
            (summary.count, summary.max.as_micros())
        };
        let (first, second) = (&stats.donors[0], &stats.donors[1]);
        assert_eq!(of(&first.remote), (1, 115));
        assert_eq!(of(&second.queue), (2, 20));
        assert_eq!(of(&second.fetch), (2, 200));
        assert_eq!(of(&second.install), (2, 10));
        assert_eq!(of(&stats.remote), (3, 230));
        assert_eq!(first.pages_fetched.get() + second.pages_fetched.get(), 3);
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
