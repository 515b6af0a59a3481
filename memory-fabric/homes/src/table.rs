//! The home table: one word for each block of guest-physical memory.
//!
//! The words of blocks that never had a home are never written, and take no memory.

mod moves;

use super::local::LocalNode;
use super::node::{NODE_IDS, NodeId};
use fabric_pages::page::{PAGE_SHIFT, PAGE_SIZE, PageIndex, PageRange};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Pages of a block: 2 MiB, the size of a huge page of x86-64.
pub const BLOCK_PAGES: u32 = 512;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = BLOCK_PAGES as u64 * PAGE_SIZE as u64;

/// In a word: the block has a home.
const ASSIGNED: u64 = 1 << 63;
/// In a word: the block is about to lose its home. Until then its pages can be fetched from there,
/// but no page is written there.
const LEAVING: u64 = 1 << 62;
/// In a word: the memory of the home is lost. Bytes that only it had are gone; all others stay
/// here.
const LOST: u64 = 1 << 61;
/// In a word, from bit 0: the slot in the home's loan. 2^23 slots are the blocks of 16 TiB, the
/// limit of guest memory.
const SLOT_BITS: u32 = 23;
/// In a word, above the slot: the id of the node.
const NODE_SHIFT: u32 = SLOT_BITS;

const _: () = assert!(1 << (NODE_SHIFT + u8::BITS) < LOST);

/// The node that stores a block's pages when they are not cached, and the location there.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Home {
    /// The node.
    pub node: NodeId,
    /// The block of the node's loan that stores this block; 0 on the local node, which stores pages
    /// at their own address.
    pub slot: u32,
}

impl Home {
    /// Returns the offset of a page of the block in the node's loan, in bytes.
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

/// The handling of a page's bytes on eviction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Eviction {
    /// They are written back to this home, another node.
    WriteBack(Home),
    /// They stay: this node is the home, or the home is lost.
    Keep,
    /// They are discarded: the block has no home, or is about to lose it.
    Discard,
}

/// In a table of links: the node has no link.
const NO_LINK: u8 = u8::MAX;

/// The homes of all blocks of a VM, as seen by one of its nodes, and the links to them.
#[derive(Debug)]
pub struct HomeTable {
    /// Its epoch grows with each change of a home.
    local: LocalNode,
    words: Box<[AtomicU64]>,
    /// The guest's initial memory, by ascending address.
    ram: Box<[PageRange]>,
    /// The addresses of memory that can be added: whole blocks above `ram`.
    added: Option<PageRange>,
    /// For each node, the number of blocks of `added` with their home there.
    added_blocks: Box<[AtomicU32]>,
    /// For each node, the number of pages of `ram` with their home there.
    ram_pages: Box<[AtomicU64]>,
    /// For each node, the index of the link to it.
    link_of: Box<[u8]>,
    /// Whether all homes on other nodes have one link, and each slot is apart from the others.
    is_replicated: bool,
}

impl HomeTable {
    /// Creates a table without homes.
    ///
    /// # Panics
    ///
    /// When `added` does not consist of whole blocks, or the process is out of memory.
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
            link_of: vec![NO_LINK; NODE_IDS].into(),
            is_replicated: false,
        }
    }

    /// Sets the nodes that have a link, in the order of the links. Ids are distinct, so that there
    /// are fewer than [`NODE_IDS`] besides the local one.
    #[must_use]
    pub fn with_links(mut self, nodes: &[NodeId]) -> Self {
        for (link, node) in (0..NO_LINK).zip(nodes) {
            self.link_of[node.index()] = link;
        }
        self
    }

    /// Sets one link that leads to all these nodes: that of replicated memory. The slot of a home is
    /// the number of the block there, whose copies are anywhere.
    ///
    /// # Panics
    ///
    /// When there is no such link.
    #[must_use]
    pub fn with_replicas(mut self, nodes: &[NodeId], link: usize) -> Self {
        let link = u8::try_from(link).expect("fewer links than ids");
        for node in nodes {
            self.link_of[node.index()] = link;
        }
        self.is_replicated = true;
        self
    }

    /// Returns the index of the link to a node; `None` without a link, as for the local node.
    #[must_use]
    pub fn link_to(&self, node: NodeId) -> Option<usize> {
        let link = self.link_of[node.index()];
        (link != NO_LINK).then_some(link.into())
    }

    /// Returns the index of the link to a home on another node.
    ///
    /// # Panics
    ///
    /// When the node has no link: only nodes with a link become homes, so this is a bug.
    #[must_use]
    pub fn link_to_home(&self, home: Home) -> usize {
        let link = self.link_to(home.node);
        link.expect("every node that is a home is the local one, or has a link")
    }

    /// Returns the id of the node that has this table.
    #[must_use]
    pub fn local(&self) -> NodeId {
        self.local.id()
    }

    /// Returns the node that has this table, with the table's epoch.
    #[must_use]
    pub fn local_node(&self) -> &LocalNode {
        &self.local
    }

    /// Returns the guest's initial memory, by ascending address.
    #[must_use]
    pub fn ram(&self) -> &[PageRange] {
        &self.ram
    }

    /// Returns the number of pages of the guest's initial memory.
    #[must_use]
    pub fn ram_pages(&self) -> u64 {
        self.ram.iter().map(|range| u64::from(range.count)).sum()
    }

    /// Returns the pages that can be added at run time.
    #[must_use]
    pub fn added(&self) -> Option<PageRange> {
        self.added
    }

    /// Returns the number after the last page of the guest's initial memory.
    #[must_use]
    pub fn ram_span_pages(&self) -> u64 {
        self.ram.last().map_or(0, |range| range.end())
    }

    /// Returns the number after the last page, including those that can be added.
    #[must_use]
    pub fn span_pages(&self) -> u64 {
        self.added
            .map_or_else(|| self.ram_span_pages(), PageRange::end)
    }

    /// Returns the block of a page.
    #[must_use]
    pub const fn block_of(page: PageIndex) -> u32 {
        page.number() / BLOCK_PAGES
    }

    /// Returns the home of a page, even while its block is about to lose it.
    #[must_use]
    pub fn home_of(&self, page: PageIndex) -> Option<Home> {
        self.home(Self::block_of(page))
    }

    /// Returns the home of a page if that is another node.
    #[must_use]
    pub fn remote_home_of(&self, page: PageIndex) -> Option<Home> {
        self.home_of(page).filter(|home| home.node != self.local())
    }

    /// Returns the home of a block, even while it is about to lose it.
    #[must_use]
    pub fn home(&self, block: u32) -> Option<Home> {
        let word = self.words.get(block as usize)?;
        // Acquire: pairs with the Release of `assign`.
        Home::from_word(word.load(Ordering::Acquire))
    }

    /// Returns the handling of a page on eviction.
    #[must_use]
    pub fn eviction_of(&self, page: PageIndex) -> Eviction {
        let word = self.words.get(Self::block_of(page) as usize);
        let word = word.map_or(0, |word| word.load(Ordering::Acquire));
        match Home::from_word(word) {
            Some(home) if word & LEAVING == 0 => {
                if home.node == self.local() || word & LOST != 0 {
                    Eviction::Keep
                } else {
                    Eviction::WriteBack(home)
                }
            }
            _ => Eviction::Discard,
        }
    }

    /// Returns how many pages from `page` on, up to `most`, `home` stores contiguously; `home` is
    /// that of `page`.
    #[must_use]
    pub fn contiguous(&self, page: PageIndex, home: Home, most: u32) -> u32 {
        let mut block = Self::block_of(page);
        let mut slot = home.slot;
        let mut count = BLOCK_PAGES - page.number() % BLOCK_PAGES;
        while count < most && !self.is_replicated {
            (block, slot) = (block + 1, slot + 1);
            let node = home.node;
            if self.home(block) != Some(Home { node, slot }) {
                break;
            }
            count += BLOCK_PAGES;
        }
        count.min(most)
    }

    /// Returns whether a page belongs to the guest, now or once it is added.
    #[must_use]
    pub fn is_guest_memory(&self, page: PageIndex) -> bool {
        self.is_added(page) || self.ram.iter().any(|range| range.contains(page))
    }

    /// Returns whether a page belongs to the memory that can be added.
    #[must_use]
    pub fn is_added(&self, page: PageIndex) -> bool {
        self.added.is_some_and(|pages| pages.contains(page))
    }

    /// Returns whether the pager manages a page: all except the initial pages with their home here.
    #[must_use]
    pub fn is_paged(&self, page: PageIndex) -> bool {
        self.is_added(page) || self.remote_home_of(page).is_some()
    }

    /// Returns the guest's pages of a block: all of it, except at the ends of the guest's memory.
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

    /// Assigns a home to a block without one.
    pub fn assign(&self, block: u32, home: Home) {
        // First: a reader of the home then reads this epoch, or a later one.
        self.local.advance();
        self.assign_at_start(block, home);
    }

    /// Like [`assign`](Self::assign), for the first epoch, which has all homes of the guest's
    /// start.
    pub(super) fn assign_at_start(&self, block: u32, home: Home) {
        let word = &self.words[block as usize];
        // Release: pairs with the Acquire of readers, which may then use the home.
        let before = word.swap(ASSIGNED | home.to_bits(), Ordering::AcqRel);
        debug_assert_eq!(before, 0, "block {block} has a home");
        self.count(block, home.node, true);
    }

    /// Sets whether a block is about to lose its home.
    pub fn set_leaving(&self, block: u32, leaving: bool) {
        let word = &self.words[block as usize];
        if leaving {
            word.fetch_or(LEAVING, Ordering::AcqRel);
        } else {
            word.fetch_and(!LEAVING, Ordering::AcqRel);
        }
    }

    /// Removes the home of a block, and returns it. No page of the block may have bytes.
    pub fn unassign(&self, block: u32) -> Option<Home> {
        let word = &self.words[block as usize];
        let home = Home::from_word(word.swap(0, Ordering::AcqRel))?;
        self.count(block, home.node, false);
        self.local.advance();
        Some(home)
    }

    /// Returns the number of added blocks with their home on a node.
    #[must_use]
    pub fn added_blocks_at(&self, node: NodeId) -> u32 {
        // Relaxed here and below: a number for reports.
        self.added_blocks[node.index()].load(Ordering::Relaxed)
    }

    /// Returns the number of added blocks with a home.
    #[must_use]
    pub fn added_blocks(&self) -> u32 {
        let counts = self.added_blocks.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Returns the number of pages with their home on a node.
    #[must_use]
    pub fn pages_at(&self, node: NodeId) -> u64 {
        let ram = self.ram_pages[node.index()].load(Ordering::Relaxed);
        ram + u64::from(self.added_blocks_at(node)) * u64::from(BLOCK_PAGES)
    }

    /// Returns the guest's initial memory by ascending address; neighbours with the same home form
    /// one extent.
    #[must_use]
    pub fn ram_extents(&self) -> Vec<Extent> {
        self.extents_of(self.ram.iter().copied(), u64::MAX)
    }

    /// Returns the initial memory with its home on a node.
    pub fn ram_extents_at(&self, node: NodeId) -> impl Iterator<Item = Extent> {
        let extents = self.ram_extents().into_iter();
        extents.filter(move |extent| extent.home == node)
    }

    /// Returns the added memory with a home, as [`Self::ram_extents`] does.
    #[must_use]
    pub fn added_extents(&self) -> Vec<Extent> {
        self.extents_of(self.added.into_iter(), self.added_blocks().into())
    }

    /// Returns the extents of some ranges, up to this many blocks with a home.
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
