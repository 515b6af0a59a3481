//! The pages that donors have: those that were written back, and not dropped since. Nothing reads any
//! other page, so a copy without them is complete.
//!
//! Only the thread that repairs writes and drops, so nothing changes between a look and what follows
//! from it. A page that is written back later goes to the new copy as well.

use crate::copies::{BlockWords, PageSet, bits_of};

/// A bit for each page: 64 bytes for 2 MiB, which take memory only where pages were written back.
#[derive(Debug, Default)]
pub(super) struct Stored(Vec<BlockWords>);

impl Stored {
    pub fn new(blocks: u32) -> Self {
        // The allocator has zeroed pages, which are not touched here.
        Self(vec![BlockWords::default(); blocks as usize])
    }

    /// The donors get a page of a block.
    pub fn insert(&mut self, block: u32, page: u32) {
        for (word, bits) in bits_of(page, 1) {
            self.0[block as usize][word] |= bits;
        }
    }

    /// The donors forget pages of a block, or may.
    pub fn remove(&mut self, block: u32, first: u32, pages: u32) {
        for (word, bits) in bits_of(first, pages) {
            self.0[block as usize][word] &= !bits;
        }
    }

    /// Returns those of a block.
    pub fn of(&self, block: u32) -> PageSet {
        PageSet::of(self.0[block as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_homes::BLOCK_PAGES;

    fn pages(set: PageSet) -> Vec<u32> {
        (0..BLOCK_PAGES)
            .filter(|&page| set.contains(page))
            .collect()
    }

    #[test]
    fn pages_are_stored_from_the_first_write_back_until_they_are_dropped() {
        let mut stored = Stored::new(3);
        for page in [0, 63, 64, 300, BLOCK_PAGES - 1] {
            stored.insert(1, page);
        }
        stored.insert(2, 5);
        assert_eq!(pages(stored.of(0)), [0; 0]);
        assert_eq!(pages(stored.of(1)), [0, 63, 64, 300, BLOCK_PAGES - 1]);
        stored.remove(1, 1, 299);
        assert_eq!(pages(stored.of(1)), [0, 300, BLOCK_PAGES - 1]);
        stored.remove(1, 0, BLOCK_PAGES);
        assert_eq!(pages(stored.of(1)), [0; 0]);
        assert_eq!(pages(stored.of(2)), [5]);
    }
}
