//! A page that two CPUs hand to and fro, with contents that are compared each time.

use super::cells::{Cells, PAGE_CELLS, at};
use super::team::Deadline;
use crate::pattern::mix;

/// A run ends after so many rounds even if there is time left.
const ROUNDS_MAX: u64 = 50_000;
/// One cell in so many is written: one for each line of the cache.
const STRIDE: usize = 8;

/// What one CPU saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Ticks of each round trip, which is two transfers; of the first CPU only.
    pub round_ticks: Vec<u64>,
    /// Cells compared.
    pub verified: u64,
    /// Cells that differed from what the other CPU wrote.
    pub corrupt: u64,
}

/// Hands `page` to and fro as CPU 0 or 1 of two until the deadline. The page's first cell counts
/// the transfers.
pub fn ping_pong(cells: &impl Cells, page: usize, role: usize, deadline: &Deadline) -> Seen {
    let mut seen = Seen::default();
    for round in 0..ROUNDS_MAX {
        let (there, back) = (2 * round + 1, 2 * round + 2);
        if role == 0 {
            let begin = Deadline::after(0);
            send(cells, page, there);
            if !arrives(cells, page, back, deadline) {
                break;
            }
            seen.round_ticks.push(begin.elapsed());
            compare(cells, page, back, &mut seen);
        } else {
            if !arrives(cells, page, there, deadline) {
                break;
            }
            compare(cells, page, there, &mut seen);
            send(cells, page, back);
        }
    }
    seen
}

fn content(turn: u64, cell: usize) -> u64 {
    mix(turn << 16 | cell as u64)
}

fn send(cells: &impl Cells, page: usize, turn: u64) {
    for cell in (STRIDE..PAGE_CELLS).step_by(STRIDE) {
        cells.store(at(page, cell), content(turn, cell));
    }
    cells.store(at(page, 0), turn);
}

fn arrives(cells: &impl Cells, page: usize, turn: u64, deadline: &Deadline) -> bool {
    deadline.wait(|| cells.load(at(page, 0)) >= turn)
}

fn compare(cells: &impl Cells, page: usize, turn: u64, seen: &mut Seen) {
    for cell in (STRIDE..PAGE_CELLS).step_by(STRIDE) {
        seen.verified += 1;
        seen.corrupt += u64::from(cells.load(at(page, cell)) != content(turn, cell));
    }
}
