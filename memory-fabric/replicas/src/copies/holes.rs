//! Pages that a copy does not have: too little of them was right when the copy was made, or it is being
//! made. They are read elsewhere where that is possible, and their donors are not blamed for them. A
//! write-back fills the hole, and so does a drop: nothing reads the page before it is written again.
//!
//! A copy at a donor in use that is not valid may have pages that valid ones lack: only the check of a
//! page shows whether the copy missed its last write-back. It is [asked](Copies::source_at) for such
//! pages, but does not count as having them when another donor is to go out: a donor that may be the
//! last one with a page is [needed](Copies::is_needed_for_page), as if it had the only copy of the
//! block. A page that no donor may have any more is [lost](Copies::lost_pages).
//!
//! Only pages that are checked have holes. The thread that repairs makes and fills them; others look
//! without a lock, and not at all while there is none. A place that was ever filled has a bit for each
//! page, which takes 64 bytes for 2 MiB, and as much again to find them. They are kept for the next block
//! there, so they are at most 0.01 % of what donors lend.

mod needed;

use super::{Copies, CopyState, DONORS_MAX, PageSet};
use crate::copies::word::SLOTS_MAX;
use crate::placement::Place;
use fabric_homes::BLOCK_PAGES;
pub(crate) use needed::Has;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const WORDS: usize = (BLOCK_PAGES / u64::BITS) as usize;

/// The pages that a place does not have, a bit each.
type Pages = [AtomicU64; WORDS];

/// Slots for which memory is taken at once: 32 KiB.
const CHUNK_SLOTS: usize = 1 << 11;
const CHUNKS: usize = SLOTS_MAX as usize / CHUNK_SLOTS;

type Chunk = Box<[OnceLock<Box<Pages>>]>;
type Chunks = Box<[OnceLock<Chunk>]>;

/// In `Holes`, after the donors: the pages that were reported as lost, by block instead of slot.
const LOST: usize = DONORS_MAX;

/// The holes of all copies.
#[derive(Debug)]
pub(super) struct Holes {
    /// By donor, and the slot's chunk.
    donors: Box<[OnceLock<Chunks>]>,
    count: AtomicU64,
    /// Whether pages are checked.
    is_kept: AtomicBool,
}

fn empty<T>(count: usize) -> Box<[OnceLock<T>]> {
    (0..count).map(|_| OnceLock::new()).collect()
}

impl Default for Holes {
    fn default() -> Self {
        Self {
            donors: empty(DONORS_MAX + 1),
            count: AtomicU64::new(0),
            is_kept: AtomicBool::new(false),
        }
    }
}

/// Returns the word and the bit of a page.
fn bit_of(page: u32) -> (usize, u64) {
    ((page / u64::BITS) as usize, 1 << (page % u64::BITS))
}

/// Returns the words with pages of a range, and the bits of these.
pub(crate) fn bits_of(first: u32, pages: u32) -> impl Iterator<Item = (usize, u64)> {
    let end = first.saturating_add(pages).min(BLOCK_PAGES);
    let below = |page: u32| match page {
        64.. => u64::MAX,
        page => (1 << page) - 1,
    };
    (0..BLOCK_PAGES / 64).filter_map(move |word| {
        let (from, to) = (
            first.saturating_sub(64 * word),
            end.saturating_sub(64 * word),
        );
        let bits = below(to) & !below(from);
        (bits != 0).then_some((word as usize, bits))
    })
}

impl Holes {
    fn find(&self, donor: usize, slot: u32) -> Option<&Pages> {
        let slot = slot as usize;
        let chunks = self.donors[donor].get()?;
        let pages = chunks[slot / CHUNK_SLOTS].get()?[slot % CHUNK_SLOTS].get()?;
        Some(pages)
    }

    fn make(&self, donor: usize, slot: u32) -> &Pages {
        let slot = slot as usize;
        let chunks = self.donors[donor].get_or_init(|| empty(CHUNKS));
        let chunk = chunks[slot / CHUNK_SLOTS].get_or_init(|| empty(CHUNK_SLOTS));
        chunk[slot % CHUNK_SLOTS].get_or_init(Default::default)
    }

    fn of(&self, place: Place) -> Option<&Pages> {
        self.find(place.donor.into(), place.slot)
    }

    /// Adds pages of a word to the holes of a place.
    fn add(&self, place: Place, word: usize, bits: u64) {
        let pages = self.make(place.donor.into(), place.slot);
        // Relaxed: readers acquire the copy's word, which is set after this.
        let added = bits & !pages[word].fetch_or(bits, Ordering::Relaxed);
        self.count
            .fetch_add(added.count_ones().into(), Ordering::Relaxed);
    }
}

impl Copies {
    /// Has holes kept from now on: pages are checked.
    pub(crate) fn keep_holes(&self) {
        self.holes.is_kept.store(true, Ordering::Relaxed);
    }

    /// Notes that a place does not have a page of its block.
    pub(crate) fn add_hole(&self, place: Place, page: u32) {
        let (word, bit) = bit_of(page);
        self.holes.add(place, word, bit);
    }

    /// Notes that a place is to get a block, of which it has no page yet.
    pub(super) fn begin_place(&self, place: Place) {
        if self.holes.is_kept.load(Ordering::Relaxed) {
            (0..WORDS).for_each(|word| self.holes.add(place, word, u64::MAX));
        }
    }

    /// Notes that a place has pages of its block, or needs none of them: no block has it.
    pub(crate) fn fill_holes(&self, place: Place, first: u32, pages: u32) {
        self.fill(place, bits_of(first, pages));
    }

    /// Notes that no donor has any other page of the block in a place: it needs none of them.
    pub(crate) fn fill_holes_except(&self, place: Place, pages: PageSet) {
        self.fill(place, pages.others());
    }

    fn fill(&self, place: Place, pages: impl Iterator<Item = (usize, u64)>) {
        let holes = self.has_holes().then(|| self.holes.of(place)).flatten();
        let Some(holes) = holes else {
            return;
        };
        for (word, bits) in pages {
            let filled = holes[word].fetch_and(!bits, Ordering::Relaxed) & bits;
            let filled = u64::from(filled.count_ones());
            self.holes.count.fetch_sub(filled, Ordering::Relaxed);
        }
    }

    /// Notes that pages of a block are written or dropped: they are not lost any more.
    pub(crate) fn forget_lost(&self, block: u32, first: u32, pages: u32) {
        if let Some(lost) = self.holes.find(LOST, block) {
            for (word, bits) in bits_of(first, pages) {
                lost[word].fetch_and(!bits, Ordering::Relaxed);
            }
        }
    }

    /// Notes that pages of a block are dropped: no copy lacks them.
    pub(crate) fn forget_pages(&self, block: u32, first: u32, pages: u32) {
        self.forget_lost(block, first, pages);
        for copy in self.all(block) {
            self.fill_holes(copy.place, first, pages);
        }
    }

    /// Returns whether any copy has a hole.
    pub(crate) fn has_holes(&self) -> bool {
        self.holes.count.load(Ordering::Relaxed) > 0
    }

    /// Returns the pages that a place does not have, a bit each.
    pub(super) fn holes_at(&self, place: Place) -> [u64; WORDS] {
        match self.has_holes().then(|| self.holes.of(place)).flatten() {
            Some(pages) => std::array::from_fn(|word| pages[word].load(Ordering::Relaxed)),
            None => [0; WORDS],
        }
    }

    /// Returns whether a place does not have one of these pages.
    pub(crate) fn lacks(&self, place: Place, first: u32, pages: u32) -> bool {
        let holes = self.has_holes().then(|| self.holes.of(place)).flatten();
        holes.is_some_and(|holes| {
            let mut all = bits_of(first, pages);
            all.any(|(word, bits)| holes[word].load(Ordering::Relaxed) & bits != 0)
        })
    }

    /// Returns whether a donor lacks a page of a block.
    pub(crate) fn lacks_at(&self, donor: u8, block: u32, page: u32) -> bool {
        let mut here = self.all(block).filter(|copy| copy.place.donor == donor);
        self.has_holes() && here.any(|copy| self.lacks(copy.place, page, 1))
    }

    /// Returns whether a donor may have missed write-backs of a block: what it has is old, not wrong.
    pub(crate) fn is_unsure_at(&self, donor: u8, block: u32) -> bool {
        let mut here = self.all(block).filter(|copy| copy.place.donor == donor);
        here.any(|copy| copy.state != CopyState::Valid)
    }
}

#[cfg(test)]
mod tests;
