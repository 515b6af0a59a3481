//! Counters of a link.

use crate::stats::Counter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Counters of a link that its thread writes and any thread may read.
#[derive(Debug)]
pub struct LinkStats {
    // Relaxed, all of them: they are independent of each other.
    round_trip_ns: AtomicU64,
    round_trip_ns_min: AtomicU64,
    unreachable: AtomicBool,
    /// How often the donor became unreachable.
    pub outages: Counter,
    /// How often connections to it broke. Those that are made in an outage and complete nothing
    /// belong to it.
    pub breaks: Counter,
}

impl LinkStats {
    pub(super) fn new(round_trip: Duration) -> Self {
        Self {
            round_trip_ns: AtomicU64::new(nanos(round_trip)),
            round_trip_ns_min: AtomicU64::new(nanos(round_trip)),
            unreachable: AtomicBool::new(false),
            outages: Counter::default(),
            breaks: Counter::default(),
        }
    }

    pub(super) fn record_round_trip(&self, time: Duration) {
        self.round_trip_ns.store(nanos(time), Ordering::Relaxed);
        self.round_trip_ns_min
            .fetch_min(nanos(time), Ordering::Relaxed);
    }

    pub(super) fn note_unreachable(&self) {
        self.unreachable.store(true, Ordering::Relaxed);
        self.outages.increment();
    }

    pub(super) fn note_reachable(&self) {
        self.unreachable.store(false, Ordering::Relaxed);
    }

    /// Returns the last round trip of a small request, of those that renew the lease.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        Duration::from_nanos(self.round_trip_ns.load(Ordering::Relaxed))
    }

    /// Returns the shortest round trip.
    #[must_use]
    pub fn round_trip_min(&self) -> Duration {
        Duration::from_nanos(self.round_trip_ns_min.load(Ordering::Relaxed))
    }

    /// Returns whether the donor is reachable, as far as known.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        !self.unreachable.load(Ordering::Relaxed)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_and_the_shortest_round_trip_are_kept() {
        let stats = LinkStats::new(Duration::from_micros(50));
        stats.record_round_trip(Duration::from_micros(40));
        stats.record_round_trip(Duration::from_micros(70));
        assert_eq!(stats.round_trip(), Duration::from_micros(70));
        assert_eq!(stats.round_trip_min(), Duration::from_micros(40));
    }

    #[test]
    fn outages_are_counted() {
        let stats = LinkStats::new(Duration::ZERO);
        stats.note_unreachable();
        assert!(!stats.is_reachable());
        stats.note_reachable();
        assert!(stats.is_reachable());
        assert_eq!(stats.outages.get(), 1);
    }
}
