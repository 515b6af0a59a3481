//! What is read for a repair arrives.

use super::{Copying, Current, Phase, Repairs, in_block};
use crate::set::ReplicaSet;
use crate::stripe::Layout;
use fabric_homes::BLOCK_BYTES;
use fabric_pages::page::PageBytes;
use std::cell::Cell;

impl Repairs {
    /// Returns whether nothing is known that says that a page, which is not written meanwhile, is wrong.
    pub fn opens(&mut self, set: &ReplicaSet, offset: u64, page: &PageBytes) -> bool {
        self.checked.copy_from_slice(page);
        set.is_genuine(offset, &mut self.checked) != Some(false)
    }

    /// Takes pieces of consecutive pages from a donor.
    pub fn pieces_arrived(&mut self, set: &ReplicaSet, first: u32, donor: usize, bytes: &[u8]) {
        let Some(layout) = self.layout else {
            return;
        };
        for (page, piece) in (first..).zip(bytes.chunks(layout.unit())) {
            self.piece_arrived(set, layout, page, donor, piece);
        }
    }

    /// Takes a page of a copy from a donor.
    pub fn copy_arrived(&mut self, set: &ReplicaSet, page: u32, donor: usize, bytes: &[u8]) {
        let Some(Current {
            repair,
            sources,
            is_move,
            copying,
            ..
        }) = &mut self.current
        else {
            return;
        };
        let Some(copying) = copying.iter_mut().find(|copying| copying.page == page) else {
            return;
        };
        let Phase::Reading {
            superseded,
            lacks,
            attempts,
            ..
        } = &mut copying.phase
        else {
            return;
        };
        if *superseded {
            self.written(set.copies(), page, 1);
            return;
        }
        let mut sources = sources.iter().map(|(_, place)| place.donor);
        let is_source = sources.any(|source| usize::from(source) == donor);
        let is_new_copy = !*is_move && donor == usize::from(repair.to.donor);
        if set.has_check() && bytes.len() == self.checked.len() {
            self.checked.copy_from_slice(bytes);
            let offset = u64::from(repair.block) * BLOCK_BYTES + in_block(page);
            // Of a page that was never written back, or is dropped, nothing is known or read. This
            // thread writes and drops, so what it is checked by does not change meanwhile.
            if set.is_genuine(offset, &mut self.checked) == Some(false) {
                *attempts += 1;
                *lacks = true;
                // Each is read twice: the first time, a bit may have flipped on its way. What is not
                // valid may be old.
                if attempts.is_multiple_of(2) && is_source {
                    let donor = u8::try_from(donor).expect("at most 64 donors");
                    set.note_wrong(donor, offset);
                }
                return;
            }
        }
        if is_new_copy {
            // It has the page, which is wrong in the copy that was read first.
            self.written(set.copies(), page, 1);
            return;
        }
        copying.phase = Phase::Arrived(bytes.into());
    }

    fn piece_arrived(
        &mut self,
        set: &ReplicaSet,
        layout: Layout,
        page: u32,
        donor: usize,
        bytes: &[u8],
    ) {
        let Some(current) = &mut self.current else {
            return;
        };
        // Each piece of a block is at another donor.
        let mut all = set.copies().all(current.repair.block);
        let Some(at) = all.position(|copy| usize::from(copy.place.donor) == donor) else {
            return;
        };
        let to = current.repair.at;
        let mut all = current.copying.iter_mut();
        let Some(copying) = all.find(|copying: &&mut Copying| copying.page == page) else {
            return;
        };
        let Phase::Reading {
            superseded,
            gather,
            asked,
            lacks,
            ..
        } = &mut copying.phase
        else {
            return;
        };
        gather.take(layout, at, bytes);
        if gather.arrived() != *asked {
            // Others are on their way. Nothing of a page is outstanding when it is complete.
            return;
        }
        if *superseded {
            // The pieces may be of different versions, and are not used.
            self.written(set.copies(), page, 1);
            return;
        }
        if let (true, Some(trial)) = (set.has_check(), &mut self.trial) {
            let offset = u64::from(current.repair.block) * BLOCK_BYTES + in_block(page);
            // As of a copy.
            let is_known = Cell::new(true);
            let is_right = |_, bytes: &mut PageBytes| {
                let found = set.is_genuine(offset, bytes);
                is_known.set(found.is_some());
                found != Some(false)
            };
            let Some(wrong) = gather.search(layout, trial, &is_right) else {
                *lacks = true;
                return;
            };
            let sources = current.sources.iter().filter(|_| is_known.get());
            let sources = sources.filter(|(at, _)| wrong.pieces >> at & 1 == 1);
            sources.for_each(|(_, place)| set.note_wrong(place.donor, offset));
        }
        copying.phase = Phase::Arrived(gather.piece(layout, to));
    }
}
