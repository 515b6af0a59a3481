//! Counters that all CPUs increment: under a lock, by an atomic addition, and by compare and
//! exchange. Each must count exactly.

use std::sync::{Mutex, PoisonError};

use super::cells::{Cells, at};
use super::team::Deadline;

/// A CPU ends after so many rounds even if there is time left.
const ROUNDS_MAX: u64 = 10_000_000;
/// Latencies kept.
const TICKS_MAX: usize = 50_000;

/// What one CPU did.
#[derive(Debug, Default)]
pub struct Seen {
    /// How often it incremented.
    pub rounds: u64,
    /// How often another CPU had incremented since it last did.
    pub turns: u64,
    /// The sum of the values that it incremented.
    pub sum: u64,
    /// Ticks until it had the lock, when another CPU had it before.
    pub turn_ticks: Vec<u64>,
    /// It waited for a lock in vain.
    pub stuck: bool,
}

/// What all CPUs did, and whether it is exact.
#[derive(Debug, Default, serde::Serialize)]
pub struct Count {
    /// Increments of all CPUs.
    pub rounds: u64,
    /// Those where another CPU had incremented before.
    pub turns: u64,
    /// Increments that were lost or are too many, and waits for a lock that did not end.
    pub violations: u64,
}

impl Count {
    /// Compares a counter's last value with the increments of each CPU.
    pub fn of(counter: u64, seen: &[Seen]) -> Self {
        let rounds: u64 = seen.iter().map(|seen| seen.rounds).sum();
        let sum = seen
            .iter()
            .fold(0_u64, |sum, seen| sum.wrapping_add(seen.sum));
        // Every value from 0 was incremented once.
        let expected = if rounds == 0 {
            0
        } else {
            (rounds - 1) * rounds / 2
        };
        let stuck: u64 = seen.iter().map(|seen| u64::from(seen.stuck)).sum();
        let duplicates = u64::from(rounds == counter && sum != expected);
        Self {
            rounds,
            turns: seen.iter().map(|seen| seen.turns).sum(),
            violations: rounds.abs_diff(counter) + duplicates + stuck,
        }
    }
}

/// A page of cells for each kind of counter, and a mutex.
#[derive(Debug)]
pub struct Counters {
    page: usize,
    mutex: Mutex<()>,
    /// How long past the deadline a lock is awaited, in ticks.
    patience: u64,
}

/// How a counter is incremented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// By load and store, under a lock of tickets: CPUs get it in the order in which they came.
    TicketLock,
    /// By load and store, under a mutex of the standard library, which is a futex.
    Mutex,
    /// By an addition with a lock prefix.
    Add,
    /// By compare and exchange with a lock prefix.
    CompareExchange,
}

impl Counters {
    /// Pages that counters use.
    pub const PAGES: usize = 3;

    /// Uses cells from `page` on, which are zero.
    pub fn new(page: usize, patience: u64) -> Self {
        Self {
            page,
            mutex: Mutex::new(()),
            patience,
        }
    }

    /// Returns the cell of the counter.
    pub fn counter(&self) -> usize {
        at(self.page + 2, 0)
    }

    /// Increments until the deadline.
    pub fn run(&self, cells: &impl Cells, how: How, deadline: &Deadline) -> Seen {
        let mut seen = Seen::default();
        let mut next = 0;
        while seen.rounds < ROUNDS_MAX && !deadline.is_over() {
            let begin = Deadline::after(0);
            let before = match how {
                How::TicketLock => match self.ticket(cells, deadline) {
                    Some(value) => value,
                    None => {
                        seen.stuck = true;
                        break;
                    }
                },
                How::Mutex => {
                    let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
                    let value = self.increment(cells);
                    drop(guard);
                    value
                }
                How::Add => cells.add(self.counter(), 1),
                How::CompareExchange => loop {
                    let value = cells.load(self.counter());
                    if cells.compare_exchange(self.counter(), value, value + 1) {
                        break value;
                    }
                },
            };
            seen.rounds += 1;
            seen.sum = seen.sum.wrapping_add(before);
            if before != next {
                seen.turns += 1;
                if seen.turn_ticks.len() < TICKS_MAX {
                    seen.turn_ticks.push(begin.elapsed());
                }
            }
            next = before + 1;
        }
        seen
    }

    fn ticket(&self, cells: &impl Cells, deadline: &Deadline) -> Option<u64> {
        let (drawn, served) = (at(self.page, 0), at(self.page + 1, 0));
        let mine = cells.add(drawn, 1);
        let limit = deadline.later(self.patience);
        if !limit.wait(|| cells.load(served) == mine) {
            return None;
        }
        let value = self.increment(cells);
        cells.store(served, mine + 1);
        Some(value)
    }

    fn increment(&self, cells: &impl Cells) -> u64 {
        let value = cells.load(self.counter());
        cells.store(self.counter(), value + 1);
        value
    }
}
