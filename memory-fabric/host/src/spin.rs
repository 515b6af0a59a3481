//! Looking for work for a while before sleeping.

use std::time::Duration;

/// The shortest time worth looking for work before sleeping.
const SPIN_MIN: Duration = Duration::from_micros(10);

/// With fewer processors than this, threads that look for work let others run in between: what
/// they wait for may need their own processor.
const CORES_PLENTY: usize = 4;

/// How long a thread looks for work before it sleeps.
///
/// That adapts as KVM's halt polling does: when work came soon after the thread had gone to
/// sleep, it looks twice as long the next time, up to a limit; when it came late, half as long,
/// down to not at all. So a busy thread does not sleep, and an idle one takes no processor time.
#[derive(Debug)]
pub struct Spin {
    max: Duration,
    now: Duration,
    crowded: bool,
}

impl Spin {
    /// Looks for `max` at the most.
    pub fn new(max: Duration) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            max,
            now: SPIN_MIN.min(max),
            crowded: cores < CORES_PLENTY,
        }
    }

    /// A thread without work for `idle`: whether to look again, after the pause made here, or
    /// to sleep.
    pub fn goes_on(&self, idle: Duration) -> bool {
        if idle >= self.now {
            return false;
        }
        if self.crowded {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        true
    }

    /// The thread slept and was woken `idle` after it ran out of work.
    pub fn slept(&mut self, idle: Duration) {
        self.now = if idle <= self.max {
            (self.now * 2).clamp(SPIN_MIN.min(self.max), self.max)
        } else if self.now > SPIN_MIN {
            self.now / 2
        } else {
            Duration::ZERO
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_grows_with_short_waits_and_ends_with_long_ones() {
        let limit = Duration::from_micros(100);
        let mut spin = Spin::new(limit);
        for _ in 0..10 {
            spin.slept(Duration::from_micros(80));
        }
        assert_eq!(spin.now, limit);
        assert!(spin.goes_on(Duration::from_micros(99)) && !spin.goes_on(limit));
        for _ in 0..10 {
            spin.slept(Duration::from_millis(5));
        }
        assert!(!spin.goes_on(Duration::ZERO));
        spin.slept(Duration::from_micros(80));
        assert_eq!(spin.now, SPIN_MIN);
    }
}
