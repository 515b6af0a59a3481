//! Copies move to donors that have less than their share, such as one that has just joined.
//!
//! The share of a donor is in proportion to what it lends. All moves are planned before the first
//! begins, and continue as those off a [donor that leaves](super::leave). A block is not moved into the
//! zone of its other copy, unless both are in it already. What cannot move stays; another plan moves
//! it later.

use super::join::Standing;
use super::leave::{LeaveError, Leaving, Move};
use super::{Copies, Ledger};
use crate::placement::Place;
use std::cmp::Reverse;
use std::collections::VecDeque;

/// What a donor holds, and is to hold.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    held: u32,
    share: u32,
    is_used: bool,
}

impl Load {
    fn excess(self) -> u32 {
        match self.is_used {
            true => self.held.saturating_sub(self.share),
            false => 0,
        }
    }

    fn lack(self) -> u32 {
        match self.is_used {
            true => self.share.saturating_sub(self.held),
            false => 0,
        }
    }
}

impl Copies {
    /// Begins to move copies from donors with more than their share to those with less. Returns how
    /// many.
    ///
    /// # Errors
    ///
    /// While copies move. Nothing has changed then.
    pub fn rebalance(&self) -> Result<u32, LeaveError> {
        let mut ledger = self.lock();
        ledger.may_move()?;
        self.reclaim(&mut ledger);
        let mut loads = self.loads(&ledger);
        let mut moves = VecDeque::new();
        for block in 0..self.blocks() {
            let donors = self.all(block).map(|copy| copy.place.donor);
            let mut donors: Vec<u8> = donors.collect();
            let mut plan = || self.plan_one(&mut ledger, &mut loads, block, &mut donors);
            moves.extend(std::iter::from_fn(&mut plan));
        }
        let targets = moves.iter().filter_map(|one: &Move| one.to);
        let targets = targets.fold(0, |bits, (place, _)| bits | 1 << place.donor);
        let count = u32::try_from(moves.len()).expect("23 bits");
        ledger.leaving = Some(Leaving {
            targets,
            moves,
            ..Leaving::default()
        });
        self.note_change();
        Ok(count)
    }

    /// Ends a rebalancing after the copy that is moving now. Returns false without one.
    pub fn stop_rebalancing(&self) -> bool {
        let mut ledger = self.lock();
        let leaving = ledger.leaving.as_mut();
        let Some(leaving) = leaving.filter(|leaving| leaving.donor.is_none()) else {
            return false;
        };
        let unmoved = std::mem::take(&mut leaving.moves);
        leaving.stayed += u32::try_from(unmoved.len()).expect("23 bits");
        leaving.is_stopped = true;
        for one in unmoved.into_iter().rev() {
            ledger.give_back(one.to);
        }
        self.note_change();
        true
    }

    fn loads(&self, ledger: &Ledger) -> Vec<Load> {
        let mut loads = vec![Load::default(); ledger.loans.len()];
        let donors = (0..=u8::MAX).zip(&ledger.loans);
        for ((donor, loan), load) in donors.zip(&mut loads) {
            load.is_used = loan.standing == Standing::Member && !self.is_out(donor);
        }
        for block in 0..self.blocks() {
            for copy in self.all(block) {
                loads[usize::from(copy.place.donor)].held += 1;
            }
        }
        let used = || {
            loads
                .iter()
                .zip(&ledger.loans)
                .filter(|(load, _)| load.is_used)
        };
        let held: u64 = used().map(|(load, _)| u64::from(load.held)).sum();
        // A donor has one copy of a block at most.
        let size = |slots: u32| u64::from(slots.min(self.blocks()));
        let all: u64 = used().map(|(_, loan)| size(loan.slots)).sum();
        for (load, loan) in loads.iter_mut().zip(&ledger.loans) {
            let share = (held * size(loan.slots)).checked_div(all);
            load.share = u32::try_from(share.unwrap_or(0)).expect("as many as copies");
        }
        loads
    }

    /// Plans the move of a copy of a block, off the donor with the most that has too much, which is not
    /// one of those that have just got one. `donors` has where its copies will be.
    fn plan_one(
        &self,
        ledger: &mut Ledger,
        loads: &mut [Load],
        block: u32,
        donors: &mut [u8],
    ) -> Option<Move> {
        let excess = |donor: u8| loads[usize::from(donor)].excess();
        let mut giving: Vec<usize> = (0..donors.len()).collect();
        giving.retain(|&at| {
            let copy = self.copy(block, at);
            copy.place.donor == donors[at] && self.is_valid(copy) && excess(donors[at]) > 0
        });
        giving.sort_by_key(|&at| Reverse(excess(donors[at])));
        let (at, to) = giving.into_iter().find_map(|at| {
            let to = self.donor_for(ledger, loads, donors, at)?;
            Some((at, to))
        })?;
        let (slot, is_empty) = ledger.loans[usize::from(to)].take()?;
        let (off, other) = (donors[at], donors[usize::from(at == 0)]);
        donors[at] = to;
        loads[usize::from(off)].held -= 1;
        loads[usize::from(to)].held += 1;
        let to = Some((Place { donor: to, slot }, is_empty));
        Some(Move {
            block,
            off,
            other,
            to,
        })
    }

    /// Returns the donor that lacks most, of those to which one of the copies that these donors have
    /// may move.
    fn donor_for(&self, ledger: &Ledger, loads: &[Load], donors: &[u8], at: usize) -> Option<u8> {
        let (off, other) = (donors[at], donors[usize::from(at == 0)]);
        let is_allowed =
            |to: u8| self.width > 2 || self.are_apart(self.apart_by(off, other), to, other);
        let all = (0..=u8::MAX).zip(&ledger.loans).zip(loads);
        let taking = all.filter(|&((donor, loan), load)| {
            load.lack() > 0 && loan.room() > 0 && !donors.contains(&donor) && is_allowed(donor)
        });
        let most = taking.max_by_key(|(_, load)| load.lack())?;
        Some(most.0.0)
    }
}

#[cfg(test)]
mod tests;
