//! Counters of the pager, which worker threads update without locks, and any thread may read at any
//! time.

pub use fabric_host::metrics::{Counter, Histogram, Recent, Summary};
pub use fabric_sealing::SealStats;
pub use fabric_transport::Traffic;

use crate::wire::TrafficClass;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// Counters of a node's pager.
#[derive(Debug, Default)]
pub struct PagerStats {
    /// Faults on pages whose bytes came from another node, from reading the fault to waking.
    pub remote: Histogram,
    /// First touches, filled with zeroes.
    pub zero: Histogram,
    /// Stages of these.
    pub zero_stages: LocalStages,
    /// Untouched pages filled along with a touched neighbour.
    pub zero_around: Counter,
    /// Faults on pages whose bytes were local.
    pub minor: Histogram,
    /// Stages of these.
    pub minor_stages: LocalStages,
    /// First writes to pages that were mapped read-only.
    pub write_protect: Histogram,
    /// Stage of a remote fault: from reading it to sending the request.
    pub queue: Histogram,
    /// Stage of a remote fault: from sending the request to receiving the bytes.
    pub fetch: Histogram,
    /// Stage of a remote fault: from receiving the bytes to waking.
    pub install: Histogram,
    /// Pages removed from this node's memory.
    pub evictions: Counter,
    /// Of these, pages that were clean and needed no write-back.
    pub evictions_clean: Counter,
    /// Of these, pages of zeroes that needed no write-back.
    pub evictions_zero: Counter,
    /// Of these, pages that counted as dirty, were equal to their home's copy, and needed no
    /// write-back.
    pub evictions_unchanged: Counter,
    /// Evictions that a fault cancelled.
    pub evictions_cancelled: Counter,
    /// Faults that had to wait because no local memory was free.
    pub stalled_for_memory: Counter,
    /// Pages that the guest does not use.
    pub free_pages: FreePagesStats,
    /// Prefetched pages.
    pub prefetch_issued: Counter,
    /// Of these, pages that were touched, or mapped along with a touched page.
    pub prefetch_used: Counter,
    /// Of these, pages that were evicted untouched.
    pub prefetch_wasted: Counter,
    /// Untouched pages that were filled with zeroes because an earlier run had touched them.
    pub replayed: Counter,
    /// Pages of an earlier run's working set that were not processed yet.
    pub replay_left: AtomicU64,
    /// Faults on pages that were in transit by a prefetch.
    pub prefetch_late: Counter,
    /// Sealed pages.
    pub sealing: Arc<SealStats>,
    /// Traffic with each donor, in order.
    pub donors: Box<[DonorStats]>,
}

impl PagerStats {
    /// Creates zero counters for this many donors.
    #[must_use]
    pub fn new(donors: usize) -> Self {
        Self {
            donors: (0..donors).map(|_| DonorStats::default()).collect(),
            ..Self::default()
        }
    }

    /// Records that a page came from a donor, and its waiter was woken.
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

/// Time stamps of a remote fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteTimes {
    /// The fault was read.
    pub read_at: Instant,
    /// Its request was posted.
    pub posted_at: Instant,
    /// Its bytes were received.
    pub arrived_at: Instant,
    /// The page was mapped.
    pub done_at: Instant,
}

/// Stages of faults that need no other node.
#[derive(Debug, Default)]
pub struct LocalStages {
    /// From reading the fault to serving it: other faults came first, or memory was short.
    pub queue: Histogram,
    /// From serving it to waking.
    pub install: Histogram,
}

impl LocalStages {
    /// Records a fault that was just served; `total` has the whole duration.
    pub(crate) fn record(&self, total: &Histogram, read_at: Instant, taken_up_at: Instant) {
        let done_at = Instant::now();
        self.queue.record(taken_up_at - read_at);
        self.install.record(done_at - taken_up_at);
        total.record(done_at - read_at);
    }
}

/// Counters of pages that the guest has freed.
#[derive(Debug, Default)]
pub struct FreePagesStats {
    /// Pages reported as free, each time.
    pub reported: Counter,
    /// Of these, pages with local bytes, which were dropped.
    pub dropped_here: Counter,
    /// Of these, pages that their donor has confirmed to have dropped.
    pub dropped_at_home: Counter,
}

/// The pager's counters for one donor.
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
    /// Their stage until the bytes were received.
    pub fetch: Histogram,
    /// Their stage until waking.
    pub install: Histogram,
    /// Traffic of pages that vCPUs waited for.
    pub urgent: Arc<Traffic>,
    /// Traffic of pages that were written back.
    pub bulk: Arc<Traffic>,
    /// Traffic of prefetched pages.
    pub prefetch: Arc<Traffic>,
    /// Traffic of measurements: no pages.
    pub probe: Arc<Traffic>,
}

impl DonorStats {
    /// Returns the traffic of a class.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
}
