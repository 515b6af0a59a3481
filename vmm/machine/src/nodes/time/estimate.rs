//! How the time stamp counter of another host differs from this host's, and how fast that changes, from
//! exchanges with it. No clock, no thread.
//!
//! Each exchange gives an interval that contains the difference at its time: half of its round trip
//! to both sides. A pair of exchanges limits how fast the difference changes, and that limits the
//! difference at any other time. An exchange that was delayed has a wide interval and changes
//! nothing; intervals that contradict each other mean that a rate has changed or a counter has
//! jumped, and the oldest are dropped.
//!
//! K. Marzullo, Maintaining the time in a distributed system, 1984 (intersections); F. Cristian, as
//! in [`measure_clock`](super::super::measure_clock).

use std::collections::VecDeque;

use super::super::compare::ClockSample;

/// Exchanges of which an estimate is made.
const EXCHANGES_MAX: usize = 64;
/// Ticks after which an exchange is too old: a minute or less, for which a rate is the same.
const AGE_MAX: i64 = 1 << 37;
/// A rate is a change per tick, as a multiple of 2^-32.
const RATE_BITS: u32 = 32;
const PER_MILLION: i64 = (1 << RATE_BITS) / 1_000_000;
/// Two counters of the same nominal rate differ by less: a hundredth. Crystals differ by a few
/// hundred millionths at most, but a kernel may know a nominal rate badly.
const RATE_MAX: i64 = 10_000 * PER_MILLION;
/// How much a rate changes while exchanges are kept: crystals change by less than a millionth in
/// minutes, when they become warmer. A fifth of it.
const RATE_CHANGE_MAX: i64 = PER_MILLION / 5;
/// An exchange that took longer limits nothing.
const ERROR_MAX: u64 = 1 << 40;

/// The difference at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// What to add to this host's counter to get that of the other host.
    pub difference: u64,
    /// By how much that may be wrong, if the rates have not changed.
    pub error_max: u64,
    /// No more than half of the shortest round trip of the exchanges.
    pub least: u64,
}

/// An interval that contains the difference at a time.
#[derive(Clone, Copy, Debug)]
struct Interval {
    at: u64,
    low: i64,
    high: i64,
}

impl Interval {
    /// Ticks from this interval's time to `at`.
    fn until(&self, at: u64) -> i64 {
        at.wrapping_sub(self.at).cast_signed()
    }
}

/// Estimates the difference of two counters.
#[derive(Debug, Default)]
pub(in super::super) struct Estimator {
    /// Differences are relative to this one, so that they are small.
    base: u64,
    intervals: VecDeque<Interval>,
    /// The smallest and the largest rate.
    rate: (i64, i64),
}

/// The change at a rate in so many ticks.
fn change(rate: i64, ticks: i64) -> i64 {
    let change = (i128::from(rate) * i128::from(ticks)) >> RATE_BITS;
    i64::try_from(change).unwrap_or(if change < 0 { i64::MIN } else { i64::MAX })
}

/// The rate of a change in so many ticks, which are more than 0.
fn rate(change: i128, ticks: i64) -> i64 {
    let rate = (change << RATE_BITS).div_euclid(i128::from(ticks));
    i64::try_from(rate).unwrap_or(if rate < 0 { i64::MIN } else { i64::MAX })
}

impl Estimator {
    /// Takes an exchange. Returns whether it contradicts earlier ones, which are dropped.
    pub fn add(&mut self, sample: &ClockSample) -> bool {
        if sample.error_max > ERROR_MAX {
            return false;
        }
        if self.intervals.is_empty() {
            self.base = sample.difference;
        }
        let relative = sample.difference.wrapping_sub(self.base).cast_signed();
        let error = sample.error_max.cast_signed();
        let interval = Interval {
            at: sample.at,
            low: relative.saturating_sub(error),
            high: relative.saturating_add(error),
        };
        // A counter that went back says nothing of its rate.
        if self
            .intervals
            .back()
            .is_some_and(|last| last.until(interval.at) <= 0)
        {
            self.intervals.clear();
        }
        self.intervals.push_back(interval);
        let is_old = |oldest: &Interval| oldest.until(sample.at) > AGE_MAX;
        while self.intervals.len() > EXCHANGES_MAX || self.intervals.front().is_some_and(is_old) {
            self.intervals.pop_front();
        }
        let mut contradicts = false;
        loop {
            if let Some(rate) = self.rates() {
                self.rate = rate;
                return contradicts;
            }
            contradicts = true;
            self.intervals.pop_front();
        }
    }

    /// The smallest and the largest rate that all pairs allow; none if they contradict each other.
    /// One interval allows all.
    fn rates(&self) -> Option<(i64, i64)> {
        let (mut low, mut high) = (-RATE_MAX, RATE_MAX);
        for (count, later) in self.intervals.iter().enumerate() {
            for earlier in self.intervals.iter().take(count) {
                let ticks = earlier.until(later.at);
                let least = i128::from(later.low) - i128::from(earlier.high);
                let most = i128::from(later.high) - i128::from(earlier.low);
                low = low.max(rate(least, ticks).saturating_sub(RATE_CHANGE_MAX));
                high = high.min(rate(most, ticks).saturating_add(1 + RATE_CHANGE_MAX));
            }
        }
        (low <= high).then_some((low, high))
    }

    /// The difference when this host's counter is `at`, which is not before the newest exchange.
    pub fn at(&self, at: u64) -> Option<Estimate> {
        let (slowest, fastest) = self.rate;
        let mut within: Option<(i64, i64)> = None;
        let mut least = u64::MAX;
        for interval in &self.intervals {
            let ticks = interval.until(at).max(0);
            let low = interval.low.saturating_add(change(slowest, ticks));
            let high = interval
                .high
                .saturating_add(change(fastest, ticks).saturating_add(1));
            let (lowest, highest) = within.unwrap_or((low, high));
            within = Some((lowest.max(low), highest.min(high)));
            least = least.min(interval.high.saturating_sub(interval.low).unsigned_abs() / 2);
        }
        let (low, high) = within?;
        let width = high.saturating_sub(low).max(0);
        let middle = low.saturating_add(width / 2);
        Some(Estimate {
            difference: self.base.wrapping_add_signed(middle),
            error_max: width.unsigned_abs().div_ceil(2),
            least: least.min(width.unsigned_abs() / 2),
        })
    }

    /// How fast the difference grows, and by how much that may be wrong, in millionths: the middle of
    /// what is possible, once two exchanges are known.
    pub fn rate_ppm(&self) -> Option<(f64, f64)> {
        let (low, high) = self.rate;
        #[expect(clippy::cast_precision_loss, reason = "a rate is below 2^33")]
        let millionths = |sum: i64| sum as f64 / 2.0 * 1e6 / 2_f64.powi(32);
        (self.intervals.len() > 1).then(|| (millionths(low + high), millionths(high - low)))
    }

    /// An upper limit of how fast the difference moves away from a fixed value, in ticks of change
    /// per 2^32 ticks.
    pub fn rate_max(&self) -> u64 {
        self.rate.0.unsigned_abs().max(self.rate.1.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    /// Two counters, of which the other changes its rate once.
    #[derive(Clone, Debug)]
    struct Counters {
        difference: i64,
        ppm: (i32, i32),
        changes_at: u64,
    }

    impl Counters {
        /// The exact difference at `at` ticks after the start.
        fn at(&self, at: u64) -> i64 {
            let drift = |ticks: u64, ppm: i32| {
                i64::try_from(i128::from(ticks) * i128::from(ppm) / 1_000_000).unwrap()
            };
            let before = at.min(self.changes_at);
            self.difference + drift(before, self.ppm.0) + drift(at - before, self.ppm.1)
        }

        /// An exchange that begins at `at` and takes so long there and back.
        fn exchange(&self, start: u64, at: u64, there: u64, back: u64) -> ClockSample {
            let middle = at + (there + back) / 2;
            let answer = (start + at + there).wrapping_add_signed(self.at(at + there));
            ClockSample {
                at: start.wrapping_add(middle),
                difference: answer.wrapping_sub(start.wrapping_add(middle)),
                error_max: (there + back).div_ceil(2),
                round_trip: Duration::ZERO,
            }
        }
    }

    fn wrong(counters: &Counters, at: u64, estimate: Estimate) -> u64 {
        let found = estimate.difference.cast_signed();
        found.wrapping_sub(counters.at(at)).unsigned_abs()
    }

    /// Ticks of one-way delays: a fast network, with jumps to 100 times as much.
    fn delay() -> impl Strategy<Value = u64> {
        prop_oneof![4 => 10_000..40_000_u64, 1 => 40_000..4_000_000_u64]
    }

    proptest! {
        #[test]
        fn the_exact_difference_is_within_the_error(
            difference in -(1_i64 << 50)..1 << 50,
            ppm in -100..=100_i32,
            exchanges in prop::collection::vec((1_000_000..2_000_000_000_u64, delay(), delay()), 1..60),
            later in 0..2_000_000_000_u64,
        ) {
            let counters = Counters { difference, ppm: (ppm, ppm), changes_at: 0 };
            let start = 1 << 52;
            let (mut estimator, mut at) = (Estimator::default(), 0);
            for (pause, there, back) in exchanges {
                at += pause;
                let contradicts = estimator.add(&counters.exchange(start, at, there, back));
                prop_assert!(!contradicts);
                at += there + back;
                for at in [at, at + later] {
                    let estimate = estimator.at(start + at).unwrap();
                    let wrong = wrong(&counters, at, estimate);
                    prop_assert!(wrong <= estimate.error_max, "{wrong} wrong: {estimate:?}");
                }
            }
        }

        #[test]
        fn the_error_is_little_more_than_half_of_the_shortest_round_trip(
            ppm in -100..=100_i32,
            delays in prop::collection::vec((delay(), delay()), 16),
        ) {
            let counters = Counters { difference: 7, ppm: (ppm, ppm), changes_at: 0 };
            let (mut estimator, mut at) = (Estimator::default(), 0);
            for (there, back) in &delays {
                at += 2_000_000_000;
                estimator.add(&counters.exchange(0, at, *there, *back));
            }
            // The newest of a known error: older ones do not make it worse.
            at += 2_000_000_000;
            estimator.add(&counters.exchange(0, at, 20_000, 20_000));
            let estimate = estimator.at(at + 40_000).unwrap();
            prop_assert!(estimate.error_max <= 20_100, "{estimate:?}");
            let (found, error) = estimator.rate_ppm().unwrap();
            let wrong = (found - f64::from(ppm)).abs();
            prop_assert!(wrong < 5.0, "{found}, not {ppm}");
            prop_assert!(wrong <= error + 0.01, "{found} is more than {error} away from {ppm}");
        }

        #[test]
        fn a_changed_rate_is_found_again(
            (before, after) in (-100..=100_i32, -100..=100_i32),
            delays in prop::collection::vec((10_000..40_000_u64, 10_000..40_000_u64), 90),
        ) {
            let pause = 500_000_000;
            let changes_at = 20 * pause;
            let counters = Counters { difference: -5, ppm: (before, after), changes_at };
            let (mut estimator, mut at) = (Estimator::default(), 0);
            for (there, back) in delays {
                at += pause;
                estimator.add(&counters.exchange(0, at, there, back));
            }
            let estimate = estimator.at(at + 80_000).unwrap();
            let wrong = wrong(&counters, at + 80_000, estimate);
            prop_assert!(wrong <= estimate.error_max, "{wrong} wrong: {estimate:?}");
            prop_assert!(estimate.error_max <= 42_000, "{estimate:?}");
        }
    }

    #[test]
    fn a_jump_of_a_counter_is_found_by_the_next_exchange() {
        let counters = Counters {
            difference: 0,
            ppm: (50, 50),
            changes_at: 0,
        };
        let mut estimator = Estimator::default();
        for second in 1..10 {
            let exchange = counters.exchange(0, second * 2_000_000_000, 10_000, 30_000);
            assert!(!estimator.add(&exchange));
        }
        let jumped = Counters {
            difference: 1 << 40,
            ..counters
        };
        let at = 20_000_000_000;
        assert!(estimator.add(&jumped.exchange(0, at, 10_000, 30_000)));
        let estimate = estimator.at(at + 40_000).unwrap();
        let wrong = wrong(&jumped, at + 40_000, estimate);
        assert!(
            wrong <= estimate.error_max && estimate.error_max < 21_000,
            "{estimate:?}"
        );
    }

    #[test]
    fn what_no_exchange_gives_is_survived() {
        let mut estimator = Estimator::default();
        assert_eq!((estimator.at(5), estimator.rate_ppm()), (None, None));
        let sample = |at, difference, error_max| ClockSample {
            at,
            difference,
            error_max,
            round_trip: Duration::ZERO,
        };
        estimator.add(&sample(0, 1, u64::MAX));
        assert_eq!(estimator.at(5), None, "it limits nothing");
        for (at, difference) in [
            (9, 0),
            (9, u64::MAX),
            (3, 1 << 63),
            (u64::MAX, 5),
            (1, 1 << 62),
        ] {
            estimator.add(&sample(at, difference, 1));
            assert!(estimator.at(at).is_some());
            assert!(estimator.at(at.wrapping_add(1 << 63)).is_some());
        }
    }
}
