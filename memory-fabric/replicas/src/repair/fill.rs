//! The pages of the block that is being filled, from the valid copy to the new one.

use super::{Copying, Current, Phase, Repairs, in_block};
use crate::copies::{Has, Repair};
use crate::gather::Gather;
use crate::member::{Purpose, REPAIR_REQUESTS_MAX};
use crate::placement::Place;
use crate::stripe::Layout;
use crate::transport::{ReplicatedTransport, offset_at};
use fabric_homes::{BLOCK_BYTES, BLOCK_PAGES};
use fabric_pages::page::PAGE_SIZE;
use std::time::Instant;

/// Returns how many of the first pages have arrived and can be written at once: all whose pieces are in
/// one page of a donor, or one.
fn arrived_together(copying: &[Copying], split: usize) -> usize {
    let has_arrived = |copying: &Copying| copying.arrived().is_some();
    let first = copying[0].page;
    let group = copying
        .get(..split)
        .filter(|_| (first as usize).is_multiple_of(split));
    let is_whole = |group: &[Copying]| {
        let mut all = group.iter().zip(first..);
        all.all(|(copying, page)| copying.page == page && has_arrived(copying))
    };
    match group.is_some_and(is_whole) {
        true => split,
        false => usize::from(has_arrived(&copying[0])),
    }
}

impl ReplicatedTransport {
    /// Writes what has arrived: the pieces of consecutive pages that are a page of the donor at once, as
    /// they were read.
    pub(super) fn write_arrived(&mut self) {
        let Repairs {
            current,
            layout,
            checked: together,
            ..
        } = &mut self.repairs;
        let Some(Current {
            repair, copying, ..
        }) = current
        else {
            return;
        };
        let (copies, split) = (self.set.copies(), layout.map_or(1, Layout::data));
        let Repair { to, is_empty, .. } = *repair;
        let member = &mut self.members[usize::from(to.donor)];
        let is_zero = |copying: &Copying| {
            let mut bytes = copying.arrived().into_iter().flatten();
            bytes.all(|byte| *byte == 0)
        };
        let mut at = 0;
        while at < copying.len() {
            let count = arrived_together(&copying[at..], split);
            let group = &mut copying[at..at + count];
            let Some(&Copying { page: first, .. }) = group.first() else {
                at += 1;
                continue;
            };
            let pages = u32::try_from(count).expect("at most 8");
            if is_empty && group.iter().all(is_zero) {
                copies.fill_holes(to, first, pages);
                copying.drain(at..at + count);
                continue;
            }
            at += count;
            let together = &mut together[..count * (PAGE_SIZE / split)];
            let offset = offset_at(to, in_block(first), split);
            // That of an earlier repair of this page comes first.
            let is_copying = member.is_copying(&(offset..offset + together.len() as u64));
            if is_copying || !member.has_room_for_repair_write() {
                continue;
            }
            let targets = together.chunks_exact_mut(PAGE_SIZE / split);
            for (copying, target) in group.iter().zip(targets) {
                target.copy_from_slice(copying.arrived().unwrap_or_default());
            }
            let purpose = Purpose::CopyWrite { page: first, pages };
            if member.write(purpose, offset, together).is_ok() {
                for copying in group {
                    copying.phase = Phase::Writing;
                }
            }
        }
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
            let bytes = offset..offset + PAGE_SIZE as u64;
            let has_room = member.has_room_for_repair_read() && !member.is_copying(&bytes);
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
            let has_room = |(_, place): &(usize, Place)| {
                members[usize::from(place.donor)].has_room_for_repair_read()
            };
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
            let (first, layout) = (current.next, self.repairs.layout);
            let has_room = |(_, place): &(usize, Place)| {
                self.members[usize::from(place.donor)].has_room_for_repair_read()
            };
            // The second of copies is for what is wrong in the first.
            let asked = layout.map_or(1, |_| current.sources.len());
            let run = self.next_run(current);
            if run == 0
                || !current.sources[..asked].iter().all(has_room)
                || !self.repairs.may_copy(now, run)
            {
                return;
            }
            let Some(current) = &mut self.repairs.current else {
                return;
            };
            let purpose = Purpose::CopyRead(first);
            for &(_, place) in &current.sources[..asked] {
                let member = &mut self.members[usize::from(place.donor)];
                let split = layout.map_or(1, Layout::data);
                let offset = offset_at(place, in_block(first), split);
                let posted = match layout {
                    None => member.read(purpose, offset, None),
                    Some(layout) => {
                        member.read_pieces(purpose, offset, layout.unit() * run as usize)
                    }
                };
                posted.expect("room was seen");
            }
            let asked = current.sources[..asked].iter();
            let asked = asked.fold(0, |bits, (at, _)| bits | 1 << at);
            current.next = current.pages.next_from(first + run);
            let all = (first..first + run).map(|page| Copying {
                page,
                phase: Phase::Reading {
                    superseded: false,
                    gather: Gather::default(),
                    asked,
                    lacks: false,
                    attempts: 0,
                },
            });
            current.copying.extend(all);
        }
    }

    /// Returns how many pages from the next one on can be read by one request to each donor: of stripes
    /// those whose pieces are in one page of a donor. None while the next one is being written back, or
    /// too many others are copied.
    fn next_run(&self, current: &Current) -> u32 {
        let split = self.repairs.layout.map_or(1, Layout::data);
        let split = u32::try_from(split).expect("at most 8");
        let first = current.next;
        let end = BLOCK_PAGES.min(first - first % split + split);
        if current.copying.len() + (end - first) as usize > REPAIR_REQUESTS_MAX * split as usize {
            return 0;
        }
        let block = u64::from(current.repair.block) * BLOCK_BYTES;
        let ends = |page: &u32| {
            !current.pages.contains(*page) || self.is_being_written(block + in_block(*page))
        };
        (first..end).find(ends).unwrap_or(end) - first
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
            member.is_copying(&(offset..offset + held.bytes.len() as u64))
                || !member.has_room()
                || member.write(purpose, offset, &held.bytes).is_err()
        });
        self.repairs.held = held;
    }
}
