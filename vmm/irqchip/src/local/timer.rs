//! The timer of a local APIC (SDM 11.5.4), one-shot and periodic. It counts nanoseconds, divided as
//! the guest asks: its clock has 1 GHz, as that of KVM's own local APIC.

/// A periodic timer expires at most so often, however short the period: a guest cannot keep its
/// host in the timer alone. KVM has the same limit (`min_timer_period_us`).
const PERIOD_NS_MIN: u64 = 200_000;

/// A counter that runs down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timer {
    /// The initial-count register.
    pub initial: u32,
    /// The divide-configuration register.
    pub divide: u32,
    /// When the count is 0; `None` when the timer does not run.
    pub expires: Option<u64>,
}

impl Timer {
    /// Nanoseconds a count: bits 3, 1 and 0 of the register are the power of two, less one, and 7
    /// stands for a division by 1.
    fn divisor(self) -> u64 {
        let code = (self.divide & 3) | (self.divide >> 1 & 4);
        1 << ((code + 1) & 7)
    }

    fn period(self) -> u64 {
        u64::from(self.initial) * self.divisor()
    }

    /// Writes the initial count, which starts the timer, or stops it by 0.
    pub fn start(&mut self, initial: u32, now: u64) {
        self.initial = initial;
        self.expires = (initial != 0).then(|| now.saturating_add(self.period()));
    }

    /// Writes the divide-configuration register. A running timer continues from its count.
    pub fn set_divide(&mut self, divide: u32, now: u64) {
        let left = self.current(now);
        self.divide = divide & 0b1011;
        if self.expires.is_some() {
            self.expires = Some(now.saturating_add(u64::from(left) * self.divisor()));
        }
    }

    /// The current-count register.
    pub fn current(self, now: u64) -> u32 {
        let left = self.expires.map_or(0, |at| at.saturating_sub(now));
        u32::try_from(left.div_ceil(self.divisor()))
            .map_or(self.initial, |left| left.min(self.initial))
    }

    /// Whether the timer has expired by `now`. A periodic one starts again.
    pub fn expire(&mut self, periodic: bool, now: u64) -> bool {
        let Some(at) = self.expires.filter(|at| *at <= now) else {
            return false;
        };
        self.expires = periodic.then(|| {
            let period = self.period().max(PERIOD_NS_MIN);
            // Periods that have passed as a whole are one interrupt: the vector has one bit.
            let passed = (now - at) / period + 1;
            at.saturating_add(passed.saturating_mul(period))
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(initial: u32, divide: u32) -> Timer {
        let mut timer = Timer {
            divide,
            ..Timer::default()
        };
        timer.start(initial, 1000);
        timer
    }

    #[test]
    fn divisions_are_those_of_the_manual() {
        let codes = [0, 1, 2, 3, 8, 9, 10, 11];
        for (divide, divisor) in codes.into_iter().zip([2, 4, 8, 16, 32, 64, 128, 1]) {
            assert_eq!(started(10, divide).expires, Some(1000 + 10 * divisor));
        }
    }

    #[test]
    fn a_one_shot_timer_expires_once_and_counts_down_to_0() {
        let mut timer = started(1000, 11);
        assert_eq!(timer.current(1000), 1000);
        assert_eq!(timer.current(1999), 1);
        assert!(!timer.expire(false, 1999));
        assert!(timer.expire(false, 2000));
        assert!(!timer.expire(false, 9000));
        assert_eq!((timer.current(2000), timer.expires), (0, None));
    }

    #[test]
    fn a_periodic_timer_keeps_its_phase_and_merges_what_was_missed() {
        let mut timer = started(1_000_000, 11);
        assert!(timer.expire(true, 1_001_000));
        assert_eq!(timer.expires, Some(2_001_000));
        assert!(timer.expire(true, 7_500_000));
        assert_eq!(timer.expires, Some(8_001_000));
        assert_eq!(timer.current(7_500_000), 501_000);
    }

    #[test]
    fn a_short_period_is_bounded() {
        let mut timer = started(1, 11);
        assert!(timer.expire(true, 1001));
        assert_eq!(timer.expires, Some(1001 + PERIOD_NS_MIN));
        assert_eq!(timer.current(1001), 1, "no more than the initial count");
    }

    #[test]
    fn a_new_division_keeps_the_count_and_0_stops() {
        let mut timer = started(1000, 11);
        timer.set_divide(3, 1400);
        assert_eq!(timer.current(1400), 600);
        assert_eq!(timer.expires, Some(1400 + 600 * 16));
        timer.start(0, 1500);
        assert_eq!((timer.current(1500), timer.expires), (0, None));
    }
}
