//! What is lost, or would be, with a copy that has pages which others lack.

use super::WORDS;
use crate::copies::{Copies, Copy, CopyState, Repair};
use fabric_homes::BLOCK_PAGES;
use std::iter::zip;

impl Copies {
    /// Returns whether a copy has the pages that it was given, or will have them: it is valid, or is to
    /// be filled and keeps what is right.
    fn keeps_pages(&self, copy: Copy) -> bool {
        copy.state != CopyState::Empty && !self.is_out(copy.place.donor)
    }

    /// Returns the pages of which so few of these copies are left that they cannot be read, a bit each.
    fn missing(&self, copies: impl Iterator<Item = Copy>) -> [u64; WORDS] {
        let all: Vec<_> = copies.map(|copy| self.holes_at(copy.place)).collect();
        std::array::from_fn(|word| {
            let has_enough = |bit: &u32| {
                let lacking = all.iter().filter(|holes| holes[word] >> bit & 1 == 1);
                all.len() - lacking.count() >= self.needed
            };
            let missing = (0..u64::BITS).filter(|bit| !has_enough(bit));
            missing.fold(0, |bits, bit| bits | 1 << bit)
        })
    }

    /// Returns whether a page of a block is in a copy at a donor, and so few others have it that it
    /// cannot be read without this donor.
    pub(in crate::copies) fn is_needed_for_page(&self, block: u32, donor: u8) -> bool {
        let is_here = |copy: &Copy| copy.place.donor == donor;
        let kept = || self.all(block).filter(|copy| self.keeps_pages(*copy));
        let has_holes = |copy: Copy| self.lacks(copy.place, 0, BLOCK_PAGES);
        if !self.has_holes() || !kept().any(has_holes) {
            return false;
        }
        let without = self.missing(kept().filter(|copy| !is_here(copy)));
        zip(without, self.missing(kept())).any(|(without, with)| without & !with != 0)
    }

    /// Returns whether a page of a block has a hole, and too few donors are left that may have it, if
    /// what this donor sends of it is wrong.
    pub(crate) fn has_no_other(&self, donor: u8, block: u32, page: u32) -> bool {
        if !self.has_holes() {
            return false;
        }
        let mut readable = (0..self.width).filter_map(|at| self.readable_at(block, at));
        if !readable.any(|place| self.lacks(place, page, 1)) {
            return false;
        }
        let kept = self.all(block).filter(|copy| self.keeps_pages(*copy));
        let others = kept.filter(|copy| copy.place.donor != donor);
        others
            .filter(|copy| !self.lacks(copy.place, page, 1))
            .count()
            == 0
    }

    /// Returns whether a move would give up the last copies that may have a page: the new place lacks
    /// what the old one has.
    pub(crate) fn would_lose(&self, moved: &Repair) -> bool {
        let old = self.copy(moved.block, moved.at).place;
        let holes = zip(self.holes_at(moved.to), self.holes_at(old));
        self.has_holes() && { holes }.any(|(new, old)| new & !old != 0)
    }

    /// Returns the number of pages that no donor has any more, or too few: of copies, or pieces, that
    /// were made without them the other ones are gone.
    #[must_use]
    pub fn lost_pages(&self) -> u64 {
        if !self.has_holes() {
            return 0;
        }
        let lost = (0..self.blocks()).map(|block| {
            let kept = || self.all(block).filter(|copy| self.keeps_pages(*copy));
            let has_holes = |copy: Copy| self.lacks(copy.place, 0, BLOCK_PAGES);
            // Without enough copies the block as a whole is waited for, or lost.
            match kept().count() >= self.needed && kept().any(has_holes) {
                true => self.missing(kept()).map(u64::count_ones).iter().sum(),
                false => 0,
            }
        });
        lost.map(u64::from).sum()
    }
}
