//! Pages that were read, and are not what was written: of a stripe, all pieces are asked for, and those
//! are looked for that give the page. A piece that differs from the page's is wrong, and its donor is
//! [counted](crate::ReplicaSet::note_wrong). So is the donor of a piece that was wrong the first time,
//! and does not come the second time before the page is found: it would not be found otherwise.
//!
//! The thread that rereads a page holds it, so no write-back of it is in progress, and all pieces that
//! may be read are of the last one: no donor is suspected for an old or a new version.

use super::{AskUnsure, Operation, ReplicatedTransport, Work, bit, page_in, split};
use crate::copies::Has;
use crate::member::Purpose;
use fabric_pages::page::PAGE_SIZE;
use fabric_transport::{Completion, Full, Ticket};
use std::time::{Duration, Instant};

/// Time for which a reread that could be decided waits for other pieces, so that the donor of a
/// wrong one is found also if it is not among the first.
pub(crate) const REREAD_WAIT: Duration = Duration::from_millis(50);

impl ReplicatedTransport {
    /// Posts a read that asks for all pieces; one of copies asks one that is not valid as well, where it
    /// is for a single page that can be checked.
    pub(super) fn post_any_reread(
        &mut self,
        ticket: Ticket,
        offset: u64,
        run: Option<u32>,
    ) -> Result<(), Full> {
        let work = Work::Read { run };
        let index = self.begin(ticket, work, offset)?;
        if run.is_none() && self.set.has_check() {
            self.operation(index).ask_unsure = AskUnsure::First;
        }
        if let Some(stripes) = &mut self.stripes {
            stripes.begin(index, true);
            let first = stripes.take_recent(offset, run);
            stripes.reads[index as usize].first = first;
            stripes.rereads += 1;
        }
        self.post_to_copy(index).inspect_err(|_| {
            self.end_reread(index);
        })
    }

    fn end_reread(&mut self, index: u32) -> Operation {
        if let Some(stripes) = &mut self.stripes {
            stripes.reads[index as usize].is_reread = false;
            stripes.rereads -= 1;
        }
        self.end(index)
    }

    /// Returns whether an operation is a reread of a stripe.
    pub(super) fn is_reread(&self, index: usize) -> bool {
        let is_read = self.operations[index].is_some_and(|operation| operation.is_read());
        let read = self.stripes.as_ref().and_then(|all| all.reads.get(index));
        is_read && read.is_some_and(|read| read.is_reread)
    }

    /// Completes the rereads whose pages are found, or of which nothing else can arrive.
    pub(super) fn decide_rereads(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        if self.stripes.as_ref().is_none_or(|all| all.rereads == 0) {
            return;
        }
        let now = Instant::now();
        for index in 0..self.operations.len() {
            if self.is_reread(index) {
                let index = u32::try_from(index).expect("a few operations");
                self.decide_reread(index, now, complete);
            }
        }
    }

    fn decide_reread(
        &mut self,
        index: u32,
        now: Instant,
        complete: &mut dyn FnMut(Completion<'_>),
    ) {
        let Operation {
            offset,
            waits_for,
            since,
            ..
        } = *self.operation(index);
        let Some(stripes) = &mut self.stripes else {
            return;
        };
        let layout = stripes.layout;
        let read = &mut stripes.reads[index as usize];
        let arrived = read.gather.arrived();
        let waits = waits_for != 0 && now.saturating_duration_since(since) < REREAD_WAIT;
        if waits || (arrived.count_ones() as usize) < layout.data() {
            return;
        }
        if read.tried != arrived {
            read.tried = arrived;
            let set = &self.set;
            let is_genuine = |page: usize, bytes: &mut _| {
                set.is_genuine(offset + (page * PAGE_SIZE) as u64, bytes) == Some(true)
            };
            let found = read.gather.search(layout, &mut stripes.trial, &is_genuine);
            if let Some(wrong) = found {
                let (donors, unsure) = (read.donors, read.unsure);
                let of = |bits: u16| (0..layout.pieces()).filter(move |at| bits >> at & 1 == 1);
                for at in of(wrong.pieces & !unsure) {
                    let page = offset + (wrong.pages[at] * PAGE_SIZE) as u64;
                    set.note_wrong(donors[at], page);
                }
                if let Some(first) = read.first.take() {
                    let wrong = first
                        .gather
                        .differing(layout, &mut stripes.trial, &read.gather);
                    // One that is right now may have been changed on its way.
                    for at in of(wrong.pieces & !arrived) {
                        let page = offset + (wrong.pages[at] * PAGE_SIZE) as u64;
                        set.note_wrong(first.donors[at], page);
                    }
                }
                let right = of(arrived & !wrong.pieces)
                    .next()
                    .map_or(0, |at| donors[at]);
                self.complete_reread(index, right.into(), complete);
                return;
            }
        }
        // Those whose donors had no room, or were out, and those that may have missed write-backs.
        // Without room it is tried again.
        let _ = self.post_to_pieces(index);
        if self.operation(index).waits_for == 0 && !self.can_ask_more(index) {
            // Too few pieces are right. The caller decides what follows.
            let donor = self.stripes.as_ref().map_or(0, |all| {
                let at = arrived.trailing_zeros() as usize;
                all.reads[index as usize].donors[at]
            });
            self.complete_reread(index, donor.into(), complete);
        }
    }

    /// Returns whether a piece of a reread can be asked for later, when its donor has room.
    fn can_ask_more(&mut self, index: u32) -> bool {
        let Operation { offset, work, .. } = *self.operation(index);
        let (block, in_block) = split(offset);
        let run = match work {
            Work::Read { run } => run,
            _ => None,
        };
        let Some(stripes) = &self.stripes else {
            return false;
        };
        let read = &stripes.reads[index as usize];
        let (arrived, asks_unsure) = (read.gather.arrived(), read.asks_unsure(run));
        let copies = self.set.copies();
        let mut left = (0..stripes.layout.pieces()).filter(|at| arrived >> at & 1 == 0);
        let (first, pages) = (page_in(in_block), run.unwrap_or(1));
        let has_gap = copies.has_gap(block, first, pages);
        left.any(|at| {
            let source = copies.source_at(block, at, first, pages);
            source.is_some_and(|(place, has)| {
                let is_asked = match has {
                    Has::All => true,
                    Has::Perhaps => has_gap || asks_unsure,
                    Has::NotAll => has_gap,
                };
                is_asked && !self.members[usize::from(place.donor)].out
            })
        })
    }

    /// Completes a reread with the pages that it has. What is still outstanding is not used.
    fn complete_reread(
        &mut self,
        index: u32,
        donor: usize,
        complete: &mut dyn FnMut(Completion<'_>),
    ) {
        let waits_for = self.operation(index).waits_for;
        for (other, member) in (0..=u8::MAX).zip(&mut self.members) {
            if waits_for & bit(other) != 0 {
                member.abandon(|purpose| purpose == Purpose::Operation(index));
            }
        }
        let Operation { ticket, work, .. } = self.end_reread(index);
        let Some(stripes) = &mut self.stripes else {
            return;
        };
        let pages = stripes.reads[index as usize].gather.pages(stripes.layout);
        match (work, pages.try_into()) {
            (Work::Read { run: None }, Ok(page)) => {
                complete(Completion::ReadFrom(donor, ticket, page));
            }
            _ => complete(Completion::ReadRunFrom(donor, ticket, pages)),
        }
    }
}
