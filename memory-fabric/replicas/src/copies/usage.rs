//! Donors that go out of use, alone or for good, and come back.

use super::join::Standing;
use super::{Copies, Copy, CopyState, LastCopy, Ledger, Loan};
use std::sync::atomic::Ordering;

/// What a donor must not be the only one to have, to go out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Spared {
    /// Blocks only: pages that other copies lack are [lost](Copies::lost_pages) with it.
    Blocks,
    /// Also such pages.
    Pages,
}

impl Copies {
    /// Stops the use of a donor that may return. From then on nothing is read from it, and write-backs
    /// complete without it. Returns false if it was out already.
    ///
    /// # Errors
    ///
    /// [`LastCopy`]: then nothing has changed.
    pub fn exclude(&self, donor: u8) -> Result<bool, LastCopy> {
        let ledger = self.lock();
        self.exclude_one(&ledger, donor, Spared::Pages)
    }

    /// Stops the use of a donor that will not return, so that its copies get other places. Returns
    /// false if it was out already.
    ///
    /// # Errors
    ///
    /// [`LastCopy`]: then nothing has changed.
    pub fn expel(&self, donor: u8, spared: Spared) -> Result<bool, LastCopy> {
        // One critical section: a donor that is readmitted in between would be in use, and lost.
        let mut ledger = self.lock();
        let was_used = self.exclude_one(&ledger, donor, spared)?;
        let standing = &mut ledger.loans[usize::from(donor)].standing;
        if *standing != Standing::Absent {
            *standing = Standing::Lost;
        }
        self.note_change();
        Ok(was_used)
    }

    fn exclude_one(&self, ledger: &Ledger, donor: u8, spared: Spared) -> Result<bool, LastCopy> {
        if self.is_out(donor) {
            return Ok(false);
        }
        if self.is_needed(ledger, donor, spared) {
            return Err(LastCopy);
        }
        self.out[usize::from(donor)].store(true, Ordering::Release);
        self.note_change();
        Ok(true)
    }

    /// Returns whether a block, or a page, needs a copy at a donor: so few others are valid.
    fn is_needed(&self, ledger: &Ledger, donor: u8, spared: Spared) -> bool {
        let gone = ledger.gone();
        let is_here = |copy: &Copy| copy.place.donor == donor;
        (0..self.blocks()).any(|block| {
            let valid = || self.all(block).filter(|copy| self.is_valid(*copy));
            valid().any(|copy| is_here(&copy))
                && valid().filter(|copy| !is_here(copy)).count() < self.needed
                || spared == Spared::Pages && self.is_needed_for_page(block, donor, gone)
        })
    }

    /// Stops the use of one copy, which is wrong, at a donor that other blocks need: it is filled
    /// again from the others. Returns whether reads go to others now, also if they did before: several
    /// answers of the copy may have been on their way. Returns false, and nothing has changed, if the
    /// donor can go out as a whole, or this block needs the copy as well. A move that reads this copy
    /// does not end, and begins again with another one.
    pub(crate) fn spoil(&self, block: u32, donor: u8) -> bool {
        let ledger = self.lock();
        let valid = self.all(block).filter(|copy| self.is_valid(*copy));
        let others = valid.filter(|copy| copy.place.donor != donor).count();
        let mut all = self.all(block).enumerate();
        // One that is not read would become valid without the page that is wrong.
        let counts = |state| {
            matches!(
                state,
                CopyState::Valid | CopyState::Behind | CopyState::CatchingUp
            )
        };
        let here = all.find(|(_, copy)| copy.place.donor == donor && counts(copy.state));
        let Some((at, copy)) = here else {
            return others >= self.needed;
        };
        if others < self.needed {
            return false;
        }
        if self.is_valid(copy) && !self.is_needed(&ledger, donor, Spared::Pages) {
            return false;
        }
        // The copy receives write-backs again when its repair begins, which reads no page while a
        // write-back of it is outstanding.
        let state = CopyState::Stale;
        self.set(block, at, Copy { state, ..copy });
        self.note_change();
        true
    }

    /// Returns whether a donor will not return.
    #[must_use]
    pub fn is_lost(&self, donor: u8) -> bool {
        matches!(
            self.lock().standing(donor),
            Standing::Lost | Standing::Absent
        )
    }

    /// Returns the number of blocks with a copy on a donor that will not return, which could be made
    /// again, and for which no donor in use has room.
    #[must_use]
    pub fn displaced(&self) -> u32 {
        let (lost, roomy) = {
            let ledger = self.lock();
            let bits_of = |is_one: &dyn Fn(u8, &Loan) -> bool| {
                let donors = (0..=u8::MAX).zip(&ledger.loans);
                let found = donors.filter(|(donor, loan)| is_one(*donor, loan));
                found.fold(0_u64, |bits, (donor, _)| bits | 1 << donor)
            };
            let has_room = |donor: u8, loan: &Loan| {
                loan.room() > 0 && !self.is_out(donor) && !ledger.is_leaving(donor)
            };
            (
                bits_of(&|_, loan| loan.standing == Standing::Lost),
                bits_of(&has_room),
            )
        };
        if lost == 0 {
            return 0;
        }
        let is_displaced = |block: &u32| {
            let copies = || self.all(*block);
            let holders = copies().fold(0, |bits, copy| bits | 1 << copy.place.donor);
            holders & lost != 0
                && roomy & !holders == 0
                && copies().filter(|copy| self.is_valid(*copy)).count() >= self.needed
        };
        let count = (0..self.blocks()).filter(is_displaced).count();
        u32::try_from(count).expect("23 bits")
    }

    /// Uses a donor again that was out: its copies that have missed pages are behind, or stale, until
    /// they are filled. The caller repairs, has noted what they have missed, and has no request to
    /// this donor outstanding. Returns false if it is lost, or is not out.
    pub fn readmit(&self, donor: u8) -> bool {
        let mut ledger = self.lock();
        if !ledger.standing(donor).may_be_used() || !self.is_out(donor) {
            return false;
        }
        ledger.loans[usize::from(donor)].standing.use_again();
        let missed = self.missed.lock();
        for block in 0..self.blocks() {
            for (at, copy) in self.all(block).enumerate() {
                if copy.place.donor != donor {
                    continue;
                }
                let state = match copy.state {
                    CopyState::Valid if !self.needs_pages(&missed, copy.place) => continue,
                    CopyState::Valid | CopyState::Behind | CopyState::CatchingUp => {
                        CopyState::Behind
                    }
                    CopyState::Filling | CopyState::Stale | CopyState::Empty => CopyState::Stale,
                };
                self.set(block, at, Copy { state, ..copy });
            }
        }
        // Release: a thread that finds the donor in use finds which of its copies are not valid.
        self.out[usize::from(donor)].store(false, Ordering::Release);
        self.note_change();
        true
    }
}
