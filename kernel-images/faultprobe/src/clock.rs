//! A clock that is cheap to read and fine enough for one memory access.
//!
//! The time-stamp counter is read directly, since a guest may have no clock source but the
//! timer tick, and then `clock_gettime` has the tick's resolution. The counter's rate comes from
//! comparing it with the monotonic clock over the whole run.

use std::time::Instant;

use crate::cpu::now_ticks;

/// The start of the run, on both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    instant: Instant,
    ticks: u64,
}

impl Clock {
    /// Records the start of the run.
    pub fn start() -> Self {
        Self {
            instant: Instant::now(),
            ticks: now_ticks(),
        }
    }

    /// Returns the nanoseconds per tick, measured from the start until now.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a rate")]
    pub fn ns_per_tick(&self) -> f64 {
        let ticks = now_ticks().wrapping_sub(self.ticks).max(1);
        self.instant.elapsed().as_nanos() as f64 / ticks as f64
    }

    /// Returns the nanoseconds since the start by the kernel's clock, below 585 years.
    pub fn elapsed_ns(&self) -> u64 {
        u64::try_from(self.instant.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the seconds since the start.
    pub fn elapsed_s(&self) -> f64 {
        self.instant.elapsed().as_secs_f64()
    }
}
