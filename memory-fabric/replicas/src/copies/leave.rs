//! Copies move while their donors are in use: all of a donor that leaves, to others, or
//! [some](super::rebalance) to those that have less than their share.
//!
//! A block keeps both copies meanwhile. The new one is a third, which only the thread that repairs
//! knows: it copies the pages, and writes what is written back to all three. Of a stripe it is one
//! piece more. When the new copy is
//! complete, it takes the place of the old one. A thread that has read the block's places before
//! holds its page, so that nothing of it was written back in between, and the old copy has the same
//! bytes.
//!
//! All places are reserved before anything moves: as many as possible in another zone than the
//! block's other copy, then the rest on another donor.

use super::join::Standing;
use super::room::{ALL, Apart};
use super::{Copies, Copy, CopyState, Ledger, Repair};
use crate::placement::Place;
use fabric_homes::BLOCK_PAGES;
use std::collections::VecDeque;

/// Why a donor does not leave.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LeaveError {
    /// It is out, or has left.
    Out,
    /// Another one leaves.
    Leaving(u8),
    /// Copies move to donors that have less than their share.
    Rebalancing,
    /// There is too little room on donors without the other copy of a block.
    NoRoom {
        /// Blocks that it holds.
        blocks: u32,
        /// Blocks of them for which there is room.
        room: u32,
    },
}

/// A copy that is to move.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub block: u32,
    /// The donor that has it.
    pub off: u8,
    /// The donor of the other one of two copies when the move was planned.
    pub other: u8,
    /// Where to, and whether that is all zero; `None` when it is to be found.
    pub to: Option<(Place, bool)>,
}

/// What has yet to move.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    /// The donor that leaves; `None` where copies only find a better place.
    pub(super) donor: Option<u8>,
    /// Donors that get copies whose reserved place is gone, a bit each.
    pub(super) targets: u64,
    pub(super) moves: VecDeque<Move>,
    /// The places that copies have left.
    pub(super) vacated: Vec<Place>,
    /// Copies that could not move.
    pub(super) stayed: u32,
    /// Whether a move that is given up is not tried again.
    pub(super) is_stopped: bool,
}

/// What the thread that repairs has to do for a donor that leaves.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NextMove {
    /// Nothing: none leaves.
    None,
    /// A copy is to be made. `repair.from` is valid.
    Begun(Repair),
    /// Everything that could move has moved.
    Ended {
        /// Blocks that stayed.
        stayed: u32,
    },
}

impl Copies {
    /// Begins to move all copies off a donor, to others that have room. Returns their number.
    ///
    /// # Errors
    ///
    /// See [`LeaveError`]. Nothing has changed then.
    pub fn leave(&self, donor: u8) -> Result<u32, LeaveError> {
        self.leave_for(donor, ALL)
    }

    /// Begins to move all copies off a donor, to donors that have a bit in `targets`. What finds its
    /// place gone later may go to others.
    ///
    /// # Errors
    ///
    /// See [`LeaveError`]. Nothing has changed then.
    pub fn leave_for(&self, donor: u8, targets: u64) -> Result<u32, LeaveError> {
        let mut ledger = self.lock();
        ledger.may_move()?;
        if self.is_out(donor) {
            return Err(LeaveError::Out);
        }
        self.reclaim(&mut ledger);
        ledger.loans[usize::from(donor)].standing = Standing::Member;
        // No place is taken there from here on.
        ledger.leaving = Some(Leaving {
            donor: Some(donor),
            ..Leaving::default()
        });
        let mut moves = VecDeque::new();
        let all = match self.width {
            2 => self.reserve_copies(&mut ledger, donor, targets, &mut moves),
            _ => self.reserve_pieces(&mut ledger, donor, targets, &mut moves),
        };
        let count = |blocks: usize| u32::try_from(blocks).expect("23 bits");
        if moves.len() < all {
            ledger.leaving = None;
            for taken in moves.iter().rev() {
                ledger.give_back(taken.to);
            }
            return Err(LeaveError::NoRoom {
                blocks: count(all),
                room: count(moves.len()),
            });
        }
        ledger.leaving = Some(Leaving {
            donor: Some(donor),
            targets: ALL,
            moves,
            vacated: Vec::with_capacity(all),
            ..Leaving::default()
        });
        self.note_change();
        Ok(count(all))
    }

    /// Finds places for the copies of a donor, as many as there can be. Returns how many it has.
    fn reserve_copies(
        &self,
        ledger: &mut Ledger,
        donor: u8,
        targets: u64,
        moves: &mut VecDeque<Move>,
    ) -> usize {
        let all = (0..self.blocks()).filter_map(|block| {
            let other = self.other_than(block, donor)?;
            let (off, to, other) = (donor, None, other.place.donor);
            Some(Move {
                block,
                off,
                other,
                to,
            })
        });
        let all: Vec<Move> = all.collect();
        let zones = (Apart::Zones, targets);
        let crowded = self.reserve(ledger, zones, &all, moves);
        self.reserve(ledger, (Apart::Donors, targets), &crowded, moves);
        all.len()
    }

    /// The same for pieces.
    fn reserve_pieces(
        &self,
        ledger: &mut Ledger,
        donor: u8,
        targets: u64,
        moves: &mut VecDeque<Move>,
    ) -> usize {
        let mut all = 0;
        for block in (0..self.blocks()).filter(|&block| self.has_copy(block, donor)) {
            all += 1;
            let to = self.free_place_for_piece(ledger, block, targets);
            let (off, other) = (donor, donor);
            moves.extend(to.map(|to| Move {
                block,
                off,
                other,
                to: Some(to),
            }));
        }
        all
    }

    /// Finds places on `targets` for blocks that have their other copies on these donors, as many as
    /// there can be. Returns the others.
    ///
    /// Blocks of one group find no place only if all that are left are in that group, and if no
    /// earlier move of another group has a place outside. So there is one such group at most. All
    /// blocks of other groups have places then, and blocks of that one have all places outside: no
    /// choice of places has more. What has become impossible stays so.
    fn reserve(
        &self,
        ledger: &mut Ledger,
        (apart, targets): (Apart, u64),
        blocks: &[Move],
        moves: &mut VecDeque<Move>,
    ) -> Vec<Move> {
        let mut full = None;
        // Moves before this one cannot be exchanged.
        let mut seen = 0;
        let mut without = Vec::new();
        for &planned in blocks {
            let other = planned.other;
            let group = self.group(apart, other);
            let to = match full == Some(group) {
                true => None,
                false => {
                    let free = self.free_place_apart(ledger, (apart, targets), other);
                    free.or_else(|| {
                        self.exchanged_place(ledger, (apart, targets), other, moves, &mut seen)
                    })
                }
            };
            if to.is_none() {
                full = Some(group);
                without.push(planned);
                continue;
            }
            moves.push_back(Move { to, ..planned });
        }
        without
    }

    /// Finds a place when all that are left are in the group to be avoided: one of them goes to an
    /// earlier move, whose place is returned.
    fn exchanged_place(
        &self,
        ledger: &mut Ledger,
        (apart, targets): (Apart, u64),
        avoided: u8,
        moves: &mut VecDeque<Move>,
        seen: &mut usize,
    ) -> Option<(Place, bool)> {
        let is_usable = |one: &Move| {
            let to = one.to.map(|(place, _)| place.donor);
            self.are_apart(apart, one.other, avoided)
                && to.is_some_and(|donor| self.are_apart(apart, donor, avoided))
        };
        while !is_usable(moves.get(*seen)?) {
            *seen += 1;
        }
        let earlier = &mut moves[*seen];
        let place = self.free_place_apart(ledger, (apart, targets), earlier.other)?;
        earlier.to.replace(place)
    }

    /// Takes a place that is reserved for a move, which finds another one later or stays, for a copy
    /// of a block that has its other one on a donor.
    pub(super) fn reserved_place(
        &self,
        ledger: &mut Ledger,
        block: u32,
        other: u8,
    ) -> Option<(Place, bool)> {
        let moves = &mut ledger.leaving.as_mut()?.moves;
        [Apart::Zones, Apart::Donors].into_iter().find_map(|apart| {
            let is_usable = |one: &&mut Move| {
                let to = one.to.map(|(place, _)| place.donor);
                to.is_some_and(|donor| {
                    self.are_apart(apart, donor, other)
                        && !self.is_out(donor)
                        && !self.has_copy(block, donor)
                })
            };
            moves.iter_mut().rev().find(is_usable)?.to.take()
        })
    }

    /// Returns whether a block has a copy on a donor, valid or not.
    pub(super) fn has_copy(&self, block: u32, donor: u8) -> bool {
        self.all(block).any(|copy| copy.place.donor == donor)
    }

    /// Returns the other copy of a block that has one on a donor.
    fn other_than(&self, block: u32, donor: u8) -> Option<Copy> {
        let copies = self.of(block);
        let at = copies.iter().position(|copy| copy.place.donor == donor)?;
        Some(copies[1 - at])
    }

    /// Begins the next move. Only for the thread that repairs, which then writes what is written
    /// back to the new place as well.
    pub fn begin_move(&self) -> NextMove {
        let mut ledger = self.lock();
        let Some(Leaving { donor, .. }) = ledger.leaving else {
            return NextMove::None;
        };
        // If it is out, its copies are made again, as those of any donor.
        while donor.is_none_or(|donor| !self.is_out(donor)) {
            let leaving = ledger.leaving.as_mut();
            let Some(next) = leaving.and_then(|leaving| leaving.moves.pop_front()) else {
                break;
            };
            if let Some(begun) = self.begin_one(&mut ledger, next) {
                return NextMove::Begun(begun);
            }
            if let Some(leaving) = &mut ledger.leaving {
                leaving.stayed += 1;
            }
        }
        let mut stayed = donor.map_or(0, |donor| self.blocks_at(donor));
        if let Some(leaving) = ledger.leaving.take() {
            if donor.is_none() {
                stayed = leaving.stayed;
            }
            for unmoved in leaving.moves.into_iter().rev() {
                ledger.give_back(unmoved.to);
            }
            match donor.filter(|_| stayed == 0) {
                None => self.vacate(&mut ledger, leaving.vacated),
                // A repair must not choose it before it has left.
                Some(donor) if ledger.standing(donor) == Standing::Member => {
                    ledger.loans[usize::from(donor)].standing = Standing::Emptied;
                }
                Some(_) => {}
            }
        }
        // Copies that stayed are repaired again.
        self.note_change();
        NextMove::Ended { stayed }
    }

    fn begin_one(&self, ledger: &mut Ledger, next: Move) -> Option<Repair> {
        let Move { block, off, .. } = next;
        let is_drain = ledger.leaving.as_ref().is_some_and(|it| it.donor.is_some());
        // A repair may have put the other copy elsewhere since the move was planned. A drain has no
        // other choice.
        let other = self
            .other_than(block, off)
            .filter(|_| self.width == 2 && !is_drain);
        let is_usable = |(place, _): &(Place, bool)| {
            !self.has_copy(block, place.donor)
                && !self.is_out(place.donor)
                && other.is_none_or(|other| {
                    let other = other.place.donor;
                    self.are_apart(self.apart_by(off, other), place.donor, other)
                })
        };
        let to = match next.to.filter(is_usable) {
            Some(to) => Some(to),
            None => {
                ledger.give_back(next.to);
                self.place_for_move(ledger, block, off)
            }
        };
        let (at, from) = self.source_of_move(block, off).unzip();
        let (Some((place, is_empty)), Some(at), Some(from)) = (to, at, from) else {
            ledger.give_back(to);
            return None;
        };
        self.begin_place(place);
        Some(Repair {
            block,
            at,
            from: from.place,
            to: place,
            is_empty,
            catches_up: false,
        })
    }

    /// Returns which copy of a block is on a donor, and a valid one to make another of.
    fn source_of_move(&self, block: u32, off: u8) -> Option<(usize, Copy)> {
        let all = || self.all(block).enumerate();
        let (at, own) = all().find(|(_, copy)| copy.place.donor == off)?;
        let valid = || all().filter(|(_, copy)| self.is_valid(*copy));
        if valid().count() < self.needed {
            return None;
        }
        // The donor that leaves may be slow, which may be why it does.
        let other = valid().find(|&(other, _)| other != at);
        Some((at, other.map_or(own, |(_, copy)| copy)))
    }

    /// Takes a place for a move whose own is gone.
    fn place_for_move(&self, ledger: &mut Ledger, block: u32, off: u8) -> Option<(Place, bool)> {
        let leaving = ledger.leaving.as_ref()?;
        let (is_drain, targets) = (leaving.donor.is_some(), leaving.targets);
        match (self.width, is_drain) {
            (2, true) => {
                let other = self.other_than(block, off)?;
                self.free_place(ledger, other.place.donor)
            }
            (2, false) => {
                let other = self.other_than(block, off)?.place.donor;
                let targets = targets & !(1 << off);
                let place = self.free_place_apart(ledger, (Apart::Zones, targets), other);
                let apart = self.apart_by(off, other);
                place.or_else(|| self.free_place_apart(ledger, (apart, targets), other))
            }
            _ => self.free_place_for_piece(ledger, block, targets),
        }
    }

    /// Ends a move whose pages are all copied from these copies: the new one takes the place of the
    /// old one. Returns false if its donor went out meanwhile, or one of these is not valid any more.
    pub fn end_move(&self, done: &Repair, sources: &[(usize, Place)]) -> bool {
        let mut ledger = self.lock();
        let Some(leaving) = &mut ledger.leaving else {
            return false;
        };
        if self.is_out(done.to.donor) || !self.are_valid(done.block, sources) {
            return false;
        }
        let before = self.copy(done.block, done.at).place;
        leaving.vacated.push(before);
        self.fill_holes(before, 0, BLOCK_PAGES);
        let (place, state) = (done.to, CopyState::Valid);
        self.missed.forget(before);
        self.missed.forget(place);
        self.set(done.block, done.at, Copy { place, state });
        true
    }

    /// Gives up a move that has begun: the block moves later, to another place.
    pub fn give_up_move(&self, given_up: &Repair) {
        self.end_unmoved(given_up, true);
    }

    /// Gives up a move that has begun, and does not try again: the copy stays.
    pub(crate) fn leave_unmoved(&self, given_up: &Repair) {
        self.end_unmoved(given_up, false);
    }

    fn end_unmoved(&self, given_up: &Repair, is_tried_again: bool) {
        let mut ledger = self.lock();
        let (block, off) = (
            given_up.block,
            self.copy(given_up.block, given_up.at).place.donor,
        );
        let other = match self.width {
            2 => self.copy(block, 1 - given_up.at).place.donor,
            _ => off,
        };
        self.fill_holes(given_up.to, 0, BLOCK_PAGES);
        // Pages for that place may be on their way.
        self.vacate(&mut ledger, [given_up.to]);
        match &mut ledger.leaving {
            Some(leaving) if leaving.is_stopped || !is_tried_again => leaving.stayed += 1,
            Some(leaving) => {
                let to = None;
                leaving.moves.push_back(Move {
                    block,
                    off,
                    other,
                    to,
                });
            }
            None => {}
        }
        self.note_change();
    }
}

impl Leaving {
    /// Returns the places that are reserved.
    pub(super) fn reserved(&mut self) -> impl Iterator<Item = &mut Option<(Place, bool)>> {
        self.moves.iter_mut().map(|planned| &mut planned.to)
    }
}

impl Ledger {
    /// Returns an error while copies move.
    pub(super) fn may_move(&self) -> Result<(), LeaveError> {
        match &self.leaving {
            None => Ok(()),
            Some(leaving) => Err(leaving
                .donor
                .map_or(LeaveError::Rebalancing, LeaveError::Leaving)),
        }
    }

    /// Gives back a place that was taken. What was written there stays.
    pub(super) fn give_back(&mut self, place: Option<(Place, bool)>) {
        let Some((Place { donor, slot }, is_empty)) = place else {
            return;
        };
        let loan = &mut self.loans[usize::from(donor)];
        if is_empty && slot + 1 == loan.used {
            loan.used -= 1;
        } else {
            loan.spare.push(slot);
        }
    }
}

#[cfg(test)]
mod tests;
