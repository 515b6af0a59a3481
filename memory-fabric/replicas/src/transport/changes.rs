//! Write-backs, and drops of pages: they go to all copies of a block, or all pieces.

use super::striped::whole_pages;
use super::{ReplicatedTransport, Role, Stripes, Work, bit, offset_at, page_in, split};
use crate::member::Purpose;
use crate::placement::Place;
use crate::stripe::PIECES_MAX;
use fabric_pages::page::PageBytes;
use fabric_transport::{Full, Ticket};

impl ReplicatedTransport {
    /// Posts to both copies what changes them, or to none.
    pub(super) fn post_change(
        &mut self,
        ticket: Ticket,
        work: Work,
        offset: u64,
        page: Option<&PageBytes>,
    ) -> Result<(), Full> {
        debug_assert_eq!(self.role, Role::Evictor);
        let (block, in_block) = split(offset);
        let copies = self.set.copies();
        let split = self.stripes.as_ref().map_or(1, Stripes::split);
        if let Work::Drop { pages } = work
            && whole_pages(in_block, pages, split).is_none()
        {
            // The donors' pages have pieces of others as well. Nobody waits for a drop.
            self.note_dropped(block, in_block, pages);
            return Ok(());
        }
        let mut places = [None; PIECES_MAX + 1];
        for (at, place) in places.iter_mut().enumerate().take(copies.width()) {
            *place = copies.writable_at(block, at).map(|place| (at, place));
        }
        places[copies.width()] = self.repairs.third_place(block);
        let targets = || places.into_iter().flatten();
        let has_room = |(_, place): (usize, Place)| {
            let member = &self.members[usize::from(place.donor)];
            member.has_room()
        };
        if !targets().all(has_room) {
            return Err(Full);
        }
        let index = self.begin(ticket, work, offset)?;
        match work {
            Work::Drop { pages } => self.note_dropped(block, in_block, pages),
            _ => {
                self.repairs.note_written(block, in_block);
                let copies = self.set.copies();
                copies.forget_lost(block, page_in(in_block), 1);
                let without = (0..copies.width()).filter(|&at| places[at].is_none());
                without.for_each(|at| copies.note_missed(block, at, page_in(in_block)));
            }
        }
        let copies = self.set.copies();
        let mut waits_for = 0;
        if let (Some(stripes), Some(page)) = (&mut self.stripes, page) {
            stripes.encode(page);
        }
        for (number, place) in targets() {
            let purpose = Purpose::Operation(index);
            let donor = usize::from(place.donor);
            let member = &mut self.members[donor];
            let pieces = self.stripes.as_ref();
            if page.is_some() {
                copies.fill_holes(place, page_in(in_block), 1);
            }
            let posted = match (work, page) {
                (Work::Drop { pages }, _) => {
                    let Some((first, pages)) = whole_pages(in_block, pages, split) else {
                        continue;
                    };
                    let at = offset_at(place, 0, split) + first;
                    member.drop_pages(purpose, at, pages)
                }
                (_, Some(page)) => {
                    let bytes = pieces.map_or(page.as_slice(), |all| all.piece(page, number));
                    let at = offset_at(place, in_block, split);
                    if member.is_copying(&(at..at + bytes.len() as u64)) {
                        self.repairs.hold(index, place, in_block, bytes);
                        Ok(())
                    } else {
                        member.write(purpose, at, bytes)
                    }
                }
                _ => unreachable!("a write has a page"),
            };
            posted.expect("room was seen");
            waits_for |= bit(place.donor);
        }
        self.operation(index).waits_for = waits_for;
        if waits_for == 0 {
            // No donor is left for it.
            self.unposted.push_back(index);
        }
        Ok(())
    }

    /// Notes that pages are dropped, whether donors forget them or not: none is missing anywhere.
    fn note_dropped(&mut self, block: u32, in_block: u64, pages: u32) {
        self.repairs.note_dropped(block, page_in(in_block), pages);
        let (copies, first) = (self.set.copies(), page_in(in_block));
        copies.forget_pages(block, first, pages);
        if let Some((_, place)) = self.repairs.third_place(block) {
            copies.fill_holes(place, first, pages);
        }
    }
}
