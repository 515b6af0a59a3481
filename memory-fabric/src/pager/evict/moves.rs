//! Blocks that move to another donor: the evictor's part.

use super::Evictor;
use crate::homes::HomeTable;
use crate::page::{PageBytes, PageIndex};
use crate::page_map::{Kind, PageMap};
use crate::pager::relocate::{AtHome, Pages, Relocation};
use crate::transport::Ticket;
use std::sync::Arc;

/// What the state machine has to know of the pages.
struct View<'a> {
    writing: &'a [Option<(PageIndex, usize)>],
    map: &'a PageMap,
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
}

impl Evictor {
    /// Moves blocks as far as possible without waiting; returns true when there was work.
    pub(super) fn move_blocks(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        if shared.lifecycle.is_stopping() {
            return false;
        }
        if let Some(order) = self.inbox.next_moves() {
            self.relocation.take(order);
            for link in shared.losses.links() {
                self.relocation.leave(link, &shared.homes);
            }
        }
        let pages = View {
            writing: &self.writing,
            map: &shared.map,
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
