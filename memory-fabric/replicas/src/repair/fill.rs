//! The pages of the block that is being filled, from the valid copy to the new one.

use super::{COPYING_MAX, Copying, Current, Phase, in_block};
use crate::copies::Repair;
use crate::gather::Gather;
use crate::member::Purpose;
use crate::placement::Place;
use crate::stripe::Layout;
use crate::transport::{ReplicatedTransport, offset_at};
use fabric_homes::{BLOCK_BYTES, BLOCK_PAGES};
use std::time::Instant;

impl ReplicatedTransport {
    pub(super) fn write_arrived(&mut self) {
        let Some(current) = &mut self.repairs.current else {
            return;
        };
        let split = self.repairs.layout.map_or(1, Layout::data);
        let Repair { to, is_empty, .. } = current.repair;
        let member = &mut self.members[usize::from(to.donor)];
        current.copying.retain_mut(|copying| {
            let Phase::Arrived(bytes) = &copying.phase else {
                return true;
            };
            if is_empty && bytes.iter().all(|byte| *byte == 0) {
                return false;
            }
            let offset = offset_at(to, in_block(copying.page), split);
            let purpose = Purpose::CopyWrite(copying.page);
            // That of an earlier repair of this page comes first.
            let may_write = member.has_room() && !member.is_copying(offset);
            if may_write && member.write(purpose, offset, bytes).is_ok() {
                copying.phase = Phase::Writing;
            }
            true
        });
    }

    /// Asks for the other pieces of pages that those which were read do not give.
    pub(super) fn read_more(&mut self) {
        let (Some(current), Some(layout)) = (&mut self.repairs.current, self.repairs.layout) else {
            return;
        };
        let lacks = |copying: &Copying| matches!(copying.phase, Phase::Reading { lacks: true, .. });
        if !current.copying.iter().any(lacks) {
            return;
        }
        let (copies, repair, sources) = (self.set.copies(), current.repair, &mut current.sources);
        for at in (0..copies.width()).filter(|&at| at != repair.at) {
            let place = copies.readable_at(repair.block, at);
            if sources.iter().all(|&(other, _)| other != at) {
                sources.extend(place.map(|place| (at, place)));
            }
        }
        for copying in &mut current.copying {
            let page = copying.page;
            let Phase::Reading {
                gather,
                asked,
                lacks: lacks @ true,
                again,
                ..
            } = &mut copying.phase
            else {
                continue;
            };
            if sources.iter().all(|(at, _)| *asked >> at & 1 == 1) {
                if *again {
                    // Too few pieces are right, so that the page is lost.
                    copying.phase = Phase::Arrived(gather.piece(layout, repair.at));
                    continue;
                }
                // Bits flip on their way.
                gather.clear();
                (*asked, *again) = (0, true);
            }
            let asked_before = *asked;
            let left = sources.iter().filter(|(at, _)| asked_before >> at & 1 == 0);
            let members = &mut self.members;
            if !left
                .clone()
                .all(|(_, place)| members[usize::from(place.donor)].has_room())
            {
                continue;
            }
            let mut bits = 0;
            for &(at, place) in left {
                let offset = offset_at(place, in_block(page), layout.data());
                let member = &mut members[usize::from(place.donor)];
                let posted = member.read_pieces(Purpose::CopyRead(page), offset, layout.unit());
                posted.expect("room was seen");
                bits |= 1 << at;
            }
            *asked |= bits;
            *lacks = false;
        }
    }

    pub(super) fn read_next(&mut self) {
        let now = Instant::now();
        loop {
            let Some(current) = &self.repairs.current else {
                return;
            };
            let (repair, page) = (&current.repair, current.next);
            let at = u64::from(repair.block) * BLOCK_BYTES + in_block(page);
            let layout = self.repairs.layout;
            let has_room =
                |(_, place): &(usize, Place)| self.members[usize::from(place.donor)].has_room();
            if page == BLOCK_PAGES
                || current.copying.len() >= COPYING_MAX
                || !current.sources.iter().all(has_room)
                || self.is_being_written(at)
                || !self.repairs.may_copy(now)
            {
                return;
            }
            let purpose = Purpose::CopyRead(page);
            let Some(current) = &mut self.repairs.current else {
                return;
            };
            for &(_, place) in &current.sources {
                let member = &mut self.members[usize::from(place.donor)];
                let split = layout.map_or(1, Layout::data);
                let offset = offset_at(place, in_block(page), split);
                let posted = match layout {
                    None => member.read(purpose, offset, None),
                    Some(layout) => member.read_pieces(purpose, offset, layout.unit()),
                };
                posted.expect("room was seen");
            }
            current.next += 1;
            current.copying.push(Copying {
                page,
                phase: Phase::Reading {
                    superseded: false,
                    gather: Gather::default(),
                    asked: current
                        .sources
                        .iter()
                        .fold(0, |bits, (at, _)| bits | 1 << at),
                    lacks: false,
                    again: false,
                },
            });
        }
    }

    /// Ends the repair of a block that is complete; false when it is not.
    pub(super) fn end_block(&mut self) -> bool {
        let repairs = &mut self.repairs;
        let is_complete =
            |current: &Current| current.next == BLOCK_PAGES && current.copying.is_empty();
        if !repairs.current.as_ref().is_some_and(is_complete) || !repairs.held.is_empty() {
            return false;
        }
        let Some(Current {
            repair,
            is_move,
            sources,
            ..
        }) = repairs.current.take()
        else {
            return true;
        };
        let copies = self.set.copies();
        match is_move {
            false if copies.end_repair(&repair, &sources) => {
                repairs.has_repaired = true;
                self.set.repaired_blocks.increment();
            }
            true if copies.end_move(&repair) => self.set.note_moved(),
            // Its donor went out, which has not been seen here yet.
            true => self.set.give_up_move(&repair),
            false => {}
        }
        true
    }

    /// Posts write-backs whose copies are confirmed.
    pub(super) fn release_held(&mut self) {
        let mut held = std::mem::take(&mut self.repairs.held);
        held.retain(|held| {
            let member = &mut self.members[usize::from(held.place.donor)];
            let split = self.repairs.layout.map_or(1, Layout::data);
            let offset = offset_at(held.place, held.in_block, split);
            let purpose = Purpose::Operation(held.operation);
            member.is_copying(offset)
                || !member.has_room()
                || member.write(purpose, offset, &held.bytes).is_err()
        });
        self.repairs.held = held;
    }
}
