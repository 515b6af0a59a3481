//! The pages of the block that is being filled, from the valid copy to the new one.

use super::{COPYING_MAX, Copying, Current, Phase, in_block};
use crate::copies::{Has, Repair};
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
        let copies = self.set.copies();
        let Repair { to, is_empty, .. } = current.repair;
        let member = &mut self.members[usize::from(to.donor)];
        current.copying.retain_mut(|copying| {
            let Phase::Arrived(bytes) = &copying.phase else {
                return true;
            };
            if is_empty && bytes.iter().all(|byte| *byte == 0) {
                copies.fill_holes(to, copying.page, 1);
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

    /// Reads pages again, and then elsewhere, that were wrong.
    pub(super) fn read_more(&mut self) {
        let lacks = |copying: &Copying| matches!(copying.phase, Phase::Reading { lacks: true, .. });
        let current = self.repairs.current.as_ref();
        if current.is_some_and(|current| current.copying.iter().any(lacks)) {
            match self.repairs.layout {
                Some(layout) => self.read_all_pieces(layout),
                None => self.read_other_copy(),
            }
        }
    }

    /// Reads a page of a copy again, then twice that of the other one: a valid one, one that a move takes
    /// pages from although it is not, or what the new copy has of before.
    fn read_other_copy(&mut self) {
        let Some(Current {
            repair,
            sources,
            unsure,
            copying,
            ..
        }) = &mut self.repairs.current
        else {
            return;
        };
        let (copies, members) = (self.set.copies(), &mut self.members);
        copying.retain_mut(|copying| {
            let page = copying.page;
            let Phase::Reading {
                lacks: lacks @ true,
                attempts,
                ..
            } = &mut copying.phase
            else {
                return true;
            };
            let (first_at, first) = sources[0];
            let other = || copies.source_at(repair.block, 1 - first_at, page, 1);
            let place = match *attempts {
                1 => Some(first),
                2 | 3 => match other() {
                    Some((place, Has::All)) => {
                        let known = Some(place).filter(|_| sources.len() == 1);
                        sources.extend(known.map(|place| (1 - first_at, place)));
                        Some(place)
                    }
                    Some((place, Has::Perhaps)) => {
                        *unsure |= 1 << place.donor;
                        Some(place)
                    }
                    _ => None,
                },
                _ => None,
            };
            let Some(place) = place else {
                copies.add_hole(repair.to, page);
                return false;
            };
            let member = &mut members[usize::from(place.donor)];
            let offset = offset_at(place, in_block(page), 1);
            let has_room = member.has_room() && !member.is_copying(offset);
            let posted = has_room && member.read(Purpose::CopyRead(page), offset, None).is_ok();
            *lacks = !posted;
            true
        });
    }

    /// Asks for the other pieces of pages that those which were read do not give, then for all once
    /// more, with those that are not valid and may have missed the page.
    fn read_all_pieces(&mut self, layout: Layout) {
        let Some(current) = &mut self.repairs.current else {
            return;
        };
        let (copies, repair, sources) = (self.set.copies(), current.repair, &mut current.sources);
        let unsure = &mut current.unsure;
        for at in (0..copies.width()).filter(|&at| at != repair.at || current.is_move) {
            let place = copies.readable_at(repair.block, at);
            if sources.iter().all(|&(other, _)| other != at) {
                sources.extend(place.map(|place| (at, place)));
            }
        }
        let members = &mut self.members;
        current.copying.retain_mut(|copying| {
            let page = copying.page;
            let Phase::Reading {
                gather,
                asked,
                lacks: lacks @ true,
                attempts,
                ..
            } = &mut copying.phase
            else {
                return true;
            };
            if sources.iter().all(|(at, _)| *asked >> at & 1 == 1) {
                if *attempts > 0 {
                    // Too few pieces are right: a piece that is made of them would be wrong.
                    copies.add_hole(repair.to, page);
                    return false;
                }
                // Bits flip on their way.
                gather.clear();
                (*asked, *attempts) = (0, 1);
            }
            let asked_before = *asked;
            let perhaps = (0..copies.width()).filter_map(|at| {
                let (place, has) = copies.source_at(repair.block, at, page, 1)?;
                (*attempts > 0 && has == Has::Perhaps).then_some((at, place))
            });
            let perhaps: Vec<_> = perhaps.collect();
            let all = sources.iter().chain(&perhaps);
            let left = all.filter(|(at, _)| asked_before >> at & 1 == 0);
            let has_room =
                |(_, place): &(usize, Place)| members[usize::from(place.donor)].has_room();
            if !left.clone().all(has_room) {
                return true;
            }
            for (_, place) in &perhaps {
                *unsure |= 1 << place.donor;
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
            true
        });
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
            // The second of copies is for what is wrong in the first.
            let asked = layout.map_or(1, |_| current.sources.len());
            if page == BLOCK_PAGES
                || current.copying.len() >= COPYING_MAX
                || !current.sources[..asked].iter().all(has_room)
                || self.is_being_written(at)
                || !self.repairs.may_copy(now)
            {
                return;
            }
            let purpose = Purpose::CopyRead(page);
            let Some(current) = &mut self.repairs.current else {
                return;
            };
            for &(_, place) in &current.sources[..asked] {
                let member = &mut self.members[usize::from(place.donor)];
                let split = layout.map_or(1, Layout::data);
                let offset = offset_at(place, in_block(page), split);
                let posted = match layout {
                    None => member.read(purpose, offset, None),
                    Some(layout) => member.read_pieces(purpose, offset, layout.unit()),
                };
                posted.expect("room was seen");
            }
            current.next = current.pages.next_from(page + 1);
            current.copying.push(Copying {
                page,
                phase: Phase::Reading {
                    superseded: false,
                    gather: Gather::default(),
                    asked: current.sources[..asked]
                        .iter()
                        .fold(0, |bits, (at, _)| bits | 1 << at),
                    lacks: false,
                    attempts: 0,
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
                self.set.report_lost(repair.block..repair.block + 1);
            }
            // Both were wrong when they were read, which may be different the next time.
            true if copies.would_lose(&repair) => self.set.leave_unmoved(&repair),
            true if copies.end_move(&repair, &sources) => self.set.note_moved(),
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
