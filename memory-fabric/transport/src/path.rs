//! How fast the way to a donor is: measured at the start, and followed while the VM runs.

use crate::measure::Measured;
use crate::policy::{Policy, PolicyCell, Tier};
use crate::select::Selection;
use crate::stream::Carrier;
use fabric_host::metrics::Counter;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What is known of the way to one donor.
#[derive(Debug)]
pub struct PathStats {
    /// What connections to the donor are made of.
    pub carrier: Carrier,
    /// By what pages travel, as it was selected at the start.
    pub selection: Selection,
    /// What TCP measured at the start, or UDP in its place.
    pub tcp: Option<Measured>,
    /// What RDMA measured at the start.
    pub rdma: Option<Measured>,
    /// How often the tier changed.
    pub tier_changes: Counter,
    // Relaxed: a number of its own.
    latency_ns: AtomicU64,
    policy: PolicyCell,
}

impl PathStats {
    /// With what the start found; `latency` is what counts where nothing was measured.
    pub fn new(
        carrier: Carrier,
        selection: Selection,
        tcp: Option<Measured>,
        rdma: Option<Measured>,
        latency: Duration,
    ) -> Self {
        let by_rdma = selection.faults_by_rdma;
        let faults = if by_rdma { rdma } else { tcp };
        let bulk = if selection.bulk_by_rdma { rdma } else { tcp };
        let latency = faults.map_or(latency, |measured| measured.page);
        let policy = PolicyCell::new(Tier::of(by_rdma, latency));
        if let Some(measured) = bulk {
            policy.set_stream(measured.stream_bytes_per_second);
        }
        Self {
            carrier,
            selection,
            tcp,
            rdma,
            tier_changes: Counter::default(),
            latency_ns: AtomicU64::new(nanos(latency)),
            policy,
        }
    }

    /// What it takes to fetch a page with little else in its way: of real fetches, what the
    /// fastest quarter took at the most; of an idle link, the median of some tries.
    #[must_use]
    pub fn latency_estimate(&self) -> Duration {
        Duration::from_nanos(self.latency_ns.load(Ordering::Relaxed))
    }

    /// The class of the link now.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.policy.tier()
    }

    /// What follows from that.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.policy.policy()
    }

    /// Shows what follows from it in another place.
    pub fn show_in(&self, cell: &PolicyCell) {
        cell.copy(&self.policy);
    }

    /// Notes what fetching a page takes now.
    pub fn set_latency(&self, latency: Duration) {
        self.latency_ns.store(nanos(latency), Ordering::Relaxed);
    }

    /// Notes that the link belongs to another tier.
    pub fn set_tier(&self, tier: Tier) {
        self.policy.set_tier(tier);
        self.tier_changes.increment();
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
