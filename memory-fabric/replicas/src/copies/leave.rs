//! A donor leaves while it is in use: each copy there moves to another donor.
//!
//! A block keeps both copies meanwhile. The new one is a third, which only the thread that repairs
//! knows: it copies the pages, and writes what is written back to all three. When the new copy is
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
    /// It holds pieces of stripes, which do not move.
    Striped,
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
struct Move {
    block: u32,
    /// The donor of its other copy when the move was planned.
    other: u8,
    /// Where to, and whether that is all zero; `None` when it is to be found.
    to: Option<(Place, bool)>,
}

/// The donor that leaves, and what has yet to move.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) donor: u8,
    moves: VecDeque<Move>,
    /// The places that copies have left there.
    vacated: Vec<Place>,
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
        if self.width > 2 {
            return Err(LeaveError::Striped);
        }
        let mut ledger = self.lock();
        if let Some(leaving) = &ledger.leaving {
            return Err(LeaveError::Leaving(leaving.donor));
        }
        if self.is_out(donor) {
            return Err(LeaveError::Out);
        }
        self.reclaim(&mut ledger);
        ledger.loans[usize::from(donor)].standing = Standing::Member;
        // No place is taken there from here on.
        ledger.leaving = Some(Leaving {
            donor,
            moves: VecDeque::new(),
            vacated: Vec::new(),
        });
        let all = (0..self.blocks()).filter_map(|block| {
            let other = self.other_than(block, donor)?;
            Some((block, other.place.donor))
        });
        let all: Vec<(u32, u8)> = all.collect();
        let mut moves = VecDeque::with_capacity(all.len());
        let zones = (Apart::Zones, targets);
        let crowded = self.reserve(&mut ledger, zones, &all, &mut moves);
        self.reserve(&mut ledger, (Apart::Donors, targets), &crowded, &mut moves);
        let count = |blocks: usize| u32::try_from(blocks).expect("23 bits");
        if moves.len() < all.len() {
            ledger.leaving = None;
            for taken in moves.iter().rev() {
                ledger.give_back(taken.to);
            }
            return Err(LeaveError::NoRoom {
                blocks: count(all.len()),
                room: count(moves.len()),
            });
        }
        ledger.leaving = Some(Leaving {
            donor,
            moves,
            vacated: Vec::with_capacity(all.len()),
        });
        self.note_change();
        Ok(count(all.len()))
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
        blocks: &[(u32, u8)],
        moves: &mut VecDeque<Move>,
    ) -> Vec<(u32, u8)> {
        let mut full = None;
        // Moves before this one cannot be exchanged.
        let mut seen = 0;
        let mut without = Vec::new();
        for &(block, other) in blocks {
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
                without.push((block, other));
                continue;
            }
            moves.push_back(Move { block, other, to });
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

    /// Takes a place that is reserved for a move, which finds another one later or stays.
    pub(super) fn reserved_place(&self, ledger: &mut Ledger, other: u8) -> Option<(Place, bool)> {
        let moves = &mut ledger.leaving.as_mut()?.moves;
        [Apart::Zones, Apart::Donors].into_iter().find_map(|apart| {
            let is_usable = |one: &&mut Move| {
                let to = one.to.map(|(place, _)| place.donor);
                to.is_some_and(|donor| self.are_apart(apart, donor, other) && !self.is_out(donor))
            };
            moves.iter_mut().rev().find(is_usable)?.to.take()
        })
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
        while !self.is_out(donor) {
            let leaving = ledger.leaving.as_mut();
            let Some(next) = leaving.and_then(|leaving| leaving.moves.pop_front()) else {
                break;
            };
            match self.begin_one(&mut ledger, donor, next) {
                Some(begun) => return NextMove::Begun(begun),
                None => continue,
            }
        }
        let stayed = self.blocks_at(donor);
        if let Some(Leaving { moves, vacated, .. }) = ledger.leaving.take() {
            for unmoved in moves.into_iter().rev() {
                ledger.give_back(unmoved.to);
            }
            if stayed > 0 {
                self.vacate(&mut ledger, vacated);
            }
            // A repair must not choose it before it has left.
            if stayed == 0 && ledger.standing(donor) == Standing::Member {
                ledger.loans[usize::from(donor)].standing = Standing::Emptied;
            }
        }
        // Copies that stayed are repaired again.
        self.note_change();
        NextMove::Ended { stayed }
    }

    fn begin_one(&self, ledger: &mut Ledger, donor: u8, next: Move) -> Option<Repair> {
        let other = self.other_than(next.block, donor)?;
        let is_usable = |(place, _): &(Place, bool)| {
            place.donor != other.place.donor && !self.is_out(place.donor)
        };
        let to = match next.to.filter(is_usable) {
            Some(to) => Some(to),
            None => {
                ledger.give_back(next.to);
                self.free_place(ledger, other.place.donor)
            }
        };
        let copies = self.of(next.block);
        let at = copies.iter().position(|copy| copy.place.donor == donor)?;
        let own = copies.into_iter().filter(|copy| copy.place.donor == donor);
        // The donor that leaves may be slow, which may be why it does.
        let mut sources = std::iter::once(other).chain(own);
        let from = sources.find(|copy| self.is_valid(*copy));
        let (Some((place, is_empty)), Some(from)) = (to, from) else {
            ledger.give_back(to);
            return None;
        };
        self.fill_holes(place, 0, BLOCK_PAGES);
        Some(Repair {
            block: next.block,
            at,
            from: from.place,
            to: place,
            is_empty,
        })
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
        let copies = self.of(done.block).into_iter().enumerate();
        for (at, copy) in copies.filter(|(_, copy)| copy.place.donor == leaving.donor) {
            leaving.vacated.push(copy.place);
            self.fill_holes(copy.place, 0, BLOCK_PAGES);
            let (place, state) = (done.to, CopyState::Valid);
            self.set(done.block, at, Copy { place, state });
        }
        true
    }

    /// Gives up a move that has begun: the block moves later, to another place.
    pub fn give_up_move(&self, given_up: &Repair) {
        let mut ledger = self.lock();
        let donor = ledger.leaving.as_ref().map(|leaving| leaving.donor);
        let other = donor.and_then(|donor| self.other_than(given_up.block, donor));
        // Pages for that place may be on their way.
        self.vacate(&mut ledger, [given_up.to]);
        if let (Some(leaving), Some(other)) = (&mut ledger.leaving, other) {
            leaving.moves.push_back(Move {
                block: given_up.block,
                other: other.place.donor,
                to: None,
            });
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
    /// Gives back a place that was taken. What was written there stays.
    fn give_back(&mut self, place: Option<(Place, bool)>) {
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
