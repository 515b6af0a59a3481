//! Pages that a copy does not have although it is valid: too little of them was right when the copy was
//! made. They are read elsewhere where that is possible, and their donors are not blamed for them. A
//! write-back fills the hole, and so does a drop: nothing reads the page before it is written again.
//!
//! A donor that has such a page is [needed](Copies::is_needed_for_page), as if it had the only copy of the block:
//! it does not go out while it may return. Without it, the page is [lost](Copies::lost_pages).
//!
//! Only pages that are checked have holes. The thread that repairs makes and fills them; others look
//! without a lock, and not at all while there is none. A block with holes has a bit for each page:
//! memory is taken for those blocks only, and never given back.

mod needed;

use super::{Copies, DONORS_MAX};
use crate::copies::word::SLOTS_MAX;
use crate::placement::Place;
use fabric_homes::BLOCK_PAGES;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const WORDS: usize = (BLOCK_PAGES / u64::BITS) as usize;

/// The pages that a place does not have, a bit each.
type Pages = [AtomicU64; WORDS];

/// Slots for which memory is taken at once: 32 KiB.
const CHUNK_SLOTS: usize = 1 << 11;
const CHUNKS: usize = SLOTS_MAX as usize / CHUNK_SLOTS;

type Chunk = Box<[OnceLock<Box<Pages>>]>;
type Chunks = Box<[OnceLock<Chunk>]>;

/// The holes of all copies.
#[derive(Debug)]
pub(super) struct Holes {
    /// By donor, and the slot's chunk.
    donors: Box<[OnceLock<Chunks>]>,
    count: AtomicU64,
}

fn empty<T>(count: usize) -> Box<[OnceLock<T>]> {
    (0..count).map(|_| OnceLock::new()).collect()
}

impl Default for Holes {
    fn default() -> Self {
        Self {
            donors: empty(DONORS_MAX),
            count: AtomicU64::new(0),
        }
    }
}

/// Returns the word and the bit of a page.
fn bit_of(page: u32) -> (usize, u64) {
    ((page / u64::BITS) as usize, 1 << (page % u64::BITS))
}

/// Returns the words with pages of a range, and the bits of these.
fn bits_of(first: u32, pages: u32) -> impl Iterator<Item = (usize, u64)> {
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
    fn of(&self, place: Place) -> Option<&Pages> {
        let slot = place.slot as usize;
        let chunks = self.donors[usize::from(place.donor)].get()?;
        let pages = chunks[slot / CHUNK_SLOTS].get()?[slot % CHUNK_SLOTS].get()?;
        Some(pages)
    }

    fn make(&self, place: Place) -> &Pages {
        let slot = place.slot as usize;
        let chunks = self.donors[usize::from(place.donor)].get_or_init(|| empty(CHUNKS));
        let chunk = chunks[slot / CHUNK_SLOTS].get_or_init(|| empty(CHUNK_SLOTS));
        chunk[slot % CHUNK_SLOTS].get_or_init(Default::default)
    }
}

impl Copies {
    /// Notes that a place does not have a page of its block.
    pub(crate) fn add_hole(&self, place: Place, page: u32) {
        let (word, bit) = bit_of(page);
        // Relaxed: readers acquire the copy's word, which becomes valid after this.
        let before = self.holes.make(place)[word].fetch_or(bit, Ordering::Relaxed);
        if before & bit == 0 {
            self.holes.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that pages of a place are written or dropped, or that another block has it.
    pub(crate) fn fill_holes(&self, place: Place, first: u32, pages: u32) {
        let holes = self.has_holes().then(|| self.holes.of(place)).flatten();
        let Some(holes) = holes else {
            return;
        };
        for (word, bits) in bits_of(first, pages) {
            let filled = holes[word].fetch_and(!bits, Ordering::Relaxed) & bits;
            let filled = u64::from(filled.count_ones());
            self.holes.count.fetch_sub(filled, Ordering::Relaxed);
        }
    }

    /// Returns whether any copy has a hole.
    pub(crate) fn has_holes(&self) -> bool {
        self.holes.count.load(Ordering::Relaxed) > 0
    }

    /// Returns the pages that a place does not have, a bit each.
    fn holes_at(&self, place: Place) -> [u64; WORDS] {
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
}

#[cfg(test)]
mod tests;
