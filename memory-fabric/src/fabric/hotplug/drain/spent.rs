//! Slots of loans that are no home, and are not free either: those that blocks leave or have left, and
//! those to which a move was given up.
//!
//! A slot that a block has left is free as soon as nothing reads or writes it for that block:
//!
//! - *Fetches.* A thread takes a page before it reads the home, and keeps it until the answer is
//!   there. So once the home has changed and each page of the block was seen not to be fetched, by
//!   [`is_fetching_after_move`], nothing reads the slot. What a transport that was removed still
//!   receives is dropped.
//! - *Write-backs.* Those of the block were confirmed before it was copied, and later ones go to the
//!   new home ([`crate::pager::relocate`]).
//! - *Drops* of freed pages are posted by the evictor on the same transport as all writes to the slot
//!   that follow, which donors and transports keep in order for each page, also on a new connection.
//!
//! What is remembered of pages is not of slots: a fingerprint belongs to the page, whichever slot has
//! its bytes. The seal of a page is that of the last write to its place, with a nonce of its own. A
//! page of the next block is read only after it was written there, so its seal has replaced that of
//! the earlier block, whose bytes do not open any more.
//!
//! A slot to which a move was given up stays unused until the loan ends: a write may be on its way.
//!
//! [`is_fetching_after_move`]: crate::page_map::PageEntry::is_fetching_after_move

use super::super::Inner;
use crate::homes::Home;
use crate::page::{PageIndex, PageRange};
use crate::page_map::PageMap;
use crate::pager::relocate::{BlockMove, MoveProgress};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Deadline for pages that are being fetched from slots that blocks have left. The slots of those
/// that take longer are free for a later move.
const RECLAIM_TIME_MAX: Duration = Duration::from_millis(250);

/// Time between two looks at such pages: a fetch takes less. Nobody tells of its end, since that would
/// cost each fault.
const RECLAIM_PAUSE: Duration = Duration::from_millis(1);

/// Why a slot is not free.
#[derive(Debug)]
enum Spent {
    /// Its block is to move away.
    Leaving,
    /// Its block has left it. Of these pages it is not known that nothing reads them there.
    Left(Vec<PageIndex>),
    /// A move to it was given up.
    GivenUp,
}

/// The slots of all loans that are not free.
#[derive(Debug, Default)]
pub(in crate::fabric::hotplug) struct SpentSlots(HashMap<(usize, u32), Spent>);

impl SpentSlots {
    fn leaves(&mut self, link: usize, slot: u32) {
        self.0.insert((link, slot), Spent::Leaving);
    }

    /// The block, with these pages, has moved away.
    fn has_left(&mut self, link: usize, slot: u32, pages: PageRange, map: &PageMap) {
        // Few, if any.
        let read: Vec<PageIndex> = pages.iter().filter(|&page| is_read(map, page)).collect();
        match read.is_empty() {
            true => self.0.remove(&(link, slot)),
            false => self.0.insert((link, slot), Spent::Left(read)),
        };
    }

    /// The block stays.
    fn stays(&mut self, link: usize, slot: u32) {
        self.0.remove(&(link, slot));
    }

    fn give_up(&mut self, link: usize, slot: u32) {
        self.0.insert((link, slot), Spent::GivenUp);
    }

    /// Removes the slots that nothing reads any more. Returns whether others are left that blocks have
    /// left.
    fn reclaim(&mut self, map: &PageMap) -> bool {
        let mut some_are_read = false;
        self.0.retain(|_, spent| {
            let Spent::Left(pages) = spent else {
                return true;
            };
            pages.retain(|&page| is_read(map, page));
            some_are_read |= !pages.is_empty();
            !pages.is_empty()
        });
        some_are_read
    }

    /// Removes all slots of a loan that has ended.
    pub(super) fn forget(&mut self, link: usize) {
        self.0.retain(|&(of, _), _| of != link);
    }

    /// Returns the slots of a loan that are not free.
    pub(super) fn of(&self, link: usize) -> impl Iterator<Item = u32> {
        let all = self.0.keys();
        all.filter_map(move |&(of, slot)| (of == link).then_some(slot))
    }
}

impl Inner {
    fn link_and_slot(&self, home: Home) -> Option<(usize, u32)> {
        Some((self.shared.nodes.link_to(home.node)?, home.slot))
    }

    /// Records that blocks will leave their slots.
    pub(super) fn note_leaving(&self, moves: &[BlockMove]) {
        let mut spent = fabric_host::lock(&self.spent);
        for one in moves {
            if let Some((link, slot)) = self.link_and_slot(one.from) {
                spent.leaves(link, slot);
            }
        }
    }

    /// Records which blocks have moved, after the end of the order. Returns how many have not.
    pub(super) fn settle(&self, moves: &[BlockMove], progress: &MoveProgress) -> u32 {
        let homes = &self.shared.homes;
        let mut spent = fabric_host::lock(&self.spent);
        let mut stayed = 0;
        for &BlockMove { block, from, to } in moves {
            let has_moved = homes.home(block) == Some(to);
            if let Some((link, slot)) = self.link_and_slot(from) {
                match has_moved {
                    true => spent.has_left(link, slot, homes.pages_of(block), &self.shared.map),
                    false => spent.stays(link, slot),
                }
            }
            if has_moved {
                continue;
            }
            stayed += 1;
            if progress.was_given_up()
                && let Some((link, slot)) = self.link_and_slot(to)
            {
                // Writes to one of these slots may be on their way.
                spent.give_up(link, slot);
            }
        }
        stayed
    }

    /// Frees the slots that blocks have left, as far as their last fetches end soon.
    pub(super) fn reclaim_slots(&self) {
        let deadline = Instant::now() + RECLAIM_TIME_MAX;
        while fabric_host::lock(&self.spent).reclaim(&self.shared.map) && Instant::now() < deadline
        {
            std::thread::sleep(RECLAIM_PAUSE);
        }
    }
}

/// Returns whether a page of a block that has moved may be on its way from where it was.
fn is_read(map: &PageMap, page: PageIndex) -> bool {
    map.entry(page).is_fetching_after_move()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_free_when_no_page_of_the_block_that_left_is_fetched_and_not_before() {
        let map = PageMap::new(512).expect("small");
        let page = PageIndex::new(7);
        let entry = map.entry(page);
        assert!(entry.begin_install(entry.state()) && entry.list() && !entry.finish_install());
        assert!(entry.begin_probation() && entry.begin_drop(crate::page_map::Kind::Probation));
        let _ = entry.finish_drop(crate::page_map::Kind::Remote);
        assert!(entry.begin_fetch(entry.state()));
        let all = PageRange::new(PageIndex::new(0), 512);
        let mut spent = SpentSlots::default();
        spent.leaves(1, 5);
        spent.leaves(1, 6);
        spent.leaves(2, 5);
        spent.give_up(2, 9);
        assert!(!spent.reclaim(&map), "none has left");
        spent.has_left(1, 5, all, &map);
        spent.stays(1, 6);
        let others = PageRange::new(PageIndex::new(8), 504);
        spent.leaves(1, 8);
        spent.has_left(1, 8, others, &map);
        assert!(spent.reclaim(&map));
        assert!(spent.of(1).eq([5]), "page 7 is fetched");
        // Another fetch after that would read the new home.
        let _ = entry.abandon_fetch();
        assert!(!spent.reclaim(&map));
        assert_eq!(spent.of(1).count(), 0);
        assert_eq!(spent.of(2).count(), 2);
        spent.forget(2);
        assert_eq!(spent.of(2).count(), 0);
    }
}
