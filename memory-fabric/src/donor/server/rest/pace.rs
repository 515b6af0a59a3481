//! How often the peer of a resting connection may send.

use std::time::{Duration, Instant};

/// What a call for a connection costs: 16 a second may last. The shortest leases are renewed four
/// times a second.
const CALL_TIME: Duration = Duration::from_micros(62_500);

/// What each byte of a record costs that was decrypted for no contents. A new key takes the thread
/// as long as some renewals, in 27 bytes, and no VM sends any while its connection rests.
const BARREN_TIME: Duration = CALL_TIME;

/// Bytes that a call may receive; more cost as more calls.
const CALL_BYTES: usize = 256;

/// Calls that may come at once, as time: 64.
const BURST: Duration = Duration::from_secs(4);

/// The pace of one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Until when the calls so far would last at the pace that is allowed.
    paid_until: Instant,
}

impl Pace {
    pub(super) const fn new(now: Instant) -> Self {
        Self { paid_until: now }
    }

    /// Counts a call that received `bytes`, `barren` of them in records without contents. Returns false
    /// if the peer is too fast.
    pub(super) fn pass(&mut self, now: Instant, bytes: usize, barren: usize) -> bool {
        let count = |number| u32::try_from(number).unwrap_or(u32::MAX);
        let calls = CALL_TIME.saturating_mul(count(bytes / CALL_BYTES).saturating_add(1));
        let barren = BARREN_TIME.saturating_mul(count(barren));
        self.paid_until = self.paid_until.max(now) + calls + barren;
        self.paid_until <= now + BURST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the record of a renewal.
    const RENEWAL: usize = 78;

    fn passed(interval: Duration, bytes: usize, barren: usize) -> usize {
        let mut now = Instant::now();
        let mut pace = Pace::new(now);
        let passed = (0..10_000).take_while(|_| {
            now += interval;
            pace.pass(now, bytes, barren)
        });
        passed.count()
    }

    #[test]
    fn renewals_of_the_shortest_leases_pass_for_ever_also_in_parts() {
        assert_eq!(passed(Duration::from_millis(250), RENEWAL, 0), 10_000);
        assert_eq!(passed(Duration::from_millis(125), RENEWAL / 2, 0), 10_000);
    }

    #[test]
    fn a_flood_passes_for_a_burst_only() {
        assert_eq!(passed(Duration::ZERO, RENEWAL, 0), 64);
        assert_eq!(passed(Duration::from_millis(1), 1, 0), 65);
        assert_eq!(passed(Duration::ZERO, 1024, 0), 12);
        assert!(passed(Duration::from_millis(100), 1024, 0) < 30);
    }

    #[test]
    fn records_without_contents_pass_twice() {
        /// Bytes of a record with a new key.
        const NEW_KEY: usize = 27;
        let second = Duration::from_secs(1);
        assert_eq!(passed(Duration::ZERO, NEW_KEY, NEW_KEY), 2);
        assert_eq!(passed(second, NEW_KEY, NEW_KEY), 4);
        assert_eq!(passed(second * 2, NEW_KEY, NEW_KEY), 10_000);
        // A full read, and two such records beside a renewal.
        assert_eq!(passed(second, 1024, 1024), 0);
        assert_eq!(passed(second, RENEWAL + 2 * NEW_KEY, 2 * NEW_KEY), 1);
    }
}
