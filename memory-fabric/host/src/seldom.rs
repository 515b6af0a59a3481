//! Log lines that others can cause, at a limited rate.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Interval of log lines of one kind that others can cause: often enough to be noticed, and too
/// seldom to fill a disk.
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);

/// Lets an event through at most once in an interval, and counts those between.
#[derive(Debug)]
pub struct Seldom {
    interval: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// Creates a limit of one event in `interval`.
    #[must_use]
    pub const fn new(interval: Duration) -> Self {
        let state = State {
            last: None,
            left_out: 0,
        };
        Self {
            interval,
            state: Mutex::new(state),
        }
    }

    /// Creates the limit of log lines of one kind that peers or clients can cause.
    #[must_use]
    pub const fn notices() -> Self {
        Self::new(NOTICE_INTERVAL)
    }

    /// Notes an event. Returns how many were left out since the last one that was let through, if
    /// this one is let through.
    pub fn pass(&self, now: Instant) -> Option<u64> {
        let mut state = crate::lock(&self.state);
        if let Some(last) = state.last
            && now.saturating_duration_since(last) < self.interval
        {
            state.left_out += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_in_an_interval_passes_and_the_others_are_counted() {
        let seldom = Seldom::new(Duration::from_secs(10));
        let start = Instant::now();
        let at = |seconds| seldom.pass(start + Duration::from_secs(seconds));
        assert_eq!([at(0), at(1), at(9)], [Some(0), None, None]);
        assert_eq!([at(10), at(11), at(30)], [Some(2), None, Some(1)]);
    }
}
