//! How often the peer of a resting connection may send.

use std::time::{Duration, Instant};

/// What a call for a connection costs: 16 a second may last. The shortest leases are renewed four
/// times a second.
const CALL_TIME: Duration = Duration::from_micros(62_500);

/// Bytes that a call may receive; more cost as more calls. Empty records and messages of the
/// handshake are paid for by their bytes, as contents are.
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

    /// Counts a call that received `bytes`. Returns false if the peer is too fast.
    pub(super) fn pass(&mut self, now: Instant, bytes: usize) -> bool {
        let calls = u32::try_from(bytes / CALL_BYTES).unwrap_or(u32::MAX);
        let cost = CALL_TIME.saturating_mul(calls.saturating_add(1));
        self.paid_until = self.paid_until.max(now) + cost;
        self.paid_until <= now + BURST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the record of a renewal.
    const RENEWAL: usize = 78;

    fn passed(interval: Duration, bytes: usize) -> usize {
        let mut now = Instant::now();
        let mut pace = Pace::new(now);
        let passed = (0..10_000).take_while(|_| {
            now += interval;
            pace.pass(now, bytes)
        });
        passed.count()
    }

    #[test]
    fn renewals_of_the_shortest_leases_pass_for_ever_also_in_parts() {
        assert_eq!(passed(Duration::from_millis(250), RENEWAL), 10_000);
        assert_eq!(passed(Duration::from_millis(125), RENEWAL / 2), 10_000);
    }

    #[test]
    fn a_flood_passes_for_a_burst_only() {
        assert_eq!(passed(Duration::ZERO, RENEWAL), 64);
        assert_eq!(passed(Duration::from_millis(1), 1), 65);
        // Full reads cost as what they are: 46 empty records each.
        assert_eq!(passed(Duration::ZERO, 1024), 12);
        assert!(passed(Duration::from_millis(100), 1024) < 30);
    }
}
