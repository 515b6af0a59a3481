//! What the pager counts. Written without locks by the threads that do the work, readable
//! by anyone at any time.

pub use fabric_host::metrics::{Counter, Histogram, Recent, Summary};
pub use fabric_transport::Traffic;

use crate::wire::TrafficClass;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

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
