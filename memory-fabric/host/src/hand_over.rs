//! Giving the CPU to a thread that was just woken.

use std::time::{Duration, Instant};

use crate::spin::is_crowded;

/// Longest time after which a CPU that was given away is back as expected: a thread that was woken
/// touches its next page, or another one polls.
const SHORT: Duration = Duration::from_micros(100);

/// Time for which the CPU is kept after it came back late: other threads compute on it.
const KEEP: Duration = Duration::from_millis(100);

/// Whether a thread that woke another one gives it the CPU at once, before it does what can wait.
///
/// That pays where CPUs are few, so that both may share one, and where no other thread takes the CPU
/// for long.
#[derive(Debug)]
pub struct HandOver {
    is_useful: bool,
    not_before: Option<Instant>,
}

impl HandOver {
    /// The state for a thread that polls for up to `spin`.
    #[must_use]
    pub fn new(spin: Duration) -> Self {
        Self {
            is_useful: !spin.is_zero() && is_crowded(),
            not_before: None,
        }
    }

    /// Whether handing over can pay on this host.
    #[must_use]
    pub const fn is_useful(&self) -> bool {
        self.is_useful
    }

    /// Whether the calling thread shall yield to the one that it woke.
    #[must_use]
    pub fn pays(&self, now: Instant) -> bool {
        self.is_useful && self.not_before.is_none_or(|at| now >= at)
    }

    /// Pauses by a call that may yield, for whatever reason. Returns what the call does, and the time
    /// after it. Only the call counts as absence, whatever the thread does between two of them.
    pub fn pause<T>(&mut self, pause: impl FnOnce() -> T) -> (T, Instant) {
        self.pause_by(Instant::now, pause)
    }

    fn pause_by<T>(
        &mut self,
        clock: impl Fn() -> Instant,
        pause: impl FnOnce() -> T,
    ) -> (T, Instant) {
        let yielded = clock();
        let paused = pause();
        let now = clock();
        if now > yielded + SHORT {
            self.not_before = Some(now + KEEP);
        }
        (paused, now)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A state, and the clock that it reads.
    fn useful() -> (HandOver, Cell<Instant>) {
        let hand_over = HandOver {
            is_useful: true,
            not_before: None,
        };
        (hand_over, Cell::new(Instant::now()))
    }

    #[test]
    fn a_cpu_that_comes_back_late_is_kept_for_a_while() {
        let (mut hand_over, clock) = useful();
        let start = clock.get();
        let pass = |time| clock.set(clock.get() + time);
        let mut pause = |time| hand_over.pause_by(|| clock.get(), || pass(time));
        assert_eq!(pause(SHORT), ((), start + SHORT));
        let (_, late) = pause(2 * SHORT);
        pause(SHORT);
        assert!(!hand_over.pays(late));
        assert!(!hand_over.pays(late + KEEP - SHORT));
        assert!(hand_over.pays(late + KEEP));
        assert!(
            !HandOver::new(Duration::ZERO).pays(start),
            "it does not poll"
        );
    }

    #[test]
    fn what_the_thread_does_between_two_pauses_is_no_absence() {
        let (mut hand_over, clock) = useful();
        for _ in 0..3 {
            hand_over.pause_by(|| clock.get(), || ());
            clock.set(clock.get() + 10 * SHORT);
            assert!(hand_over.pays(clock.get()));
        }
    }
}
