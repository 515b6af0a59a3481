//! Donors that join while the guest runs, and places of donors that have left.
//!
//! The list of donors has places for those that may join, without a loan at first. A donor that joins
//! is out until every thread has a connection to it. Then the thread that repairs readmits it like
//! one that returns, and it has no copy that could be stale. Copies come by repairs and drains.

use super::{Copies, Ledger, Loan, SLOTS_MAX};
use std::sync::atomic::{AtomicU8, Ordering};

/// What becomes of a donor's loan.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Standing {
    /// It holds copies, or may get them.
    Member,
    /// All of its copies have moved, and it is about to leave.
    Emptied,
    /// The donor will not return.
    Lost,
    /// It joins: not every thread has a connection yet.
    Joining,
    /// Every thread has one; the thread that repairs is to use it.
    Joined,
    /// There is none: the donor has left, or none has joined in its place yet.
    Absent,
}

impl Standing {
    pub(super) fn may_be_used(self) -> bool {
        matches!(self, Self::Member | Self::Emptied | Self::Joined)
    }

    /// Whether blocks may have, or have had, places there.
    pub(super) fn has_places(self) -> bool {
        matches!(self, Self::Member | Self::Emptied | Self::Lost)
    }

    pub(super) fn use_again(&mut self) {
        if *self == Self::Joined {
            *self = Self::Member;
        }
    }
}

impl Copies {
    /// Adds places for donors that may join.
    ///
    /// # Panics
    ///
    /// With more than [`DONORS_MAX`](super::DONORS_MAX) donors.
    #[must_use]
    pub fn with_joiners(mut self, joiners: usize) -> Self {
        let all = self.out.len() + joiners;
        assert!(all <= super::DONORS_MAX, "{all} donors");
        let out = std::mem::take(&mut self.out).into_iter();
        let absent = (0..joiners).map(|_| true.into());
        self.out = out.chain(absent).collect();
        let zones = std::mem::take(&mut self.zones).into_iter();
        // Set when one joins.
        let unknown = (0..joiners).map(|_| AtomicU8::new(0));
        self.zones = zones.chain(unknown).collect();
        let ledger = self.ledger.get_mut();
        let ledger = ledger.unwrap_or_else(std::sync::PoisonError::into_inner);
        ledger.loans.resize_with(all, Loan::absent);
        self
    }

    /// Begins to add a donor in a place without one. It lends so many blocks, all zero, and is in
    /// the zone of the donor `beside`, or in one of its own. Returns false if there is one.
    pub fn join(&self, donor: u8, slots: u32, beside: Option<u8>) -> bool {
        let mut ledger = self.lock();
        if ledger.standing(donor) != Standing::Absent {
            return false;
        }
        let donors = || (0..=u8::MAX).zip(&ledger.loans);
        let others =
            donors().filter(|&(other, loan)| other != donor && loan.standing != Standing::Absent);
        let taken: Vec<u8> = others.map(|(other, _)| self.zone(other)).collect();
        let zone = match beside {
            Some(beside) => self.zone(beside),
            None => {
                let free = (0..=u8::MAX).find(|zone| !taken.contains(zone));
                free.expect("fewer donors than numbers")
            }
        };
        // Relaxed: readers use it for donors in use, which this one is not yet.
        self.zones[usize::from(donor)].store(zone, Ordering::Relaxed);
        ledger.loans[usize::from(donor)] = Loan {
            slots: slots.min(SLOTS_MAX),
            standing: Standing::Joining,
            ..Loan::absent()
        };
        self.note_change();
        true
    }

    /// Notes that every thread has a connection to a donor that joins. Returns false if it was lost
    /// meanwhile.
    pub fn note_joined(&self, donor: u8) -> bool {
        let mut ledger = self.lock();
        let standing = &mut ledger.loans[usize::from(donor)].standing;
        if *standing != Standing::Joining {
            return false;
        }
        *standing = Standing::Joined;
        self.note_change();
        true
    }

    /// Records that a donor without copies has left, and is not used any more. Returns false if it
    /// has one.
    pub fn retire(&self, donor: u8) -> bool {
        let mut ledger = self.lock();
        if self.blocks_at(donor) > 0 {
            return false;
        }
        ledger.loans[usize::from(donor)] = Loan::absent();
        ledger.forget_places(donor);
        self.out[usize::from(donor)].store(true, Ordering::Release);
        self.note_change();
        true
    }

    /// Returns whether a donor has left, or none has joined in its place.
    #[must_use]
    pub fn has_left(&self, donor: u8) -> bool {
        self.lock().standing(donor) == Standing::Absent
    }

    /// Returns whether a donor has copies, or may get them now or when it is back; also one that is
    /// lost, until it has left.
    #[must_use]
    pub fn is_member(&self, donor: u8) -> bool {
        self.lock().standing(donor).has_places()
    }
}

impl Loan {
    fn absent() -> Self {
        Self {
            used: 0,
            slots: 0,
            spare: Vec::new(),
            standing: Standing::Absent,
        }
    }
}

impl Ledger {
    /// Forgets places on a donor that has left: another one that joins has the same number.
    fn forget_places(&mut self, donor: u8) {
        self.kept.forget(donor);
        if let Some(leaving) = &mut self.leaving {
            leaving.vacated.retain(|place| place.donor != donor);
        }
        for to in self
            .leaving
            .iter_mut()
            .flat_map(|leaving| leaving.reserved())
        {
            to.take_if(|(place, _)| place.donor == donor);
        }
    }
}

#[cfg(test)]
mod tests;
