//! A bound on the rate of background work.

use std::time::{Duration, Instant};

/// Units of work that are allowed: a number per second, of which some may be saved up.
#[derive(Clone, Debug)]
pub struct Allowance {
    per_second: u64,
    burst: u64,
    allowed: u64,
    /// Since when units are earned.
    earns_since: Option<Instant>,
}

impl Allowance {
    /// Wait after which units are earned again.
    pub const PAUSE: Duration = Duration::from_millis(1);

    /// Allows `per_second` units per second, and up to `burst` at once after a pause.
    #[must_use]
    pub const fn new(per_second: u64, burst: u64) -> Self {
        Self {
            per_second,
            burst,
            allowed: 0,
            earns_since: None,
        }
    }

    /// Takes up to `wanted` units; returns how many. After 0, try again after [`Self::PAUSE`].
    pub fn take(&mut self, now: Instant, wanted: u64) -> u64 {
        self.earn(now);
        let taken = wanted.min(self.allowed);
        self.allowed -= taken;
        taken
    }

    /// Takes so many units, at most the burst, or none. After false, try again after [`Self::PAUSE`].
    pub fn take_all(&mut self, now: Instant, wanted: u64) -> bool {
        debug_assert!(wanted <= self.burst, "{wanted} of {}", self.burst);
        self.earn(now);
        let is_allowed = wanted <= self.allowed;
        if is_allowed {
            self.allowed -= wanted;
        }
        is_allowed
    }

    fn earn(&mut self, now: Instant) {
        let since = *self.earns_since.get_or_insert(now);
        let elapsed_us = now.saturating_duration_since(since).as_micros();
        let earned = elapsed_us * u128::from(self.per_second) / 1_000_000;
        let earned = u64::try_from(earned).unwrap_or(u64::MAX);
        if earned > 0 {
            self.earns_since = Some(now);
            self.allowed = self.allowed.saturating_add(earned).min(self.burst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_rate_and_one_burst_is_taken() {
        let start = Instant::now();
        let mut allowance = Allowance::new(1000, 50);
        assert_eq!(allowance.take(start, 1), 0, "nothing is earned yet");
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(allowance.take(at(10), 100), 10);
        assert_eq!(allowance.take(at(10), 1), 0);
        assert_eq!(allowance.take(at(5000), 100), 50, "one burst");
        let mut sum = 0;
        for ms in 5001..=6000 {
            sum += allowance.take(at(ms), 7);
        }
        assert_eq!(sum, 1000);
        // All or none.
        assert_eq!(allowance.take(at(6000), 50), 0);
        assert!(!allowance.take_all(at(6007), 8));
        assert!(allowance.take_all(at(6008), 8) && !allowance.take_all(at(6008), 1));
    }
}
