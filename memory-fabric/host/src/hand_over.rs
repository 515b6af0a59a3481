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

    /// Whether the calling thread shall yield to the one that it woke.
    #[must_use]
    pub fn pays(&self, now: Instant) -> bool {
        self.is_useful && self.not_before.is_none_or(|at| now >= at)
    }

    /// The thread yielded, for whatever reason, and had the CPU back at `now`, or a little before.
    pub fn note(&mut self, yielded: Instant, now: Instant) {
        if now > yielded + SHORT {
            self.not_before = Some(now + KEEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_that_comes_back_late_is_kept_for_a_while() {
        let mut hand_over = HandOver {
            is_useful: true,
            not_before: None,
        };
        let start = Instant::now();
        hand_over.note(start, start + SHORT);
        assert!(hand_over.pays(start));
        let late = start + 2 * SHORT;
        hand_over.note(start, late);
        assert!(!hand_over.pays(late));
        hand_over.note(late, late + SHORT);
        assert!(!hand_over.pays(late + KEEP - SHORT));
        assert!(hand_over.pays(late + KEEP));
        assert!(
            !HandOver::new(Duration::ZERO).pays(start),
            "it does not poll"
        );
    }
}
