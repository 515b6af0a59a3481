//! A comparison of the time stamp counters of this host and another one before a VM starts on both:
//! what the nodes of a VM find out at its start, and while it runs.

use std::time::{Duration, Instant};

use super::compare::ClockSample;
use super::time::{Estimator, HostCounter, OtherRate};
use crate::error::MachineError;
use crate::kvm::open_kvm;
use crate::sys::time_stamp;
use crate::vcpu::tsc;

/// The rate of a host's time stamp counter, and what its KVM can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostClock {
    /// In kHz.
    pub khz: u32,
    /// Whether KVM can give a vCPU's counter another rate.
    pub scales: bool,
}

impl HostClock {
    /// Asks this host's KVM.
    ///
    /// # Errors
    ///
    /// When KVM cannot be used.
    pub fn of_this_host() -> Result<Self, MachineError> {
        let kvm = open_kvm()?;
        Ok(Self {
            khz: tsc::Clock::of_new(&kvm)?.khz,
            scales: tsc::can_scale(&kvm),
        })
    }
}

/// What a comparison has found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Surveyed {
    /// How far the other counter is ahead of this host's, in nanoseconds at the rate of this one's.
    pub ahead_ns: i64,
    /// By how much that may be wrong.
    pub error_max: Duration,
    /// How fast it moves away, in millionths, and by how much that may be wrong.
    pub rate_ppm: Option<(f64, f64)>,
    /// The shortest round trip.
    pub round_trip: Duration,
}

/// A comparison with one other host, whose counter a VM of this host would use at this host's rate.
#[derive(Debug)]
pub struct ClockSurvey {
    here: HostClock,
    /// How the other host's counter becomes that of its vCPUs.
    counter: HostCounter,
    estimator: Estimator,
    round_trip: Duration,
}

impl ClockSurvey {
    /// Begins one between hosts with these counters.
    ///
    /// # Errors
    ///
    /// When vCPUs of a VM cannot be on both, the first of them here.
    pub fn new(here: HostClock, there: HostClock) -> Result<Self, OtherRate> {
        let counter = HostCounter::default().with_rates(there.khz, here.khz, there.scales)?;
        Ok(Self {
            here,
            counter,
            estimator: Estimator::default(),
            round_trip: Duration::MAX,
        })
    }

    /// Makes one exchange, in which the other host's counter is read.
    ///
    /// # Errors
    ///
    /// Those of the reading.
    pub fn exchange<E>(&mut self, read: impl FnOnce() -> Result<u64, E>) -> Result<(), E> {
        let (start, before) = (Instant::now(), time_stamp());
        let ticks = read()?;
        let after = time_stamp();
        self.took(start.elapsed(), before, ticks, after);
        Ok(())
    }

    fn took(&mut self, round_trip: Duration, before: u64, ticks: u64, after: u64) {
        let took = after.wrapping_sub(before);
        let middle = before.wrapping_add(took / 2);
        self.round_trip = self.round_trip.min(round_trip);
        self.estimator.add(&ClockSample {
            at: middle,
            difference: self.counter.scaled(ticks).wrapping_sub(middle),
            error_max: took.div_ceil(2),
            round_trip,
        });
    }

    /// What was found so far, if anything.
    #[must_use]
    pub fn found(&self) -> Option<Surveyed> {
        self.at(time_stamp())
    }

    fn at(&self, now: u64) -> Option<Surveyed> {
        let estimate = self.estimator.at(now)?;
        let nanos = |ticks: i128| ticks * 1_000_000 / i128::from(self.here.khz.max(1));
        let ahead = nanos(estimate.difference.cast_signed().into());
        let error = nanos(estimate.error_max.into());
        Some(Surveyed {
            ahead_ns: i64::try_from(ahead).unwrap_or(if ahead < 0 { i64::MIN } else { i64::MAX }),
            error_max: Duration::from_nanos(u64::try_from(error).unwrap_or(u64::MAX)),
            rate_ppm: self.estimator.rate_ppm(),
            round_trip: self.round_trip,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GHZ: HostClock = HostClock {
        khz: 1_000_000,
        scales: false,
    };

    /// Compares this host's counter of 1 GHz with one that is `ahead` and `ppm` faster, in 64
    /// exchanges of 100 us, one in 20 ms.
    fn compare(there: HostClock, ahead: u64, ticks_of: impl Fn(u64) -> u64) -> Surveyed {
        let mut survey = ClockSurvey::new(GHZ, there).expect("rates that fit");
        assert_eq!(survey.at(0), None);
        let mut now = 5_000_000_000;
        for number in 0..64 {
            let delayed = u64::from(number % 3 == 1) * 4_000_000;
            let (sent, back) = (now, now + 100_000 + delayed);
            let read = sent + 40_000;
            let round_trip = Duration::from_nanos(back - sent);
            survey.took(round_trip, sent, ticks_of(read).wrapping_add(ahead), back);
            now += 20_000_000;
        }
        survey.at(now).expect("64 exchanges")
    }

    #[test]
    fn an_offset_and_a_drift_are_found_within_their_errors() {
        let ahead = 3_000_000_000;
        let found = compare(GHZ, ahead, |now| now + now / 1_000_000 * 30);
        let (ppm, error) = found.rate_ppm.expect("more than one exchange");
        assert!((ppm - 30.0).abs() <= error && error < 100.0, "{found:?}");
        let exact = 3_000_000_000 + 30 * 6_280_000_000_i64 / 1_000_000;
        let error = i64::try_from(found.error_max.as_nanos()).expect("small");
        assert!(
            found.ahead_ns.abs_diff(exact) <= error.unsigned_abs(),
            "{found:?}"
        );
        assert!(error <= 60_000, "half of a round trip: {found:?}");
        assert_eq!(found.round_trip, Duration::from_micros(100));
    }

    #[test]
    fn a_counter_with_another_rate_is_compared_as_it_is_scaled() {
        let there = HostClock {
            khz: 2_000_000,
            scales: true,
        };
        let found = compare(there, 0, |now| 2 * now);
        let (ppm, error) = found.rate_ppm.expect("more than one exchange");
        assert!(ppm.abs() <= error && error < 100.0, "{found:?}");
        assert!(found.ahead_ns.abs() <= 60_000, "{found:?}");
        let fixed = HostClock {
            scales: false,
            ..there
        };
        let refused = ClockSurvey::new(GHZ, fixed).expect_err("it cannot be scaled");
        assert_eq!((refused.here, refused.of_primary), (2_000_000, 1_000_000));
    }
}
