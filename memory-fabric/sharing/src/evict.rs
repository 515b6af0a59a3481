//! Keeping what this node has of the guest's memory within its budget.
//!
//! A page whose home is this node is here once at most, in its frame or stored, and room for all of
//! these pages is part of the budget. So only copies of pages with a home elsewhere are evicted, and
//! a home never refuses what is written back: no node waits for the memory of another one. Copies may
//! use what homes do not need yet.
//!
//! A page that arrives at its home can take one more than the budget, until a copy has left for it. A
//! write-back ends where the next one begins, and each node begins [`RESERVE`] of its own at most, and as
//! many again in place of those that touches cancel: so the nodes together have no more of them on their
//! way, and no node exceeds its budget by more.

use std::collections::VecDeque;

use fabric_coherence::{BlockIndex, Evict, Written};
use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::{PageIndex, is_zero};
use fabric_peers::Peers;

use crate::Failure;
use crate::engine::Engine;
use crate::owned::{Ended, Give};

/// Pages that leave ahead of the faults that need their memory.
pub(crate) const RESERVE: usize = 64;

/// Pages tried for each one that is needed.
const TRIES: usize = 8;

/// Copies of pages with a home elsewhere, in the order in which they came, and the limit of all pages.
#[derive(Debug)]
pub(crate) struct EvictionQueue {
    limit: usize,
    pages: VecDeque<PageIndex>,
}

impl EvictionQueue {
    pub(crate) const fn new(limit: usize) -> Self {
        Self {
            limit,
            pages: VecDeque::new(),
        }
    }

    /// The limit of all pages with bytes on this node.
    pub(crate) const fn limit(&self) -> usize {
        self.limit
    }
}

impl<P: Peers> Engine<P> {
    /// Pages with bytes on this node.
    pub(crate) fn local_pages(&self) -> usize {
        self.frames.resident() + self.home.stored()
    }

    /// Whether one more page fits the budget.
    pub(crate) fn has_room(&mut self) -> Result<bool, Failure> {
        if self.local_pages() + self.expected() < self.queue.limit {
            return Ok(true);
        }
        self.make_room()?;
        Ok(self.local_pages() + self.expected() < self.queue.limit)
    }

    /// Whether so many pages fit the budget without an eviction.
    pub(crate) fn has_plenty(&self, pages: u32) -> bool {
        let pages = RESERVE + self.expected() + pages as usize;
        self.local_pages().saturating_add(pages) < self.queue.limit
    }

    /// The page got bytes and was mapped.
    pub(crate) fn arrived(&mut self, page: PageIndex) -> Result<(), Failure> {
        self.woken(page);
        if self.home_of(page) == self.config.me {
            self.spare_pages.extend(self.home.enters_frame(page));
        }
        if self.may_leave_frame(page) && self.frames.enqueue(page) {
            self.queue.pages.push_back(page);
        }
        self.one_more()
    }

    /// Whether an eviction of the page can free memory: another node stores it, or the depot.
    fn may_leave_frame(&self, page: PageIndex) -> bool {
        self.home_of(page) != self.config.me || self.home.has_place(page)
    }

    /// One more page has bytes on this node.
    pub(crate) fn one_more(&mut self) -> Result<(), Failure> {
        let pages = self.local_pages();
        self.stats.local_pages_max.raise(pages as u64);
        if pages + RESERVE > self.queue.limit {
            self.make_room()?;
        }
        Ok(())
    }

    /// Frees the bytes of an unmapped page. Those that its home, which is this node, may have to serve
    /// are stored.
    pub(crate) fn free(&mut self, page: PageIndex) {
        if self.home.is_in_frame(page) {
            let mut place = self.spare_page();
            place.copy_from_slice(self.frames.bytes(page));
            self.home.leaves_frame(page, place);
        }
        self.frames.free(page);
    }

    /// Evicts the pages that came first, until the reserve is free or on its way. Those that are
    /// stored for the depot are in no frame here, and leave before.
    pub(crate) fn make_room(&mut self) -> Result<(), Failure> {
        let wanted = self.queue.limit.saturating_sub(RESERVE);
        let mut excess = self.local_pages().saturating_sub(wanted);
        excess = excess.saturating_sub(self.send_away(excess));
        excess = excess.saturating_sub(self.frames.leaving());
        let mut tries = (TRIES * excess).min(self.queue.pages.len());
        while excess > 0 && tries > 0 {
            tries -= 1;
            let Some(page) = self.queue.pages.pop_front() else {
                break;
            };
            if !self.frames.dequeue(page) {
                continue;
            }
            if self.evict(page)? {
                excess -= 1;
            } else if self.frames.enqueue(page) {
                self.queue.pages.push_back(page);
            }
        }
        Ok(())
    }

    /// Starts to evict a page; false if that is not possible now.
    fn evict(&mut self, page: PageIndex) -> Result<bool, Failure> {
        if !self.home_waits.may_write(page) {
            return Ok(false);
        }
        let mut actions = self.actions();
        match self.cache.evict(page, &mut actions) {
            Evict::Started => {
                self.stats.evictions.increment();
                self.frames.leaves(page);
                self.carry_out(actions)?;
                Ok(true)
            }
            Evict::Owned => {
                self.spare_actions.push(actions);
                self.evict_owned(page)
            }
            Evict::InUse | Evict::NotHere => {
                self.spare_actions.push(actions);
                Ok(false)
            }
        }
    }

    fn evict_owned(&mut self, page: PageIndex) -> Result<bool, Failure> {
        match self.owned.evict(page) {
            Give::Nothing => return Ok(false),
            Give::Drop => {
                self.frames.zap(page)?;
                self.free(page);
            }
            Give::WriteBack => {
                self.frames.zap(page)?;
                self.frames.leaves(page);
                let block = crate::owned::block_of(page);
                let number = self.cache.owned_number(block);
                let number = number.ok_or(Failure::Defect("no number for a write-back", page))?;
                self.write_back(page, number)?;
            }
        }
        self.stats.evictions.increment();
        Ok(true)
    }

    /// Whether the page, which is unmapped, is all zero.
    pub(crate) fn is_zero(&mut self, page: PageIndex) -> bool {
        is_zero(self.frames.bytes(page))
    }

    /// A write-back ended.
    pub(crate) fn written(&mut self, page: PageIndex, written: Written) -> Result<(), Failure> {
        self.end_write_back(page, written)?;
        if self.owned.has(page) || !self.cache.is_putting(page) {
            self.keep(page);
        }
        Ok(())
    }

    /// The block came or went as a whole, with the pages that were on their way out.
    pub(crate) fn keep_block(&mut self, block: BlockIndex) {
        let first = block.0 * BLOCK_PAGES;
        for page in first..first + BLOCK_PAGES {
            self.keep(PageIndex::new(page));
        }
    }

    /// An eviction of the page is void if it has not ended: its bytes stay, and can be evicted again.
    fn keep(&mut self, page: PageIndex) {
        if !self.frames.is_resident(page) {
            return;
        }
        self.frames.stays(page);
        if self.may_leave_frame(page) && self.frames.enqueue(page) {
            self.queue.pages.push_back(page);
        }
    }

    fn end_write_back(&mut self, page: PageIndex, written: Written) -> Result<(), Failure> {
        if self.owned.has(page) {
            match self.owned.was_written(page, written) {
                Ended::Left => self.free(page),
                Ended::Kept => {}
                Ended::Refused => {
                    return Err(Failure::Defect("the home refused its block's owner", page));
                }
            }
            return Ok(());
        }
        let mut actions = self.actions();
        self.cache.written(page, written, &mut actions)?;
        self.carry_out(actions)
    }
}
