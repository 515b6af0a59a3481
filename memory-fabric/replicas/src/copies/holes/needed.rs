//! Where pages may be that other copies lack, and which of them are lost.

use super::{LOST, WORDS};
use crate::copies::{Copies, Copy, CopyState, Repair};
use crate::placement::Place;
use fabric_homes::BLOCK_PAGES;
use std::iter::zip;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Whether a place that may be asked has pages of its block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Has {
    /// It has all of them.
    All,
    /// It may have missed write-backs, which only the check of a page shows.
    Perhaps,
    /// It lacks one.
    NotAll,
}

impl Copies {
    /// Returns the place of a copy, if its donor may be asked for pages of the block. Without holes in
    /// the block there is no reason to ask one that has them [perhaps](Has::Perhaps).
    pub(crate) fn source_at(
        &self,
        block: u32,
        at: usize,
        first: u32,
        pages: u32,
    ) -> Option<(Place, Has)> {
        if let Some(place) = self.readable_at(block, at) {
            return Some(match self.lacks(place, first, pages) {
                false => (place, Has::All),
                true => (place, Has::NotAll),
            });
        }
        let Copy { place, state } = self.copy(block, at);
        let may_have = !matches!(state, CopyState::Valid | CopyState::Empty)
            && !self.is_out(place.donor)
            && !self.lacks(place, first, pages);
        may_have.then_some((place, Has::Perhaps))
    }

    /// Returns whether a copy of a block that may be read lacks one of these pages.
    pub(crate) fn has_gap(&self, block: u32, first: u32, pages: u32) -> bool {
        let mut readable = (0..self.width).filter_map(|at| self.readable_at(block, at));
        self.has_holes() && readable.any(|place| self.lacks(place, first, pages))
    }

    /// Returns whether a copy may have pages that are no holes of it, now or when its donor returns.
    /// `gone` has a bit for each donor that does not.
    fn may_keep(gone: u64, copy: Copy) -> bool {
        copy.state != CopyState::Empty && gone >> copy.place.donor & 1 == 0
    }

    fn has_hole_in(&self, block: u32) -> bool {
        let lacks = |copy: Copy| self.lacks(copy.place, 0, BLOCK_PAGES);
        self.has_holes() && self.all(block).any(lacks)
    }

    /// Returns the pages that so few of these copies have that they cannot be read, a bit each.
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

    /// Returns whether a donor may have a page of a block that cannot be read without it: so few others
    /// are sure to have it. A copy that is not valid is not, for it may have missed a write-back.
    pub(in crate::copies) fn is_needed_for_page(&self, block: u32, donor: u8, gone: u64) -> bool {
        let is_here = |copy: &Copy| copy.place.donor == donor;
        let kept = || {
            self.all(block)
                .filter(move |copy| Self::may_keep(gone, *copy))
        };
        if !self.has_hole_in(block) {
            return false;
        }
        let Some(here) = kept().find(is_here) else {
            return false;
        };
        let others = self.all(block).filter(|copy| !is_here(copy));
        let without = self.missing(others.filter(|copy| self.is_valid(*copy)));
        // Also with it, and with what returns, they may be too few.
        let with = zip(self.missing(kept()), self.holes_at(here.place));
        zip(without, with).any(|(without, (with, here))| without & !with & !here != 0)
    }

    /// Returns whether a page of a block has a hole, and no other donor may have it, if what this one
    /// sends of it is wrong.
    pub(crate) fn has_no_other(&self, donor: u8, block: u32, page: u32) -> bool {
        let mut sources = (0..self.width).filter_map(|at| self.source_at(block, at, page, 1));
        let may_have = |(place, has): (Place, Has)| place.donor != donor && has != Has::NotAll;
        self.has_gap(block, page, 1) && !sources.any(may_have)
    }

    /// Returns whether a move would give up the last copies that may have a page: the new place lacks
    /// what the old one has.
    pub(crate) fn would_lose(&self, moved: &Repair) -> bool {
        let old = self.copy(moved.block, moved.at).place;
        let holes = zip(self.holes_at(moved.to), self.holes_at(old));
        self.has_holes() && { holes }.any(|(new, old)| new & !old != 0)
    }

    /// Returns the pages of a block that no donor may have any more, or too few, a bit each.
    fn lost_in(&self, block: u32, gone: u64) -> [u64; WORDS] {
        let kept = || {
            self.all(block)
                .filter(move |copy| Self::may_keep(gone, *copy))
        };
        // Without enough copies the guest waits for the block as a whole, or it is lost.
        match self.has_hole_in(block) && kept().count() >= self.needed {
            true => self.missing(kept()),
            false => [0; WORDS],
        }
    }

    /// Returns the number of pages that no donor may have any more, or too few: of copies, or pieces,
    /// that were made without them the other ones are gone.
    #[must_use]
    pub fn lost_pages(&self) -> u64 {
        let gone = self.lock().gone();
        let lost = (0..self.blocks()).flat_map(|block| self.lost_in(block, gone));
        lost.map(|bits| u64::from(bits.count_ones())).sum()
    }

    /// Notes which pages of these blocks are lost. Returns how many were not when that was noted last,
    /// or have been written since.
    pub(crate) fn note_lost(&self, blocks: Range<u32>) -> u64 {
        if !self.has_holes() {
            return 0;
        }
        // Held until the end, so that what one thread has found is not replaced by what another found
        // before.
        let ledger = self.lock();
        let gone = ledger.gone();
        let mut count = 0;
        for block in blocks {
            let lost = self.lost_in(block, gone);
            let is_known = self.holes.find(LOST, block).is_some();
            if !is_known && lost == [0; WORDS] {
                continue;
            }
            for (known, lost) in zip(self.holes.make(LOST, block), lost) {
                // Relaxed: the bits order nothing else.
                let before = known.swap(lost, Ordering::Relaxed);
                count += u64::from((lost & !before).count_ones());
            }
        }
        count
    }
}
