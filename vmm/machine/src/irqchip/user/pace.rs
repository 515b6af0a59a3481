//! How soon the timer's interrupt comes again to a vCPU whose handler of it waits for pages.
//!
//! A handler that takes longer than the timer's period ends when the next interrupt is due already. A
//! processor takes that one before the next instruction, so the program that was interrupted never
//! runs: it stops, with nothing wrong in it. On one host a tick takes microseconds. On several, what it
//! writes is wanted by the other CPUs' ticks, and it may wait for ten pages. So after such a handler
//! the program gets some of the time that the handler took.
//!
//! Times are in nanoseconds since any origin.

/// How much later than due the next interrupt can be taken after a handler that was slow. Programs
/// switch interrupts off as well, but not for so long.
const LATE_MIN: u64 = 1_000_000;

/// How long the program runs, relative to the handler.
const REST_FACTOR: u64 = 2;

/// The longest time for that. The guest's clock does not depend on its ticks, its timers do.
const REST_MAX: u64 = 200_000_000;

/// What becomes of an interrupt of the timer that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// It is raised.
    Now,
    /// It waits until the guest takes interrupts.
    WhenEnabled,
    /// It waits until then.
    At(u64),
}

/// When the timer's interrupt may come.
#[derive(Debug, Default)]
pub(super) struct Pace {
    is_raised: bool,
    /// When the last one was given to the guest.
    given_at: Option<u64>,
    /// The next one is due since then, and the guest takes none.
    late_since: Option<u64>,
    not_before: u64,
}

impl Pace {
    /// An interrupt of the timer is due. `is_enabled`: the guest takes interrupts.
    pub fn due(&mut self, now: u64, is_enabled: bool) -> Due {
        if let Some(given_at) = self.given_at {
            if !is_enabled {
                self.late_since.get_or_insert(now);
                return Due::WhenEnabled;
            }
            self.given_at = None;
            let late = self.late_since.take().map_or(0, |since| now - since);
            if late >= LATE_MIN {
                let took = now.saturating_sub(given_at);
                self.not_before = now + took.saturating_mul(REST_FACTOR).min(REST_MAX);
            }
        }
        if now < self.not_before {
            return Due::At(self.not_before);
        }
        self.is_raised = true;
        Due::Now
    }

    /// The guest is given an interrupt.
    pub fn gives(&mut self, now: impl FnOnce() -> u64) {
        if std::mem::take(&mut self.is_raised) {
            self.given_at = Some(now());
            self.late_since = None;
        }
    }

    /// The program has nothing to do.
    pub fn halts(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const PERIOD: u64 = 4 * MS;

    /// A guest whose handler takes `handler`, and which has a periodic timer. Returns how long its
    /// program ran in a second, and how many interrupts it took.
    fn second(handler: u64, paced: bool) -> (u64, u64) {
        let mut pace = Pace::default();
        let (mut now, mut due, mut ran, mut taken) = (0, PERIOD, 0, 0);
        while now < 1000 * MS {
            // The program runs until the next interrupt.
            let at = match pace.due(now.max(due), true) {
                Due::Now => now.max(due),
                Due::At(at) => at,
                Due::WhenEnabled => unreachable!("it takes interrupts"),
            };
            ran += at - now;
            now = at;
            if paced {
                assert_eq!(pace.due(now, true), Due::Now);
            }
            taken += 1;
            pace.gives(|| now);
            due = now.max(due) + PERIOD;
            if !paced {
                pace.halts();
            }
            let ends = now + handler;
            if due < ends {
                now = due;
                if paced {
                    assert_eq!(pace.due(now, false), Due::WhenEnabled);
                }
            }
            now = ends;
        }
        (ran, taken)
    }

    #[test]
    fn a_program_runs_however_long_the_handler_of_the_timer_takes() {
        for handler in [5 * MS + MS / 10, 20 * MS, 60 * MS] {
            let (ran, taken) = second(handler, true);
            assert!(ran >= 600 * MS && taken >= 3, "{handler}: {ran}, {taken}");
            // As a processor would do it.
            let (ran, _) = second(handler, false);
            assert!(ran <= PERIOD, "{handler}: {ran}");
        }
    }

    #[test]
    fn quick_handlers_and_halts_change_nothing() {
        let (ran, taken) = second(MS / 10, true);
        assert_eq!((ran, taken), second(MS / 10, false));
        assert!(taken >= 249);
        // Interrupts were off for a moment when the next one was due.
        let mut pace = Pace::default();
        assert_eq!(pace.due(PERIOD, true), Due::Now);
        pace.gives(|| PERIOD);
        assert_eq!(pace.due(2 * PERIOD, false), Due::WhenEnabled);
        assert_eq!(pace.due(2 * PERIOD + 1000, true), Due::Now);
        // A slow one, after which the program waits for the timer.
        pace.gives(|| 2 * PERIOD);
        assert_eq!(pace.due(3 * PERIOD, false), Due::WhenEnabled);
        let now = 2 * PERIOD + 50 * MS;
        assert_eq!(pace.due(now, true), Due::At(now + 100 * MS));
        pace.halts();
        assert_eq!(pace.due(now, true), Due::Now);
    }

    #[test]
    fn a_rest_has_a_bound() {
        const MUCH: u64 = u64::MAX / 2;
        let mut pace = Pace::default();
        assert_eq!(pace.due(0, true), Due::Now);
        pace.gives(|| 0);
        assert_eq!(pace.due(PERIOD, false), Due::WhenEnabled);
        assert_eq!(pace.due(MUCH, true), Due::At(MUCH + REST_MAX));
    }
}
