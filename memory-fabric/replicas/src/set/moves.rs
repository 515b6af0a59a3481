//! Copies that are made again or move: what became of each, and of all.

use super::{LeaveEvent, ReplicaEvent, ReplicaSet};
use crate::copies::Repair;
use fabric_host::lock;
use std::ops::Range;

impl ReplicaSet {
    /// Reports pages of these blocks that are lost, unless that was done before.
    pub(crate) fn report_lost(&self, blocks: Range<u32>) {
        let pages = self.copies.note_lost(blocks);
        if pages > 0 {
            (self.observer)(ReplicaEvent::PagesLost { pages });
        }
    }

    /// Gives up a move that has begun, whose target went out.
    pub(crate) fn give_up_move(&self, given_up: &Repair) {
        self.copies.give_up_move(given_up);
        // The threads note that its place was left.
        self.wake();
    }

    /// Gives up a move whose new copy lacks a page that the old one may have: the old one stays.
    pub(crate) fn leave_unmoved(&self, given_up: &Repair) {
        self.copies.leave_unmoved(given_up);
        self.wake();
    }

    pub(crate) fn note_moved(&self) {
        if let Some(observer) = &mut *lock(&self.leave_observer) {
            observer(LeaveEvent::Moved);
        }
    }

    pub(crate) fn note_left(&self, stayed: u32) {
        // The threads note that copies have left places.
        self.wake();
        self.report_zones();
        let observer = lock(&self.leave_observer).take();
        if let Some(mut observer) = observer {
            observer(LeaveEvent::Ended { stayed });
        }
    }
}
