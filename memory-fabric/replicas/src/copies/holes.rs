//! Pages that a copy does not have although it is valid: too little of them was right when the copy was
//! made. They are read elsewhere where that is possible, and their donors are not blamed for them. A
//! write-back fills the hole.
//!
//! Only pages that are checked have holes. The thread that repairs makes and fills them; others look
//! without a lock, and not at all while there is none.

use super::Copies;
use crate::placement::Place;
use fabric_homes::BLOCK_PAGES;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Limit of holes. A page that is lost twice over is rare: with more, copies are complete as far as
/// anyone knows, and a donor may be blamed for what it was not given.
const HOLES_MAX: usize = 64;

/// The holes of all copies.
#[derive(Debug)]
pub(super) struct Holes {
    /// Place and page of each, or 0.
    all: [AtomicU64; HOLES_MAX],
    count: AtomicU32,
}

impl Default for Holes {
    fn default() -> Self {
        Self {
            all: [const { AtomicU64::new(0) }; HOLES_MAX],
            count: AtomicU32::new(0),
        }
    }
}

/// Returns the number of a page of a place, which is not 0.
fn number_of(place: Place, page: u32) -> u64 {
    let slot = u64::from(place.donor) << 32 | u64::from(place.slot);
    slot * u64::from(BLOCK_PAGES) + u64::from(page) + 1
}

impl Copies {
    /// Notes that a place does not have a page of its block.
    pub(crate) fn add_hole(&self, place: Place, page: u32) {
        let number = number_of(place, page);
        let mut free = None;
        for hole in &self.holes.all {
            match hole.load(Ordering::Relaxed) {
                0 => free = free.or(Some(hole)),
                known if known == number => return,
                _ => {}
            }
        }
        if let Some(free) = free {
            free.store(number, Ordering::Relaxed);
            // Relaxed: readers acquire the copy's word, which becomes valid after this.
            self.holes.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that pages of a place are written, or that another block has it.
    pub(crate) fn fill_holes(&self, place: Place, first: u32, pages: u32) {
        if !self.has_holes() {
            return;
        }
        let numbers = number_of(place, first)..number_of(place, first) + u64::from(pages);
        for hole in &self.holes.all {
            if numbers.contains(&hole.load(Ordering::Relaxed)) {
                hole.store(0, Ordering::Relaxed);
                self.holes.count.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Returns whether any copy has a hole.
    pub(crate) fn has_holes(&self) -> bool {
        self.holes.count.load(Ordering::Relaxed) > 0
    }

    /// Returns whether a place does not have one of these pages.
    pub(crate) fn lacks(&self, place: Place, first: u32, pages: u32) -> bool {
        let numbers = number_of(place, first)..number_of(place, first) + u64::from(pages);
        let mut all = self.holes.all.iter();
        self.has_holes() && all.any(|hole| numbers.contains(&hole.load(Ordering::Relaxed)))
    }

    /// Returns whether a donor lacks a page of a block.
    pub(crate) fn lacks_at(&self, donor: u8, block: u32, page: u32) -> bool {
        let mut here = self.all(block).filter(|copy| copy.place.donor == donor);
        self.has_holes() && here.any(|copy| self.lacks(copy.place, page, 1))
    }

    /// Returns whether a page of a block has a hole, and only one donor is left to read it from, or
    /// none: what that donor sends is all that there is.
    pub(crate) fn has_no_other(&self, donor: u8, block: u32, page: u32) -> bool {
        if !self.has_holes() {
            return false;
        }
        let readable = || (0..self.width).filter_map(|at| self.readable_at(block, at));
        let lacks = |place: &Place| self.lacks(*place, page, 1);
        let others = readable().filter(|place| place.donor != donor && !lacks(place));
        readable().any(|place| lacks(&place)) && others.count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_is_of_one_page_of_one_place_until_it_is_filled() {
        let place = |donor, slot| Place { donor, slot };
        let places = [[place(0, 0), place(1, 0)], [place(0, 1), place(1, 1)]];
        let copies = Copies::new(&places, &[2, 2], &[2, 2], &[0, 1]);
        assert!(!copies.has_holes());
        copies.add_hole(place(0, 1), 0);
        copies.add_hole(place(0, 1), 0);
        copies.add_hole(place(1, 0), 511);
        assert!(copies.lacks(place(0, 1), 0, 1) && copies.lacks(place(1, 0), 500, 12));
        assert!(!copies.lacks(place(0, 1), 1, 511) && !copies.lacks(place(0, 0), 0, 512));
        assert!(copies.lacks_at(0, 1, 0) && !copies.lacks_at(1, 1, 0));
        assert!(copies.has_no_other(1, 1, 0) && copies.has_no_other(0, 0, 511));
        assert!(!copies.has_no_other(0, 1, 0), "the other copy has it");
        assert!(!copies.has_no_other(0, 0, 3), "there is no hole");
        copies.fill_holes(place(0, 1), 0, 1);
        assert!(!copies.lacks(place(0, 1), 0, 1) && copies.has_holes());
        copies.fill_holes(place(1, 0), 0, 512);
        assert!(!copies.has_holes());
        (0..600).for_each(|page| copies.add_hole(place(0, 0), page % 512));
        copies.fill_holes(place(0, 0), 0, 512);
        assert!(!copies.has_holes());
    }
}
