//! Polling for work for a limited time before sleeping.

use std::time::Duration;

/// Shortest polling time that is worthwhile.
const SPIN_MIN: Duration = Duration::from_micros(10);

/// With fewer CPUs than this, polling threads yield in between: the thread that they wait for may
/// need their CPU.
const CORES_PLENTY: usize = 4;

/// Whether threads that depend on each other may have to share a CPU.
pub(crate) fn is_crowded() -> bool {
    std::thread::available_parallelism().map_or(1, usize::from) < CORES_PLENTY
}

/// How long a thread polls for work before it sleeps.
///
/// The time adapts like KVM's halt polling: when work arrived soon after the thread had gone to
/// sleep, the time doubles, up to a limit; when it arrived late, the time halves, down to no
/// polling. A busy thread thus does not sleep, and an idle one uses no CPU time.
#[derive(Debug)]
pub struct Spin {
    max: Duration,
    now: Duration,
    crowded: bool,
}

impl Spin {
    /// Creates the state for a polling time of up to `max`.
    pub fn new(max: Duration) -> Self {
        Self {
            max,
            now: SPIN_MIN.min(max),
            crowded: is_crowded(),
        }
    }

    /// Returns whether a thread without work for `idle` polls again, after a pause made here, or
    /// sleeps.
    pub fn keeps_polling(&self, idle: Duration) -> bool {
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

    /// Records that the thread slept, and woke `idle` after it ran out of work.
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
        assert!(spin.keeps_polling(Duration::from_micros(99)) && !spin.keeps_polling(limit));
        for _ in 0..10 {
            spin.slept(Duration::from_millis(5));
        }
        assert!(!spin.keeps_polling(Duration::ZERO));
        spin.slept(Duration::from_micros(80));
        assert_eq!(spin.now, SPIN_MIN);
    }
}
