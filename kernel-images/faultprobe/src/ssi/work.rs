//! A parallel computation whose results each CPU checks for another, and the rate of all CPUs.

use serde::{Deserialize, Serialize};

use super::cells::{Cells, PAGE_CELLS, at};
use super::rounded;
use super::team::Deadline;
use crate::cpu::now_ticks;
use crate::pattern::mix;

/// Pages that each CPU sorts: 64 KiB.
pub const PART_PAGES: usize = 16;
const PART_CELLS: usize = PART_PAGES * PAGE_CELLS;
/// Steps of a computation that needs no memory: some 20 us.
const STEPS: u64 = 10_000;

/// What one CPU computed and checked.
#[derive(Debug, Default)]
pub struct Seen {
    /// Parts that it sorted.
    pub sorted: u64,
    /// Parts of another CPU that it checked.
    pub checked: u64,
    /// Of these, parts that were not sorted or had other numbers.
    pub wrong: u64,
}

/// The place of a sort among several CPUs.
#[derive(Clone, Copy, Debug)]
pub struct Sort {
    /// First page of the parts; before it there is one page with the state of each CPU.
    page: usize,
    cpus: usize,
}

impl Sort {
    /// Uses [`pages`](Self::pages) from `page` on, which are zero.
    pub fn new(page: usize, cpus: usize) -> Self {
        Self { page, cpus }
    }

    /// Returns how many pages it takes for so many CPUs.
    pub fn pages(cpus: usize) -> usize {
        cpus * (1 + PART_PAGES)
    }

    /// Cell in which a CPU counts the parts that it has sorted, or those that it has checked.
    fn state(self, cpu: usize, is_checked: bool) -> usize {
        at(self.page + cpu, if is_checked { 8 } else { 0 })
    }

    fn cell(self, cpu: usize, index: usize) -> usize {
        at(self.page + self.cpus + cpu * PART_PAGES, index)
    }

    /// Sorts numbers into the part of this CPU, and checks the part of the next one, until the
    /// deadline.
    pub fn run(self, cells: &impl Cells, me: usize, deadline: &Deadline) -> Seen {
        let mut seen = Seen::default();
        let next = (me + 1) % self.cpus;
        let before = (me + self.cpus - 1) % self.cpus;
        for round in 1..u64::MAX {
            // Whoever checks this part is done with its last contents.
            let checked = self.state(before, true);
            if !deadline.wait(|| cells.load(checked) + 1 >= round) {
                break;
            }
            let mut numbers = numbers(me, round);
            numbers.sort_unstable();
            for (index, &number) in numbers.iter().enumerate() {
                cells.store(self.cell(me, index), number);
            }
            seen.sorted += 1;
            cells.store(self.state(me, false), round);
            let sorted = self.state(next, false);
            if !deadline.wait(|| cells.load(sorted) >= round) {
                break;
            }
            seen.checked += 1;
            seen.wrong += u64::from(!self.is_sorted(cells, next, round));
            cells.store(self.state(me, true), round);
        }
        seen
    }

    fn is_sorted(self, cells: &impl Cells, cpu: usize, round: u64) -> bool {
        let found = (0..PART_CELLS).map(|index| cells.load(self.cell(cpu, index)));
        let found: Vec<u64> = found.collect();
        let digest = |numbers: &[u64]| {
            let numbers = numbers.iter();
            numbers.fold(0_u64, |sum, &number| sum.wrapping_add(mix(number)))
        };
        found.is_sorted() && digest(&found) == digest(&numbers(cpu, round))
    }
}

fn numbers(cpu: usize, round: u64) -> Vec<u64> {
    let mut state = mix((cpu as u64) << 32 ^ round);
    let next = |_| {
        state = mix(state);
        state
    };
    (0..PART_CELLS).map(next).collect()
}

/// How much one CPU computed without memory.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Computed {
    /// Computations.
    pub count: u64,
    /// The value of the counter when they began.
    pub began: u64,
    /// The ticks that they took.
    pub ticks: u64,
    /// Computations with a wrong result.
    pub wrong: u64,
}

impl Computed {
    /// Computes until the deadline.
    pub fn until(deadline: &Deadline) -> Self {
        let expected = steps();
        let begin = Deadline::after(0);
        let mut computed = Self {
            began: now_ticks(),
            ..Self::default()
        };
        while !deadline.is_over() {
            computed.count += 1;
            computed.wrong += u64::from(steps() != expected);
        }
        computed.ticks = begin.elapsed();
        computed
    }

    /// Returns for which part of the longest one's time all computed.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a part")]
    pub fn together(all: &[Self]) -> f64 {
        let longest = all.iter().map(|one| one.ticks).max().unwrap_or(0);
        let last_began = all.iter().map(|one| one.began).max().unwrap_or(0);
        let ends = all.iter().map(|one| one.began.saturating_add(one.ticks));
        let first_end = ends.min().unwrap_or(0);
        first_end.saturating_sub(last_began) as f64 / longest.max(1) as f64
    }

    /// Returns the computations in a million ticks.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a rate")]
    pub fn rate(self) -> f64 {
        self.count as f64 * 1e6 / self.ticks.max(1) as f64
    }
}

/// How fast all CPUs together compute without memory.
#[derive(Debug, Serialize)]
pub struct Rate {
    /// Computations in a million ticks, of CPUs alone.
    pub alone: Vec<f64>,
    /// Of all CPUs at the same time.
    pub together: f64,
    /// The latter divided by the mean of the former.
    pub ratio: f64,
}

impl Rate {
    /// Compares the rates of CPUs alone with that of all.
    #[expect(clippy::cast_precision_loss, reason = "a few CPUs")]
    pub fn of(alone: Vec<f64>, together: f64) -> Self {
        let mean = alone.iter().sum::<f64>() / alone.len() as f64;
        Self {
            ratio: rounded(together / mean),
            together: rounded(together),
            alone: alone.into_iter().map(rounded).collect(),
        }
    }
}

fn steps() -> u64 {
    (0..std::hint::black_box(STEPS)).fold(1, |state, _| mix(state))
}

#[cfg(test)]
mod tests {
    use super::super::cells::Pages;
    use super::*;

    #[test]
    fn computations_are_together_only_while_all_of_them_run() {
        let one = |began, ticks| Computed {
            began,
            ticks,
            ..Computed::default()
        };
        let is = |all: &[Computed], part: f64| {
            let together = Computed::together(all);
            assert!((together - part).abs() < 1e-9, "{together}, not {part}");
        };
        is(&[one(100, 1000)], 1.0);
        is(&[one(100, 1000), one(100, 1000)], 1.0);
        is(&[one(100, 1000), one(350, 1000), one(50, 2000)], 0.375);
        // One after the other: the sum of their rates would be that of nothing.
        is(&[one(100, 1000), one(1100, 1000)], 0.0);
        is(&[one(100, 1000), one(5000, 1000)], 0.0);
        is(&[], 0.0);
        let now = now_ticks();
        let computed = Computed::until(&Deadline::after(1000));
        assert!(computed.began >= now && computed.ticks > 0);
    }

    #[test]
    fn a_part_with_another_number_or_order_is_wrong() {
        let (pages, sort) = (Pages::new(Sort::pages(2)), Sort::new(0, 2));
        let mut part = numbers(1, 1);
        part.sort_unstable();
        let write = |part: &[u64]| {
            for (index, &number) in part.iter().enumerate() {
                pages.store(sort.cell(1, index), number);
            }
            sort.is_sorted(&pages, 1, 1)
        };
        assert!(write(&part));
        assert!(!sort.is_sorted(&pages, 1, 2) && !sort.is_sorted(&pages, 0, 1));
        part.swap(5, 6);
        assert!(!write(&part));
        part.swap(5, 6);
        part[5] = part[6];
        assert!(!write(&part));
    }
}
