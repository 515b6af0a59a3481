//! Litmus tests of the memory model of x86 (Sewell, Sarkar, Owens, Zappa Nardelli, Myreen:
//! "x86-TSO", 2010; names as there).
//!
//! A test does not start its CPUs anew for each pair of accesses, which would cost transfers of
//! pages. Each CPU writes 1, 2, 3, ... to its variable, reads the other's each time, and keeps what
//! it read. Afterwards the histories are compared: each pair of a write of one CPU and one of the
//! other is an instance of the test. A CPU is never more than `WINDOW` writes ahead of what it has
//! read of the other, so that they meet often.

use std::sync::atomic::{Ordering, compiler_fence};

use super::cells::{Cells, at};
use super::interrupt;
use super::team::Deadline;

/// A CPU ends after so many writes even if there is time left.
const ROUNDS_MAX: u64 = 200_000;
/// How far a CPU runs ahead of the others.
const WINDOW: u64 = 16;

/// A litmus test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Litmus {
    /// Two CPUs write a variable each, fence, and read the other's: one of them sees the other.
    StoreBuffering,
    /// The same, where one has no fence, and the other has the kernel interrupt it instead.
    StoreBufferingCalled,
    /// One writes data and then a flag: who sees the flag sees the data.
    MessagePassing,
    /// Each reads a variable and then writes the other: at most one sees the other.
    LoadBuffering,
    /// What one CPU saw before it wrote, a third one sees that sees the write.
    Causality,
    /// Two write a variable each: two others see these writes in the same order.
    IndependentReads,
}

/// The variables and how they are laid out.
#[derive(Clone, Copy, Debug)]
pub struct Variables {
    x: usize,
    y: usize,
}

impl Variables {
    /// Puts each on a page of its own.
    pub fn apart(page: usize) -> Self {
        Self {
            x: at(page, 0),
            y: at(page + 1, 0),
        }
    }

    /// Puts both on one page.
    pub fn together(page: usize) -> Self {
        Self {
            x: at(page, 0),
            y: at(page, 64),
        }
    }
}

/// What a CPU read, in order; of one variable, or of both.
pub type History = Vec<(u64, u64)>;

impl Litmus {
    /// All tests.
    pub const ALL: [Self; 6] = [
        Self::StoreBuffering,
        Self::StoreBufferingCalled,
        Self::MessagePassing,
        Self::LoadBuffering,
        Self::Causality,
        Self::IndependentReads,
    ];

    /// Returns the name in the literature, or an extension of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::StoreBuffering => "SB",
            Self::StoreBufferingCalled => "SB+membarrier",
            Self::MessagePassing => "MP",
            Self::LoadBuffering => "LB",
            Self::Causality => "WRC",
            Self::IndependentReads => "IRIW",
        }
    }

    /// Returns how many CPUs it takes.
    pub fn cpus(self) -> usize {
        match self {
            Self::Causality => 3,
            Self::IndependentReads => 4,
            _ => 2,
        }
    }

    /// Runs one CPU's part until the deadline.
    pub fn run(
        self,
        cells: &impl Cells,
        at: Variables,
        role: usize,
        deadline: &Deadline,
    ) -> History {
        let Variables { x, y } = at;
        let (mine, other) = if role.is_multiple_of(2) {
            (x, y)
        } else {
            (y, x)
        };
        let mut history = History::new();
        // Keeps what was read and returns whether to go on, once the other CPU is near.
        let mut goes_on = |round: u64, seen: u64| {
            history.push((round, seen));
            let is_near =
                seen + WINDOW >= round || deadline.wait(|| cells.load(other) + WINDOW >= round);
            is_near && !is_due(round, deadline)
        };
        match self {
            Self::StoreBuffering | Self::StoreBufferingCalled => {
                for round in 1..=ROUNDS_MAX {
                    cells.store(mine, round);
                    if self == Self::StoreBuffering {
                        cells.fence();
                    } else if role == 0 {
                        interrupt::call();
                    } else {
                        // The processor may take the next load first, the compiler may not.
                        compiler_fence(Ordering::SeqCst);
                    }
                    if !goes_on(round, cells.load(other)) {
                        break;
                    }
                }
            }
            Self::LoadBuffering => {
                for round in 1..=ROUNDS_MAX {
                    let seen = cells.load(other);
                    cells.store(mine, round);
                    if !goes_on(round, seen) {
                        break;
                    }
                }
            }
            Self::MessagePassing => match role {
                0 => write_all(cells, &[x, y], deadline),
                _ => read_both(cells, y, x, deadline, &mut history),
            },
            Self::Causality => match role {
                0 => write_all(cells, &[x], deadline),
                1 => {
                    let mut last = 0;
                    while deadline.wait(|| cells.load(x) > last) {
                        last = cells.load(x);
                        cells.store(y, last);
                    }
                }
                _ => read_both(cells, y, x, deadline, &mut history),
            },
            Self::IndependentReads => match role {
                0 | 1 => write_all(cells, &[mine], deadline),
                _ => read_both(cells, mine, other, deadline, &mut history),
            },
        }
        history
    }

    /// Returns how many reads contradict the memory model.
    pub fn violations(self, histories: &[History]) -> u64 {
        // No CPU sees an older value of a variable than it saw before.
        let decreases: u64 = histories.iter().map(decreases).sum();
        let forbidden = match self {
            Self::StoreBuffering | Self::StoreBufferingCalled => {
                both_missed(&histories[0], &histories[1])
            }
            Self::LoadBuffering => both_saw(&histories[0], &histories[1]),
            // The flag is read first, and never ahead of the data.
            Self::MessagePassing | Self::Causality => {
                let reader = histories.iter().flatten();
                reader.filter(|(flag, data)| data < flag).map(|_| 1).sum()
            }
            Self::IndependentReads => disagree(&histories[2], &histories[3]),
        };
        decreases + forbidden
    }
}

/// Returns whether a CPU ends before its next round. It does not look at the time in each one.
fn is_due(round: u64, deadline: &Deadline) -> bool {
    round.is_multiple_of(WINDOW) && deadline.is_over()
}

/// Writes 1, 2, 3, ... to each of the variables, in order.
fn write_all(cells: &impl Cells, variables: &[usize], deadline: &Deadline) {
    for round in 1..u64::MAX {
        for &variable in variables {
            cells.store(variable, round);
        }
        if is_due(round, deadline) {
            break;
        }
    }
}

/// Reads one variable and then another, and keeps what differs from the reads before.
fn read_both(
    cells: &impl Cells,
    first: usize,
    second: usize,
    deadline: &Deadline,
    history: &mut History,
) {
    let mut last = (0, 0);
    for round in 1..u64::MAX {
        let a = cells.load(first);
        let b = cells.load(second);
        if (a, b) != last {
            history.push((a, b));
            last = (a, b);
        }
        let is_full = history.len() as u64 >= ROUNDS_MAX;
        if is_full || is_due(round, deadline) {
            break;
        }
    }
}

fn decreases(history: &History) -> u64 {
    let pairs = history.iter().zip(history.iter().skip(1));
    pairs
        .map(|(old, new)| u64::from(new.0 < old.0) + u64::from(new.1 < old.1))
        .sum()
}

/// What was read in a round, by its number from 1.
fn read_in(history: &History, round: u64) -> Option<u64> {
    let index = usize::try_from(round.checked_sub(1)?).ok()?;
    history.get(index).map(|&(_, seen)| seen)
}

/// Store buffering: CPU a wrote i and then read less than j, and CPU b wrote j and then read less
/// than i.
fn both_missed(a: &History, b: &History) -> u64 {
    let missed = |&&(i, seen): &&(u64, u64)| read_in(b, seen + 1).is_some_and(|back| back < i);
    a.iter().filter(missed).map(|_| 1).sum()
}

/// Load buffering: CPU a read j and then wrote i, and CPU b read i and then wrote j.
fn both_saw(a: &History, b: &History) -> u64 {
    let saw = |&&(i, seen): &&(u64, u64)| read_in(b, seen).is_some_and(|back| back >= i);
    a.iter().filter(saw).map(|_| 1).sum()
}

/// Independent reads: one reader saw x = i and then y less than j, the other y = j and then x less
/// than i. The histories are of (x, y) and of (y, x), and do not decrease.
fn disagree(of_xy: &History, of_yx: &History) -> u64 {
    let mut found = 0;
    let mut next = 0;
    for &(x, y) in of_xy {
        // The last of the other's reads that had not seen this x saw most of y.
        while of_yx.get(next).is_some_and(|&(_, other_x)| other_x < x) {
            next += 1;
        }
        let last = next.checked_sub(1).and_then(|last| of_yx.get(last));
        found += u64::from(last.is_some_and(|&(other_y, _)| other_y > y));
    }
    found
}

/// Returns how many different values of other CPUs were read: how often CPUs met.
pub fn met(histories: &[History]) -> u64 {
    let changes = |history: &History| -> u64 {
        let pairs = history.iter().zip(history.iter().skip(1));
        pairs.map(|(old, new)| u64::from(old.1 != new.1)).sum()
    };
    histories.iter().map(changes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(seen: &[u64]) -> History {
        (1..).zip(seen.iter().copied()).collect()
    }

    #[test]
    fn two_cpus_that_both_missed_the_others_write_are_found() {
        let test =
            |a: &[u64], b: &[u64]| Litmus::StoreBuffering.violations(&[written(a), written(b)]);
        // a wrote 1 and 2 before b wrote 1.
        assert_eq!(test(&[0, 0], &[2, 2]), 0);
        assert_eq!(test(&[0, 1], &[1, 2]), 0);
        assert_eq!(test(&[0, 0], &[0, 2]), 2);
        // a wrote 2 and did not see 1, b wrote 1 and did not see 2.
        assert_eq!(test(&[0, 0], &[1, 2]), 1);
    }

    #[test]
    fn two_cpus_that_both_saw_the_others_later_write_are_found() {
        let test =
            |a: &[u64], b: &[u64]| Litmus::LoadBuffering.violations(&[written(a), written(b)]);
        assert_eq!(test(&[0, 1], &[1, 2]), 0);
        assert_eq!(test(&[1, 1], &[0, 2]), 0);
        assert_eq!(test(&[1, 1], &[1, 1]), 1);
    }

    #[test]
    fn a_flag_ahead_of_its_data_and_an_older_value_are_found() {
        let test = |reads: &[(u64, u64)]| {
            let reader = reads.to_vec();
            assert_eq!(
                Litmus::Causality.violations(&[History::new(), History::new(), reader.clone()]),
                Litmus::MessagePassing.violations(&[History::new(), reader.clone()])
            );
            Litmus::MessagePassing.violations(&[History::new(), reader])
        };
        assert_eq!(test(&[(1, 1), (1, 2), (2, 3)]), 0);
        assert_eq!(test(&[(1, 1), (2, 1)]), 1);
        assert_eq!(test(&[(1, 3), (1, 2)]), 1);
    }

    #[test]
    fn readers_that_disagree_on_the_order_are_found() {
        let test = |xy: &[(u64, u64)], yx: &[(u64, u64)]| {
            let none = History::new();
            Litmus::IndependentReads.violations(&[none.clone(), none, xy.to_vec(), yx.to_vec()])
        };
        assert_eq!(test(&[(1, 0), (1, 1)], &[(0, 1), (1, 1)]), 0);
        assert_eq!(test(&[(1, 0), (1, 1)], &[(1, 0), (1, 1)]), 1);
        assert_eq!(test(&[(1, 5), (2, 6)], &[(5, 1), (6, 1), (7, 2)]), 0);
        assert_eq!(test(&[(1, 5), (2, 6)], &[(5, 0), (7, 1), (8, 2)]), 1);
    }

    #[test]
    fn meetings_are_changes_of_what_was_read() {
        assert_eq!(met(&[written(&[0, 0, 1, 1, 2]), written(&[3])]), 2);
    }
}
