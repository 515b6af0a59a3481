//! The pages that may be added to a guest while it runs, and where each block of them is at home.
//!
//! One word for each block, which any thread reads without a lock. The words of blocks that were
//! never plugged are never touched, and take no memory.

use crate::layout::{Extent, NodeId};
use crate::mapping::Mapping;
use crate::page::{PAGE_SIZE, PageIndex, PageRange};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Pages of a block: 2 MiB.
pub const BLOCK_PAGES: u32 = 512;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = BLOCK_PAGES as u64 * PAGE_SIZE as u64;

/// In a word: the block is plugged.
const PLUGGED: u64 = 1 << 63;
/// In a word: it is being unplugged. Its pages still have their home, and get no new bytes there.
const LEAVING: u64 = 1 << 62;
/// In a word: the place in the home's loan, in blocks, above the number of the node.
const PLACE_SHIFT: u32 = 16;
const PLACE_MASK: u64 = u32::MAX as u64;

/// Where a block is at home.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Place {
    pub home: NodeId,
    /// Which block of what that node lends; 0 at home here.
    pub block: u32,
}

/// The region.
#[derive(Debug)]
pub struct Region {
    pages: PageRange,
    /// An `AtomicU64` for each block.
    words: Mapping,
    /// For each node, how many blocks are at home there.
    plugged: Box<[AtomicU32]>,
    /// How many blocks are asked for.
    requested: AtomicU32,
}

impl Region {
    /// A region of whole blocks with nothing plugged, for nodes numbered below `nodes`.
    ///
    /// # Errors
    ///
    /// When the host has no address space left.
    pub(crate) fn new(pages: PageRange, nodes: usize) -> io::Result<Self> {
        debug_assert!(pages.count > 0 && pages.count.is_multiple_of(BLOCK_PAGES));
        debug_assert!(pages.first.number().is_multiple_of(BLOCK_PAGES));
        let blocks = (pages.count / BLOCK_PAGES) as usize;
        Ok(Self {
            pages,
            words: Mapping::anonymous(blocks * size_of::<u64>())?,
            plugged: (0..nodes).map(|_| AtomicU32::new(0)).collect(),
            requested: AtomicU32::new(0),
        })
    }

    /// Its pages.
    #[must_use]
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// Blocks that are at home on `node`.
    #[must_use]
    pub fn plugged_at(&self, node: NodeId) -> u32 {
        // Relaxed here and below: a number to look at.
        let plugged = self.plugged.get(usize::from(node.0));
        plugged.map_or(0, |plugged| plugged.load(Ordering::Relaxed))
    }

    /// How much is asked for.
    #[must_use]
    pub fn requested_bytes(&self) -> u64 {
        u64::from(self.requested.load(Ordering::Relaxed)) * BLOCK_BYTES
    }

    pub(crate) fn set_requested(&self, blocks: u32) {
        self.requested.store(blocks, Ordering::Relaxed);
    }

    /// Blocks that are plugged.
    #[must_use]
    pub fn plugged(&self) -> u32 {
        self.plugged.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// The block of a page of the region.
    pub(crate) fn block_of(&self, page: PageIndex) -> Option<u32> {
        let inside = self.pages.contains(page);
        inside.then(|| (page.number() - self.pages.first.number()) / BLOCK_PAGES)
    }

    /// The pages of a block.
    pub(crate) fn pages_of(&self, block: u32) -> PageRange {
        let first = self.pages.first.number() + block * BLOCK_PAGES;
        PageRange::new(PageIndex::new(first), BLOCK_PAGES)
    }

    /// Where a block is at home, also while it is being unplugged.
    pub(crate) fn place(&self, block: u32) -> Option<Place> {
        place_in(self.word(block).load(Ordering::Acquire))
    }

    /// Whether bytes of a block may go home: it is plugged, and stays.
    pub(crate) fn stays(&self, block: u32) -> bool {
        self.word(block).load(Ordering::Acquire) & (PLUGGED | LEAVING) == PLUGGED
    }

    /// Gives a home to a block that has none.
    pub(crate) fn settle(&self, block: u32, place: Place) {
        let word = PLUGGED | u64::from(place.block) << PLACE_SHIFT | u64::from(place.home.0);
        // Release: pairs with the Acquire of whoever sees it, who may then use the home.
        let before = self.word(block).swap(word, Ordering::AcqRel);
        debug_assert_eq!(before, 0, "block {block} has a home");
        self.count(place.home).fetch_add(1, Ordering::Relaxed);
    }

    /// Begins, or gives up, to take the home of a block away.
    pub(crate) fn set_leaving(&self, block: u32, leaving: bool) {
        let word = self.word(block);
        if leaving {
            word.fetch_or(LEAVING, Ordering::AcqRel);
        } else {
            word.fetch_and(!LEAVING, Ordering::AcqRel);
        }
    }

    /// Takes the home of a block away, none of whose pages has bytes any more; gives what it was.
    pub(crate) fn unsettle(&self, block: u32) -> Option<Place> {
        let place = place_in(self.word(block).swap(0, Ordering::AcqRel))?;
        self.count(place.home).fetch_sub(1, Ordering::Relaxed);
        Some(place)
    }

    /// The part of the block around `page` that has one home.
    pub(crate) fn extent_of(&self, page: PageIndex) -> Option<Extent> {
        let block = self.block_of(page)?;
        let pages = self.pages_of(block);
        Some(match self.place(block) {
            Some(Place { home, block }) => Extent {
                pages,
                home,
                base: if home == NodeId::COMPUTE {
                    0
                } else {
                    u64::from(block) * BLOCK_BYTES
                },
            },
            None => Extent {
                pages,
                home: NodeId::NOWHERE,
                base: 0,
            },
        })
    }

    /// The plugged parts by rising address; neighbours with one home are one.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut left = self.plugged();
        for block in 0..self.pages.count / BLOCK_PAGES {
            if left == 0 {
                break;
            }
            let Some(Place { home, .. }) = self.place(block) else {
                continue;
            };
            left -= 1;
            let pages = self.pages_of(block);
            match extents.last_mut() {
                Some(last)
                    if last.home == home && last.pages.end() == u64::from(pages.first.number()) =>
                {
                    last.pages.count += pages.count;
                }
                _ => extents.push(Extent {
                    pages,
                    home,
                    base: 0,
                }),
            }
        }
        extents
    }

    fn count(&self, node: NodeId) -> &AtomicU32 {
        &self.plugged[usize::from(node.0)]
    }

    fn word(&self, block: u32) -> &AtomicU64 {
        let at = block as usize * size_of::<u64>();
        let word = self.words.at(at, size_of::<u64>());
        // SAFETY: inside the mapping, which `at` checked, aligned, zeroed at first, and only ever
        // accessed as atomics.
        unsafe { &*word.cast::<AtomicU64>() }
    }
}

fn place_in(word: u64) -> Option<Place> {
    let node = u16::try_from(word & u64::from(u16::MAX)).unwrap_or(0);
    let block = u32::try_from(word >> PLACE_SHIFT & PLACE_MASK).unwrap_or(0);
    (word & PLUGGED != 0).then_some(Place {
        home: NodeId(node),
        block,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region() -> Region {
        let pages = PageRange::new(PageIndex::new(1 << 20), 100 * BLOCK_PAGES);
        Region::new(pages, 4).expect("a few bytes")
    }

    fn at(home: u16, block: u32) -> Place {
        Place {
            home: NodeId(home),
            block,
        }
    }

    #[test]
    fn a_block_has_a_home_from_when_it_is_settled_until_it_is_unsettled() {
        let region = region();
        let page = PageIndex::new((1 << 20) + 7 * BLOCK_PAGES + 3);
        assert_eq!(region.block_of(page), Some(7));
        let home = |region: &Region| region.extent_of(page).expect("of the region").home;
        assert_eq!(home(&region), NodeId::NOWHERE);
        assert!(!region.stays(7));
        region.settle(7, at(3, u32::MAX));
        assert_eq!(region.place(7), Some(at(3, u32::MAX)));
        let extent = region.extent_of(page).expect("of the region");
        assert_eq!(
            extent.offset_of(page),
            u64::from(u32::MAX) * BLOCK_BYTES + 3 * 4096
        );
        region.set_leaving(7, true);
        assert!(!region.stays(7));
        assert_eq!(home(&region), NodeId(3), "its pages still have one");
        region.set_leaving(7, false);
        assert!(region.stays(7));
        assert_eq!((region.plugged(), region.plugged_at(NodeId(3))), (1, 1));
        assert_eq!(region.unsettle(7), Some(at(3, u32::MAX)));
        assert_eq!(region.unsettle(7), None);
        assert_eq!((region.plugged(), home(&region)), (0, NodeId::NOWHERE));
        assert!(region.extent_of(PageIndex::new(5)).is_none());
    }

    #[test]
    fn neighbours_with_one_home_are_one_extent() {
        let region = region();
        for (block, home) in [(0, 1), (1, 1), (2, 0), (5, 1), (99, 2)] {
            region.settle(block, at(home, 0));
        }
        let found: Vec<_> = region
            .extents()
            .iter()
            .map(|extent| (extent.home.0, extent.pages.count / BLOCK_PAGES))
            .collect();
        assert_eq!(found, [(1, 2), (0, 1), (1, 1), (2, 1)]);
    }
}
