//! Requests to donors that go out of use: reads go elsewhere, and write-backs complete without them.

use super::{Operation, ReplicatedTransport, Work, bit, page_in, split};
use crate::member::Member;
use fabric_transport::Completion;

impl ReplicatedTransport {
    /// Stops to wait for donors that went out: their reads go to the other copy.
    pub(super) fn leave_excluded(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        let changes = self.set.copies().changes();
        if changes == self.changes {
            return;
        }
        self.changes = changes;
        self.take_arrivals();
        for donor in 0..self.members.len() {
            let id = u8::try_from(donor).expect("at most 64 donors");
            if !self.set.copies().is_out(id) {
                continue;
            }
            if !self.members[donor].out {
                self.leave_one(id, complete);
            }
            if !self.members[donor].has_left && self.set.copies().has_left(id) {
                self.members[donor] = Member::left();
                self.set.note_without(donor);
            }
        }
    }

    fn leave_one(&mut self, donor: u8, complete: &mut dyn FnMut(Completion<'_>)) {
        let member = &mut self.members[usize::from(donor)];
        member.out = true;
        member.abandon(|_| true);
        if let Some(given_up) = self.repairs.leave(donor, &mut self.members) {
            self.set.give_up_move(&given_up);
        }
        for index in 0..self.operations.len() {
            let Some(operation) = &mut self.operations[index] else {
                continue;
            };
            if operation.waits_for & bit(donor) == 0 {
                continue;
            }
            operation.waits_for &= !bit(donor);
            operation.is_half_done |= operation.is_write();
            let is_read = operation.is_read();
            if let Operation {
                work: Work::Write,
                offset,
                ..
            } = *operation
            {
                self.note_unconfirmed(offset, donor);
            }
            let index = u32::try_from(index).expect("a few operations");
            // What a read has asked for does not concern a write with its number.
            let mut reads = self.stripes.as_mut().filter(|_| is_read);
            let is_short = reads.as_mut().is_some_and(|all| all.leave(index, donor));
            if self.operation(index).waits_for == 0 || is_short {
                self.bereft(index, complete);
            }
        }
    }

    /// Continues an operation that no donor in use is to answer.
    pub(super) fn bereft(&mut self, index: u32, complete: &mut dyn FnMut(Completion<'_>)) {
        let work = self.operation(index).work;
        match work {
            Work::Read { .. } if self.unposted.contains(&index) => {}
            Work::Read { .. } => self.unposted.push_back(index),
            Work::Write => complete(Completion::Written(self.end(index).ticket)),
            Work::Drop { pages } => {
                self.end(index);
                complete(Completion::Dropped(pages));
            }
        }
    }

    /// Notes that a donor went out before it confirmed the write-back of the page at this offset.
    fn note_unconfirmed(&self, offset: u64, donor: u8) {
        let ((block, in_block), copies) = (split(offset), self.set.copies());
        let mut here = copies.all(block).enumerate();
        // None if a copy was moving there.
        if let Some((at, _)) = here.find(|(_, copy)| copy.place.donor == donor) {
            copies.note_missed(block, at, page_in(in_block));
        }
    }
}
