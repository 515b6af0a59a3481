//! Blocks that move to another donor: the evictor's part.

use super::Evictor;
use crate::homes::{Home, HomeTable};
use crate::page::{PageBytes, PageIndex};
use crate::page_map::{Kind, PageMap};
use crate::pager::losses::Losses;
use crate::pager::relocate::{AtHome, Pages, Relocation};
use crate::transport::Ticket;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// What the state machine has to know of the pages.
struct View<'a> {
    writing: &'a [Option<(PageIndex, usize)>],
    map: &'a PageMap,
    homes: &'a HomeTable,
    losses: &'a Losses,
}

impl Pages for View<'_> {
    fn is_being_written(&self, block: u32) -> bool {
        let mut writing = self.writing.iter().flatten();
        writing.any(|&(page, _)| HomeTable::block_of(page) == block)
    }

    fn at_home(&self, page: PageIndex) -> AtHome {
        let seen = self.map.entry(page).state();
        match seen.kind() {
            Kind::Untouched | Kind::Lost => AtHome::No,
            // A page that was fetched or sent has a fingerprint, or is clean. Without a slot for
            // its fingerprint it is written back in any case once it is dirty.
            Kind::Resident | Kind::Probation | Kind::WritingBack
                if seen.is_dirty() && seen.fingerprint().is_none() =>
            {
                AtHome::No
            }
            Kind::Installing | Kind::Dropping => AtHome::Unknown,
            Kind::Resident
            | Kind::Probation
            | Kind::WritingBack
            | Kind::Remote
            | Kind::Fetching => AtHome::Yes,
        }
    }

    fn has_moved(&self, block: u32, to: Home) {
        mark_if_lost(self.homes, self.losses, block, to);
    }
}

/// Marks a block that has moved to a donor which was lost meanwhile: who marked the blocks there may
/// not have seen it.
fn mark_if_lost(homes: &HomeTable, losses: &Losses, block: u32, to: Home) {
    // Pairs with that of `Losses::set_lost`: this finds the loss, or the other finds the home.
    fence(Ordering::SeqCst);
    if losses.is_lost(homes.link_to_home(to)) {
        homes.set_lost(block, to.node);
    }
}

impl Evictor {
    fn take_moves(&mut self) {
        if let Some(order) = self.inbox.next_moves() {
            self.relocation.take(order);
        }
    }

    /// Gives up moves that involve a donor whose transport has changed, also those that were ordered
    /// before and not begun.
    pub(super) fn give_up_moves(&mut self, link: usize) {
        self.take_moves();
        self.relocation.leave(link, &self.shared.homes);
    }

    /// Moves blocks as far as possible without waiting; returns true when there was work.
    pub(super) fn move_blocks(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        if shared.lifecycle.is_stopping() {
            return false;
        }
        self.take_moves();
        if self.relocation.is_idle() {
            return false;
        }
        // Also before its transports are removed: a block is better where it is than at a lost donor.
        for link in shared.losses.links() {
            self.relocation.leave(link, &shared.homes);
        }
        let pages = View {
            writing: &self.writing,
            map: &shared.map,
            homes: &shared.homes,
            losses: &shared.losses,
        };
        self.relocation
            .step(&shared.homes, &mut self.transports, &pages)
    }

    /// Takes a page that was read from its old home.
    pub(super) fn read_to_move(&mut self, link: usize, ticket: Ticket, bytes: &PageBytes) {
        debug_assert!(Relocation::is_for_move(ticket));
        self.shared.stats.donors[link].pages_fetched.increment();
        self.relocation.read(ticket, bytes);
    }

    /// Notes that a page was written to its new home.
    pub(super) fn moved_page(&mut self, link: usize, ticket: Ticket) {
        let donor = &self.shared.stats.donors[link];
        donor.pages_written_back.increment();
        self.relocation.written(ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::homes::{BLOCK_PAGES, NodeId};
    use crate::page::PageRange;
    use crate::pager::relocate::{BlockMove, MoveOrder};
    use crate::pager::testing;
    use crate::transport::vacant::Vacant;
    use crossbeam_channel::bounded;

    #[test]
    fn an_order_from_before_a_donor_left_has_no_moves_to_it() {
        let ram = PageRange::new(PageIndex::new(0), BLOCK_PAGES);
        let homes = HomeTable::new(NodeId(0), &[ram], None);
        let (shared, inboxes) = testing::shared(homes, 64, 2);
        let home = |link| Home {
            node: shared.nodes.node_at(link),
            slot: 0,
        };
        let (from, to) = (home(0), home(1));
        shared.homes.assign(0, from);
        let transports = vec![Box::new(Vacant) as Box<_>, Box::new(Vacant) as Box<_>];
        let mut evictor = Evictor::new(Arc::clone(&shared), transports, inboxes.evictor);
        let (end, ended) = bounded(1);
        let order = MoveOrder {
            moves: [BlockMove { block: 0, from, to }].into(),
            progress: Arc::default(),
            end,
        };
        assert!(shared.evictor.move_blocks(order));
        evictor.give_up_moves(1);
        evictor.move_blocks();
        assert_eq!(ended.try_recv(), Ok(()), "nothing is left to move");
        assert_eq!(shared.homes.home(0), Some(from));
    }

    #[test]
    fn a_block_that_arrives_at_a_lost_donor_is_marked_and_another_is_not() {
        let ram = PageRange::new(PageIndex::new(0), 2 * BLOCK_PAGES);
        let nodes = [NodeId(1), NodeId(2), NodeId(3)];
        let homes = HomeTable::new(NodeId(0), &[ram], None).with_links(&nodes);
        let losses = Losses::new(3);
        losses.set_lost(1);
        let old = [0, 1].map(|slot| Home {
            node: nodes[0],
            slot,
        });
        for (block, from, link) in [(0, old[0], 1), (1, old[1], 2)] {
            homes.assign(block, from);
            let to = Home {
                node: nodes[link],
                slot: 0,
            };
            homes.move_home(block, from, to);
            mark_if_lost(&homes, &losses, block, to);
            let page = PageIndex::new(block * BLOCK_PAGES);
            assert_eq!(homes.is_lost(page), link == 1, "link {link}");
        }
    }
}
