//! The owner's protocol: blocks that this node alone uses.
//!
//! No message is sent for them, except to homes on other nodes.

use std::collections::HashMap;

use fabric_coherence::message::Behind;
use fabric_coherence::{BlockIndex, LocalPage, Written};
use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::{PageIndex, PageRange};

/// Pages of a block.
pub(crate) const PAGES: usize = BLOCK_PAGES as usize;

/// A page that is read from its home on another node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Reading {
    page: PageIndex,
    write: bool,
}

/// What a touch needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Need {
    /// Fill the pages, among them the one that was touched, with zeroes and map them writable.
    Zeroes(PageRange),
    /// Read the page from its home, then call [`OwnedBlocks::was_read`].
    Home,
    /// Map the page, whose bytes are here.
    Map {
        /// Whether writes are allowed.
        writable: bool,
    },
    /// Nothing: the page is being read.
    Nothing,
}

/// What an eviction needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Give {
    /// Unmap and free the page.
    Drop,
    /// Unmap the page, and free it if it is zero; else write it home, then call
    /// [`OwnedBlocks::was_written`].
    WriteBack,
    /// Nothing: the page is not here.
    Nothing,
}

/// How a write-back ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ended {
    /// The page is to be freed.
    Left,
    /// It stays.
    Kept,
    /// The home does not have the only bytes of the page.
    Refused,
}

/// The blocks that this node owns.
#[derive(Debug, Default)]
pub(crate) struct OwnedBlocks {
    blocks: HashMap<BlockIndex, Box<[LocalPage; PAGES]>>,
    reading: Vec<Reading>,
    /// Pages whose write-backs are on their way to homes on other nodes, and that no touch has kept.
    leaving: Vec<PageIndex>,
    /// Blocks that are to be given up when no page of them is being read.
    splitting: Vec<BlockIndex>,
}

/// A page that is mapped writable.
const DIRTY: LocalPage = LocalPage::Dirty { writable: true };

/// The block of a page.
pub(crate) const fn block_of(page: PageIndex) -> BlockIndex {
    BlockIndex(page.number() / BLOCK_PAGES)
}

impl OwnedBlocks {
    /// Starts a block whose pages are in these states, all zero if there are none.
    pub(crate) fn start(&mut self, block: BlockIndex, pages: &[LocalPage]) {
        let at = |place: usize| pages.get(place).copied().unwrap_or(LocalPage::Zero);
        self.blocks.insert(block, Box::new(std::array::from_fn(at)));
    }

    pub(crate) fn has(&self, page: PageIndex) -> bool {
        self.blocks.contains_key(&block_of(page))
    }

    /// Whether the page is here and mapped writable.
    pub(crate) fn is_writable(&self, page: PageIndex) -> bool {
        let block = self.blocks.get(&block_of(page));
        let local = block.map(|block| block[page.index() % PAGES]);
        matches!(local, Some(LocalPage::Dirty { writable: true, .. }))
    }

    /// Whether the bytes of a page of an owned block are at its home, and not here.
    pub(crate) fn is_at_home(&self, page: PageIndex) -> bool {
        let block = self.blocks.get(&block_of(page));
        let local = block.map(|block| block[page.index() % PAGES]);
        matches!(local, Some(LocalPage::Home))
    }

    fn page(&mut self, page: PageIndex) -> Option<&mut LocalPage> {
        let block = self.blocks.get_mut(&block_of(page))?;
        Some(&mut block[page.index() % PAGES])
    }

    /// Takes the pages around `page` that are zero as well, up to `around` in an aligned window.
    /// They are writable from the start, as in a VM with one compute node: a page that stays zero
    /// costs no traffic when it is evicted.
    fn take_zeroes(&mut self, page: PageIndex, around: u32) -> PageRange {
        let mut run = PageRange::new(page, 1);
        let Some(block) = self.blocks.get_mut(&block_of(page)) else {
            return run;
        };
        let at = page.index() % PAGES;
        let around = usize::try_from(around.max(1)).unwrap_or(1);
        let window = at - at % around;
        let is_zero = |place: &usize| block[*place] == LocalPage::Zero;
        let after = (at + 1..(window + around).min(PAGES)).take_while(is_zero);
        let after = after.count();
        let before = (window..at).rev().take_while(is_zero).count();
        block[at - before..=at + after].fill(DIRTY);
        let count = |pages: usize| u32::try_from(pages).unwrap_or(0);
        run.first = PageIndex::new(page.number() - count(before));
        run.count = count(before + 1 + after);
        run
    }

    /// A thread touched a page of an owned block. A first touch may take up to `around` pages.
    pub(crate) fn touch(&mut self, page: PageIndex, write: bool, around: u32) -> Need {
        if let Some(reading) = self.reading.iter_mut().find(|one| one.page == page) {
            reading.write |= write;
            return Need::Nothing;
        }
        let Some(local) = self.page(page) else {
            return Need::Nothing;
        };
        match *local {
            LocalPage::Zero => Need::Zeroes(self.take_zeroes(page, around)),
            LocalPage::Home => {
                self.reading.push(Reading { page, write });
                Need::Home
            }
            LocalPage::Clean(_) => {
                if write {
                    *local = DIRTY;
                }
                Need::Map { writable: write }
            }
            LocalPage::Dirty { writable } => {
                let writable = writable || write;
                *local = LocalPage::Dirty { writable };
                self.leaving.retain(|leaving| *leaving != page);
                Need::Map { writable }
            }
        }
    }

    /// The page came from its home. Returns whether it is mapped writable, or `None` if nobody asked
    /// for it here.
    pub(crate) fn was_read(&mut self, page: PageIndex) -> Option<bool> {
        let place = self.reading.iter().position(|one| one.page == page)?;
        let Reading { write, .. } = self.reading.swap_remove(place);
        let local = self.page(page)?;
        *local = if write {
            DIRTY
        } else {
            LocalPage::Clean(Behind::Home)
        };
        Some(write)
    }

    /// The evictor chose a page of an owned block, of which no write-back is unanswered.
    pub(crate) fn evict(&mut self, page: PageIndex) -> Give {
        let Some(local) = self.page(page) else {
            return Give::Nothing;
        };
        match *local {
            LocalPage::Clean(behind) => {
                *local = match behind {
                    Behind::Zero => LocalPage::Zero,
                    Behind::Home => LocalPage::Home,
                };
                Give::Drop
            }
            LocalPage::Dirty { .. } => {
                *local = LocalPage::Dirty { writable: false };
                self.leaving.push(page);
                Give::WriteBack
            }
            LocalPage::Zero | LocalPage::Home => Give::Nothing,
        }
    }

    /// The guest does not need the bytes of a page, which is zero from now on. Returns whether it has a
    /// frame, to be unmapped and freed, or `None` if the page is on its way and stays as it is.
    pub(crate) fn discard(&mut self, page: PageIndex) -> Option<bool> {
        if self.reading.iter().any(|one| one.page == page) || self.leaving.contains(&page) {
            return None;
        }
        let local = self.page(page)?;
        let has_frame = match *local {
            LocalPage::Zero | LocalPage::Home => false,
            LocalPage::Clean(_) | LocalPage::Dirty { .. } => true,
        };
        *local = LocalPage::Zero;
        Some(has_frame)
    }

    /// A write-back of a page of an owned block ended. Returns whether to free the page: unless a touch
    /// has cancelled the write-back, or the block came with it from the split protocol, where the page
    /// had other owners meanwhile, so that the home may have refused it.
    pub(crate) fn was_written(&mut self, page: PageIndex, written: Written) -> Ended {
        let place = self.leaving.iter().position(|leaving| *leaving == page);
        if place.map(|place| self.leaving.swap_remove(place)).is_none() {
            return Ended::Kept;
        }
        let left = match written {
            Written::Home => LocalPage::Home,
            Written::Zero => LocalPage::Zero,
            Written::Refused => return Ended::Refused,
        };
        let Some(local) = self.page(page) else {
            return Ended::Kept;
        };
        *local = left;
        Ended::Left
    }

    /// The block is to be given up; [`Self::stopped`] returns it when it can be.
    pub(crate) fn stop(&mut self, block: BlockIndex) {
        self.splitting.push(block);
    }

    /// A block that was to be given up and of which no page is being read, with its pages.
    pub(crate) fn stopped(&mut self) -> Option<(BlockIndex, Box<[LocalPage; PAGES]>)> {
        let reading = &self.reading;
        let is_read = |block: BlockIndex| reading.iter().any(|one| block_of(one.page) == block);
        let place = self.splitting.iter().position(|block| !is_read(*block))?;
        let block = self.splitting.swap_remove(place);
        let pages = self.blocks.remove(&block)?;
        // What is being written back is here still, and stays: the answer means nothing.
        self.leaving.retain(|page| block_of(*page) != block);
        Some((block, pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_block() -> OwnedBlocks {
        let mut owned = OwnedBlocks::default();
        owned.start(BlockIndex(0), &[]);
        owned
    }

    #[test]
    fn a_page_is_written_back_and_read_again() {
        let mut owned = one_block();
        let page = PageIndex::new(3);
        let one = PageRange::new(page, 1);
        assert_eq!(owned.touch(page, true, 1), Need::Zeroes(one));
        assert_eq!(owned.evict(page), Give::WriteBack);
        assert_eq!(owned.was_written(page, Written::Home), Ended::Left);
        assert_eq!(owned.touch(page, false, 1), Need::Home);
        assert_eq!(owned.touch(page, true, 1), Need::Nothing, "being read");
        assert_eq!(owned.was_read(page), Some(true), "for the write");
        assert_eq!(owned.page(page), Some(&mut DIRTY.clone()));
    }

    #[test]
    fn a_first_touch_takes_the_untouched_pages_around() {
        let mut owned = one_block();
        owned.touch(PageIndex::new(18), true, 1);
        owned.touch(PageIndex::new(29), true, 1);
        let run = |first, count| Need::Zeroes(PageRange::new(PageIndex::new(first), count));
        assert_eq!(owned.touch(PageIndex::new(20), false, 16), run(19, 10));
        assert_eq!(owned.touch(PageIndex::new(30), false, 16), run(30, 2));
        assert_eq!(owned.touch(PageIndex::new(511), false, 16), run(496, 16));
    }

    #[test]
    fn a_touch_cancels_a_write_back() {
        let mut owned = one_block();
        let page = PageIndex::new(3);
        owned.touch(page, true, 1);
        owned.evict(page);
        assert_eq!(owned.touch(page, true, 1), Need::Map { writable: true });
        assert_eq!(owned.was_written(page, Written::Home), Ended::Kept);
        assert_eq!(owned.page(page), Some(&mut DIRTY.clone()));
        assert_eq!(owned.evict(page), Give::WriteBack);
    }

    #[test]
    fn a_home_may_refuse_what_a_node_wrote_before_it_owned_the_block() {
        let mut owned = OwnedBlocks::default();
        owned.start(BlockIndex(0), &[DIRTY, DIRTY]);
        let [before, since] = [0, 1].map(PageIndex::new);
        assert_eq!(owned.was_written(before, Written::Refused), Ended::Kept);
        assert_eq!(owned.page(before), Some(&mut DIRTY.clone()));
        assert_eq!(owned.evict(since), Give::WriteBack);
        assert_eq!(owned.was_written(since, Written::Refused), Ended::Refused);
    }

    #[test]
    fn a_discarded_page_is_zero_unless_it_is_on_its_way() {
        let mut owned = one_block();
        let [written, leaves, read] = [3, 4, 5].map(PageIndex::new);
        let zeroes = |page| Need::Zeroes(PageRange::new(page, 1));
        assert_eq!(owned.discard(written), Some(false), "untouched");
        owned.touch(written, true, 1);
        assert_eq!(owned.discard(written), Some(true));
        assert_eq!(owned.touch(written, false, 1), zeroes(written));
        owned.touch(leaves, true, 1);
        owned.evict(leaves);
        assert_eq!(owned.discard(leaves), None, "being written back");
        owned.touch(leaves, false, 1);
        assert_eq!(owned.discard(leaves), Some(true), "it has come back");
        assert_eq!(owned.was_written(leaves, Written::Home), Ended::Kept);
        assert_eq!(owned.touch(leaves, true, 1), zeroes(leaves));
        owned.evict(leaves);
        assert_eq!(owned.was_written(leaves, Written::Home), Ended::Left);
        assert_eq!(owned.discard(leaves), Some(false), "at its home");
        assert_eq!(owned.touch(leaves, false, 1), zeroes(leaves));
        owned.touch(read, true, 1);
        owned.evict(read);
        owned.was_written(read, Written::Home);
        assert_eq!(owned.touch(read, false, 1), Need::Home);
        assert_eq!(owned.discard(read), None, "being read");
        assert_eq!(owned.was_read(read), Some(false));
        assert_eq!(owned.discard(read), Some(true), "clean");
        assert_eq!(
            owned.discard(PageIndex::new(BLOCK_PAGES)),
            None,
            "not owned"
        );
    }

    #[test]
    fn a_block_is_given_up_when_no_page_is_being_read() {
        let mut owned = one_block();
        let [read, written] = [3, 4].map(PageIndex::new);
        owned.touch(written, true, 1);
        owned.evict(written);
        owned.start(BlockIndex(1), &[LocalPage::Home; PAGES]);
        let other = PageIndex::new(BLOCK_PAGES + 3);
        assert_eq!(owned.touch(other, false, 1), Need::Home);
        owned.stop(BlockIndex(1));
        assert!(owned.stopped().is_none());
        owned.stop(BlockIndex(0));
        let (block, pages) = owned.stopped().expect("nothing is being read");
        assert_eq!(
            (block, pages[read.index()]),
            (BlockIndex(0), LocalPage::Zero)
        );
        assert_eq!(pages[written.index()], LocalPage::Dirty { writable: false });
        assert_eq!(owned.was_read(other), Some(false));
        let (_, pages) = owned.stopped().expect("it was read");
        assert_eq!(pages[3], LocalPage::Clean(Behind::Home));
    }
}
