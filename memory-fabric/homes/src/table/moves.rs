//! Blocks of a guest's initial memory that get another home while the guest runs.

use super::{BLOCK_PAGES, Home, HomeTable};
use crate::node::NodeId;
use fabric_pages::page::PageIndex;
use std::sync::atomic::Ordering;

impl HomeTable {
    /// Records that the memory of a node is lost, if it is the home of a block: another thread may
    /// have moved the block meanwhile. The block keeps its home, from which nothing is fetched and to
    /// which nothing is written from now on.
    pub fn set_lost(&self, block: u32, node: NodeId) {
        let is_there = |word| Home::from_word(word).is_some_and(|home| home.node == node);
        // Release: pairs with the Acquire of readers. It fails when the home is another one by now.
        let _ =
            self.words[block as usize].fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                is_there(word).then_some(word | super::LOST)
            });
    }

    /// Returns whether the memory of a page's home is lost.
    #[must_use]
    pub fn is_lost(&self, page: PageIndex) -> bool {
        let word = self.words.get(Self::block_of(page) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) & super::LOST != 0)
    }

    /// Returns the blocks of the initial memory with their home on a node, and that home.
    pub fn ram_blocks_at(&self, node: NodeId) -> impl Iterator<Item = (u32, Home)> {
        let end = self.ram_span_pages().div_ceil(u64::from(BLOCK_PAGES));
        let end = u32::try_from(end).expect("below the limit of guest memory");
        let home = |block| Some((block, self.home(block)?));
        let homes = (0..end).filter_map(home);
        homes.filter(move |(_, home)| home.node == node)
    }

    /// Gives a block another home, in a new epoch. The caller has copied all pages there, and no
    /// page of the block is being written to the old home.
    ///
    /// A thread that has acquired a page's state, and then reads the home, finds the one to which
    /// the page was last written back, or an earlier one that still has the same bytes.
    ///
    /// # Panics
    ///
    /// When the block has another home than `from`: only one thread moves blocks.
    pub fn move_home(&self, block: u32, from: Home, to: Home) {
        // First: a reader of the home then reads this epoch, or a later one.
        self.local.advance();
        let word = &self.words[block as usize];
        // Release: pairs with the Acquire of readers, which may then use the home.
        let before = word.swap(super::ASSIGNED | to.to_bits(), Ordering::AcqRel);
        assert_eq!(Home::from_word(before), Some(from), "block {block}");
        self.count(block, from.node, false);
        self.count(block, to.node, true);
    }
}
