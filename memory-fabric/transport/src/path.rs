//! How fast the way to a donor is: measured at the start, and followed while the VM runs.

use crate::PathKind;
use crate::measure::Measured;
use crate::policy::{Policy, PolicyCell, Tier};
pub use crate::select::{Reason, Selection};
use fabric_host::metrics::Counter;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What is known of the way to one donor.
#[derive(Debug)]
pub struct PathStats {
    /// By what pages travel, as it was selected at the start.
    pub selection: Selection,
    /// Why.
    pub reason: Reason,
    /// Why there is no RDMA connection, where one was tried.
    pub refusal: Option<String>,
    /// What TCP measured at the start.
    pub tcp: Option<Measured>,
    /// What UDP measured at the start, where it is used instead of TCP.
    pub udp: Option<Measured>,
    /// What RDMA measured at the start.
    pub rdma: Option<Measured>,
    /// How often the tier changed.
    pub tier_changes: Counter,
    // Relaxed: a number of its own.
    latency_ns: AtomicU64,
    policy: PolicyCell,
}

impl PathStats {
    /// With what the start found, on connections of the kind `streams` and by RDMA; `latency` is
    /// what counts where nothing was measured.
    pub fn new(
        selection: Selection,
        streams: (PathKind, Option<Measured>),
        rdma: Option<Measured>,
        latency: Duration,
    ) -> Self {
        let (kind, measured) = streams;
        let of = |wanted| measured.filter(|_| kind == wanted);
        let mut path = Self {
            selection,
            reason: Reason::Asked,
            refusal: None,
            tcp: of(PathKind::Tcp),
            udp: of(PathKind::Udp),
            rdma,
            tier_changes: Counter::default(),
            latency_ns: AtomicU64::default(),
            policy: PolicyCell::new(Tier::Slow),
        };
        let faults = path.measured(selection.faults);
        let latency = faults.map_or(latency, |measured| measured.page);
        path.policy = PolicyCell::new(Tier::of(selection.faults, latency));
        if let Some(measured) = path.measured(selection.bulk) {
            path.policy.set_stream(measured.stream_bytes_per_second);
        }
        path.set_latency(latency);
        path
    }

    /// Adds why the path was selected, and why RDMA was not possible.
    #[must_use]
    pub fn because(self, reason: Reason, refusal: Option<String>) -> Self {
        Self {
            reason,
            refusal,
            ..self
        }
    }

    /// What was measured of a kind at the start.
    #[must_use]
    pub fn measured(&self, kind: PathKind) -> Option<Measured> {
        match kind {
            PathKind::Tcp => self.tcp,
            PathKind::Udp => self.udp,
            PathKind::Rdma => self.rdma,
            PathKind::None | PathKind::Loopback | PathKind::Mixed => None,
        }
    }

    /// The time to fetch a page without other traffic: the 25th percentile of recent fetches, or on
    /// an idle link the median of some probes.
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
