//! The home table: one word for each block of guest-physical memory.
//!
//! The words of blocks that never had a home are never written, and take no memory.

use super::local::LocalNode;
use super::node::{NODE_IDS, NodeId};
use fabric_pages::page::{PAGE_SHIFT, PAGE_SIZE, PageIndex, PageRange};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Pages of a block: 2 MiB, which is also what x86-64 maps as one huge page.
pub const BLOCK_PAGES: u32 = 512;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = BLOCK_PAGES as u64 * PAGE_SIZE as u64;

/// In a word: the block has a home.
const ASSIGNED: u64 = 1 << 63;
/// In a word: the block is about to lose its home. Until then its pages can be fetched from there,
/// and no page is written there any more.
const LEAVING: u64 = 1 << 62;
/// In a word: bits 31 to 61 are for a second home, as bits 0 to 30 are for the first. They are zero:
/// no block has a replica yet.
const REPLICA_SHIFT: u32 = 31;
/// In a word, from bit 0: the slot in the home's loan. 2^23 slots are the blocks of 16 TiB, which
/// is the limit of guest memory.
const SLOT_BITS: u32 = 23;
/// In a word, above the slot: the id of the node.
const NODE_SHIFT: u32 = SLOT_BITS;

const _: () = assert!(NODE_SHIFT + u8::BITS == REPLICA_SHIFT);
const _: () = assert!(1 << (2 * REPLICA_SHIFT) == LEAVING);

/// The node that stores a block's pages when they are not cached, and where.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Home {
    /// The node.
    pub node: NodeId,
    /// The block of the node's loan that stores this block; 0 where the node is the local one,
    /// which stores pages at their own address.
    pub slot: u32,
}

impl Home {
    /// The offset of a page of the block in the node's loan, bytes.
    #[must_use]
    pub fn offset_of(self, page: PageIndex) -> u64 {
        let in_block = u64::from(page.number() % BLOCK_PAGES) << PAGE_SHIFT;
        u64::from(self.slot) * BLOCK_BYTES + in_block
    }

    fn to_bits(self) -> u64 {
        assert!(self.slot < 1 << SLOT_BITS, "a slot beyond 16 TiB");
        u64::from(self.node.0) << NODE_SHIFT | u64::from(self.slot)
    }

    fn from_word(word: u64) -> Option<Self> {
        let node = u8::try_from(word >> NODE_SHIFT & u64::from(u8::MAX));
        let slot = u32::try_from(word & ((1 << SLOT_BITS) - 1));
        match (node, slot) {
            (Ok(node), Ok(slot)) if word & ASSIGNED != 0 => Some(Self {
                node: NodeId(node),
                slot,
            }),
            _ => None,
        }
    }
}

/// Consecutive guest-physical pages with one home.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Extent {
    /// The pages.
    pub pages: PageRange,
    /// The node whose memory stores them.
    pub home: NodeId,
}

/// What an eviction does with the bytes of a page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Eviction {
    /// It writes them back to this home, which is another node.
    WriteBack(Home),
    /// It leaves them: this node is the home.
    Keep,
    /// It discards them: the page's block has no home, or is about to lose it.
    Discard,
}

/// The homes of all blocks of a VM, as one of its nodes sees them.
#[derive(Debug)]
pub struct HomeTable {
    /// Its epoch grows with each change of a home.
    local: LocalNode,
    words: Box<[AtomicU64]>,
    /// The memory of the guest's start, by rising address.
    ram: Box<[PageRange]>,
    /// The addresses of memory that can be added: whole blocks above `ram`.
    added: Option<PageRange>,
    /// For each node, how many blocks of `added` are at home there.
    added_blocks: Box<[AtomicU32]>,
    /// For each node, how many pages of `ram` are at home there.
    ram_pages: Box<[AtomicU64]>,
}

impl HomeTable {
    /// A table in which no block has a home.
    ///
    /// # Panics
    ///
    /// When `added` is not made of whole blocks, or the process is out of memory.
    #[must_use]
    pub fn new(local: impl Into<LocalNode>, ram: &[PageRange], added: Option<PageRange>) -> Self {
        if let Some(pages) = added {
            assert!(pages.first.number().is_multiple_of(BLOCK_PAGES));
            assert!(pages.count.is_multiple_of(BLOCK_PAGES));
        }
        let span = ram.iter().copied().chain(added);
        let span_pages = span.map(PageRange::end).max().unwrap_or(0);
        let blocks = span_pages.div_ceil(u64::from(BLOCK_PAGES));
        let blocks = usize::try_from(blocks).expect("64-bit host");
        Self {
            local: local.into(),
            words: <[AtomicU64]>::new_box_zeroed_with_elems(blocks).expect("memory for a table"),
            ram: ram.into(),
            added,
            added_blocks: (0..NODE_IDS).map(|_| AtomicU32::new(0)).collect(),
            ram_pages: (0..NODE_IDS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The id of the node that has this table.
    #[must_use]
    pub fn local(&self) -> NodeId {
        self.local.id()
    }

    /// The node that has this table, with the table's epoch.
    #[must_use]
    pub fn local_node(&self) -> &LocalNode {
        &self.local
    }

    /// The memory of the guest's start, by rising address.
    #[must_use]
    pub fn ram(&self) -> &[PageRange] {
        &self.ram
    }

    /// Pages of the guest's start.
    #[must_use]
    pub fn ram_pages(&self) -> u64 {
        self.ram.iter().map(|range| u64::from(range.count)).sum()
    }

    /// The pages that can be added while the guest runs.
    #[must_use]
    pub fn added(&self) -> Option<PageRange> {
        self.added
    }

    /// The number after the last page's of the guest's start.
    #[must_use]
    pub fn ram_span_pages(&self) -> u64 {
        self.ram.last().map_or(0, |range| range.end())
    }

    /// The number after the last page's, with all that can be added.
    #[must_use]
    pub fn span_pages(&self) -> u64 {
        self.added
            .map_or_else(|| self.ram_span_pages(), PageRange::end)
    }

    /// The block of a page.
    #[must_use]
    pub const fn block_of(page: PageIndex) -> u32 {
        page.number() / BLOCK_PAGES
    }

    /// The home of a page, also while its block is about to lose it.
    #[must_use]
    pub fn home_of(&self, page: PageIndex) -> Option<Home> {
        self.home(Self::block_of(page))
    }

    /// The home of a page if that is another node.
    #[must_use]
    pub fn remote_home_of(&self, page: PageIndex) -> Option<Home> {
        self.home_of(page).filter(|home| home.node != self.local())
    }

    /// The home of a block, also while it is about to lose it.
    #[must_use]
    pub fn home(&self, block: u32) -> Option<Home> {
        let word = self.words.get(block as usize)?;
        // Acquire: pairs with the Release of `assign`.
        Home::from_word(word.load(Ordering::Acquire))
    }

    /// What an eviction does with a page.
    #[must_use]
    pub fn eviction_of(&self, page: PageIndex) -> Eviction {
        let word = self.words.get(Self::block_of(page) as usize);
        let word = word.map_or(0, |word| word.load(Ordering::Acquire));
        match Home::from_word(word) {
            Some(home) if word & LEAVING == 0 => {
                if home.node == self.local() {
                    Eviction::Keep
                } else {
                    Eviction::WriteBack(home)
                }
            }
            _ => Eviction::Discard,
        }
    }

    /// How many pages from `page` on, up to `most`, are stored one behind the other by `home`,
    /// which is that of `page`.
    #[must_use]
    pub fn contiguous(&self, page: PageIndex, home: Home, most: u32) -> u32 {
        let mut block = Self::block_of(page);
        let mut slot = home.slot;
        let mut count = BLOCK_PAGES - page.number() % BLOCK_PAGES;
        while count < most {
            (block, slot) = (block + 1, slot + 1);
            let node = home.node;
            if self.home(block) != Some(Home { node, slot }) {
                break;
            }
            count += BLOCK_PAGES;
        }
        count.min(most)
    }

    /// Whether a page is the guest's, now or once it is added.
    #[must_use]
    pub fn is_guest_memory(&self, page: PageIndex) -> bool {
        self.is_added(page) || self.ram.iter().any(|range| range.contains(page))
    }

    /// Whether a page is of the memory that can be added.
    #[must_use]
    pub fn is_added(&self, page: PageIndex) -> bool {
        self.added.is_some_and(|pages| pages.contains(page))
    }

    /// Whether the pager has a page, wherever its home is: all pages but those of the guest's start
    /// that are at home here.
    #[must_use]
    pub fn is_paged(&self, page: PageIndex) -> bool {
        self.is_added(page) || self.remote_home_of(page).is_some()
    }

    /// The guest's pages of a block: all of it, but for the ends of the guest's memory.
    #[must_use]
    pub fn pages_of(&self, block: u32) -> PageRange {
        let first = u64::from(block) * u64::from(BLOCK_PAGES);
        let end = first + u64::from(BLOCK_PAGES);
        let ranges = self.ram.iter().copied().chain(self.added);
        let cut = ranges.map(|range| {
            let first = first.max(range.first.number().into());
            (first, end.min(range.end()))
        });
        let (first, end) = cut
            .filter(|(first, end)| first < end)
            .reduce(|(first, _), (_, end)| (first, end))
            .unwrap_or((first, first));
        let number = |page: u64| u32::try_from(page).expect("below the limit of guest memory");
        PageRange::new(PageIndex::new(number(first)), number(end - first))
    }

    /// Gives a home to a block that has none.
    pub fn assign(&self, block: u32, home: Home) {
        // First: whoever reads the home then reads this epoch, or a later one.
        self.local.advance();
        self.assign_at_start(block, home);
    }

    /// The same for the first epoch, which has all homes of the guest's start.
    pub(super) fn assign_at_start(&self, block: u32, home: Home) {
        let word = &self.words[block as usize];
        // Release: pairs with the Acquire of readers, who may then use the home.
        let before = word.swap(ASSIGNED | home.to_bits(), Ordering::AcqRel);
        debug_assert_eq!(before, 0, "block {block} has a home");
        self.count(block, home.node, true);
    }

    /// Marks a block that is about to lose its home, or keeps it after all.
    pub fn set_leaving(&self, block: u32, leaving: bool) {
        let word = &self.words[block as usize];
        if leaving {
            word.fetch_or(LEAVING, Ordering::AcqRel);
        } else {
            word.fetch_and(!LEAVING, Ordering::AcqRel);
        }
    }

    /// Takes the home of a block away; gives what it was. No page of the block may have bytes.
    pub fn unassign(&self, block: u32) -> Option<Home> {
        let word = &self.words[block as usize];
        let home = Home::from_word(word.swap(0, Ordering::AcqRel))?;
        self.count(block, home.node, false);
        self.local.advance();
        Some(home)
    }

    /// Blocks of added memory that are at home on a node.
    #[must_use]
    pub fn added_blocks_at(&self, node: NodeId) -> u32 {
        // Relaxed here and below: a number for reports.
        self.added_blocks[node.index()].load(Ordering::Relaxed)
    }

    /// Blocks of added memory that have a home.
    #[must_use]
    pub fn added_blocks(&self) -> u32 {
        let counts = self.added_blocks.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Pages at home on a node.
    #[must_use]
    pub fn pages_at(&self, node: NodeId) -> u64 {
        let ram = self.ram_pages[node.index()].load(Ordering::Relaxed);
        ram + u64::from(self.added_blocks_at(node)) * u64::from(BLOCK_PAGES)
    }

    /// The memory of the guest's start by rising address; neighbours with one home are one extent.
    #[must_use]
    pub fn ram_extents(&self) -> Vec<Extent> {
        self.extents_of(self.ram.iter().copied(), u64::MAX)
    }

    /// The memory of the guest's start that is at home on a node.
    pub fn ram_extents_at(&self, node: NodeId) -> impl Iterator<Item = Extent> {
        let extents = self.ram_extents().into_iter();
        extents.filter(move |extent| extent.home == node)
    }

    /// The added memory that has a home, as [`Self::ram_extents`].
    #[must_use]
    pub fn added_extents(&self) -> Vec<Extent> {
        self.extents_of(self.added.into_iter(), self.added_blocks().into())
    }

    /// The extents of some ranges, which end after so many blocks with a home.
    fn extents_of(&self, ranges: impl Iterator<Item = PageRange>, blocks: u64) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut left = blocks;
        for range in ranges {
            let mut rest = range;
            while rest.count > 0 && left > 0 {
                let in_block = rest.first.number() % BLOCK_PAGES;
                let (pages, after) = rest.split_at(BLOCK_PAGES - in_block);
                rest = after;
                let Some(Home { node: home, .. }) = self.home_of(pages.first) else {
                    continue;
                };
                left -= 1;
                match extents.last_mut() {
                    Some(last)
                        if last.home == home
                            && last.pages.end() == u64::from(pages.first.number()) =>
                    {
                        last.pages.count += pages.count;
                    }
                    _ => extents.push(Extent { pages, home }),
                }
            }
        }
        extents
    }

    fn count(&self, block: u32, node: NodeId, up: bool) {
        let pages = self.pages_of(block);
        if self.is_added(pages.first) {
            let count = &self.added_blocks[node.index()];
            if up {
                count.fetch_add(1, Ordering::Relaxed);
            } else {
                count.fetch_sub(1, Ordering::Relaxed);
            }
            return;
        }
        let count = &self.ram_pages[node.index()];
        if up {
            count.fetch_add(pages.count.into(), Ordering::Relaxed);
        } else {
            count.fetch_sub(pages.count.into(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
