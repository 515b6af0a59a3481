//! Comparing the time stamp counters of two hosts while the guest runs: the questions and answers of
//! [`measure_clock`](super::measure_clock), as messages between the others.
//!
//! The best of a few exchanges counts, each of which begins when the one before has ended.

use std::time::{Duration, Instant};

/// Exchanges of one comparison.
const EXCHANGES: u8 = 8;

/// One exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSample {
    /// This host's counter in its middle.
    pub at: u64,
    /// What to add to this host's counter to get that of the other host.
    pub difference: u64,
    /// By how much that may be wrong.
    pub error_max: u64,
    /// How long the exchange took.
    pub round_trip: Duration,
}

/// This host's clocks, read one right after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub ticks: u64,
    pub time: Instant,
}

#[derive(Debug)]
struct Question {
    number: u32,
    at: Now,
}

/// What to do after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// Nobody asked.
    Unasked,
    /// Ask again, by this number.
    Ask(u32),
    /// The comparison is done.
    Done(ClockSample),
}

/// The comparisons with one other host.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    next: u32,
    open: Option<Question>,
    left: u8,
    best: Option<ClockSample>,
}

impl Comparison {
    fn ask(&mut self, now: Now) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.open = Some(Question { number, at: now });
        number
    }

    /// Begins a comparison, unless one is in progress. Returns the number of its first question, which
    /// is sent at once.
    pub fn begin(&mut self, now: Now) -> Option<u32> {
        if self.open.is_some() {
            return None;
        }
        self.left = EXCHANGES;
        self.best = None;
        Some(self.ask(now))
    }

    /// A question was not sent after all: the comparison ends.
    pub fn give_up(&mut self) {
        self.open = None;
    }

    /// The other host has answered question `number`: its counter is `ticks`.
    pub fn answered(&mut self, number: u32, ticks: u64, now: Now) -> Answered {
        let question = self.open.take_if(|open| open.number == number);
        let Some(Question { at, .. }) = question else {
            return Answered::Unasked;
        };
        let took = now.ticks.wrapping_sub(at.ticks);
        let middle = at.ticks.wrapping_add(took / 2);
        let sample = ClockSample {
            at: middle,
            difference: ticks.wrapping_sub(middle),
            error_max: took.div_ceil(2),
            round_trip: now.time.saturating_duration_since(at.time),
        };
        let best = self.best.filter(|best| best.error_max <= sample.error_max);
        let best = best.unwrap_or(sample);
        self.best = Some(best);
        self.left -= 1;
        if self.left > 0 {
            Answered::Ask(self.ask(now))
        } else {
            Answered::Done(best)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_of_the_exchanges_counts() {
        let start = Instant::now();
        // One tick is a microsecond; the other host is 1,000 ahead, and the way there is shorter.
        let at = |ticks: u64| Now {
            ticks,
            time: start + Duration::from_micros(ticks),
        };
        let mut comparison = Comparison::default();
        let mut number = comparison.begin(at(100)).expect("none is in progress");
        assert_eq!(comparison.begin(at(100)), None, "one at a time");
        assert_eq!(
            comparison.answered(number + 7, 0, at(101)),
            Answered::Unasked
        );
        let mut sent = 100;
        for round_trip in [90, 50, 10, 70, 80, 60, 30] {
            let there = sent + round_trip / 3;
            let back = sent + round_trip;
            match comparison.answered(number, there + 1_000, at(back)) {
                Answered::Ask(next) => number = next,
                other => panic!("{other:?}"),
            }
            sent = back;
        }
        let Answered::Done(best) = comparison.answered(number, sent + 1_040, at(sent + 80)) else {
            panic!("8 exchanges are enough")
        };
        assert_eq!((best.error_max, best.round_trip.as_micros()), (5, 10));
        assert_eq!((best.at, best.difference), (245, 998));
        assert_eq!(comparison.answered(number, 0, at(900)), Answered::Unasked);
        assert!(comparison.begin(at(1_000)).is_some(), "the next one");
    }
}
