//! Which copies are asked for pages.
//!
//! A copy that is not valid may have missed write-backs, which only the check of a page shows. It is
//! asked for a single page that the valid ones lack, or whose only valid copy did not open.

use super::{AskUnsure, Operation, Place, ReplicatedTransport, bit, offset_at, page_in, split};
use crate::copies::Has;
use crate::member::Purpose;
use fabric_transport::Full;

impl ReplicatedTransport {
    /// Returns the places to read pages of a block from, the better one first.
    ///
    /// A copy that lacks a page is not asked while another has it, however long that takes. A single
    /// page that all valid copies lack is asked of one that is not, whose page its check accepts or not.
    /// A run does not open if all copies lack a page of it: its pages are then read one by one.
    pub(super) fn sources(&self, block: u32, first: u32, pages: u32) -> [Option<Place>; 2] {
        let copies = self.set.copies();
        if copies.has_gap(block, first, pages) {
            let all = [0, 1].map(|at| copies.source_at(block, at, first, pages));
            let wanted = match pages {
                1 => &[Has::All, Has::Perhaps][..],
                _ => &[Has::All],
            };
            for &wanted in wanted {
                let is_usable = |&(place, has): &(Place, Has)| {
                    has == wanted && !self.members[usize::from(place.donor)].out
                };
                let found = all.map(|source| source.filter(is_usable).map(|(place, _)| place));
                if found != [None; 2] {
                    return found;
                }
            }
        }
        let places = copies.readable(block);
        let latency = |place: Option<Place>| {
            let member = self.members.get(usize::from(place?.donor))?;
            member.latency()
        };
        match (latency(places[0]), latency(places[1])) {
            // A margin for noise, so that links of equal speed share the load.
            (Some(primary), Some(other)) if other * 2 < primary => [places[1], places[0]],
            _ => places,
        }
    }

    /// Posts the reread of a single page to a copy that is not valid, where only one other copy is: what
    /// came from that one did not open, and its next answer decides whether the page is lost. So the copy
    /// that may have missed write-backs is asked before it. `None` without such a copy, and if its donor
    /// has no room the first time: then the valid one is asked, which does not decide yet.
    ///
    /// # Errors
    ///
    /// When its donor has no room again.
    pub(super) fn post_to_unsure(&mut self, index: u32) -> Option<Result<(), Full>> {
        let Operation {
            offset, ask_unsure, ..
        } = *self.operation(index);
        if ask_unsure == AskUnsure::No {
            return None;
        }
        let posted = self.place_unsure(offset).map(|(place, in_block)| {
            let member = &mut self.members[usize::from(place.donor)];
            let purpose = Purpose::Operation(index);
            let posted = member.read(purpose, offset_at(place, in_block, 1), None);
            posted.map(|()| bit(place.donor))
        });
        let operation = self.operation(index);
        if let Some(Ok(donor)) = posted {
            operation.unsure = donor;
            operation.waits_for |= donor;
        }
        operation.ask_unsure = match posted {
            Some(Err(_)) => AskUnsure::Later,
            _ => AskUnsure::No,
        };
        match posted {
            Some(Err(Full)) if ask_unsure == AskUnsure::First => None,
            posted => posted.map(|posted| posted.map(drop)),
        }
    }

    /// Returns the place of the only copy of a page that is not valid, beside a valid one.
    fn place_unsure(&self, offset: u64) -> Option<(Place, u64)> {
        let (block, in_block) = split(offset);
        let copies = self.set.copies();
        let all = [0, 1].map(|at| copies.source_at(block, at, page_in(in_block), 1));
        let place = match all {
            [Some((_, Has::All)), Some((place, Has::Perhaps))]
            | [Some((place, Has::Perhaps)), Some((_, Has::All))] => place,
            _ => return None,
        };
        let is_out = self.members[usize::from(place.donor)].out;
        (!is_out).then_some((place, in_block))
    }
}
