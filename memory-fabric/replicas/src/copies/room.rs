//! Where there is room for a copy: what each donor holds, and which donors a copy may go to.

use super::{Copies, Copy, Ledger};
use crate::placement::Place;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// All donors, a bit each.
pub(super) const ALL: u64 = u64::MAX;

/// What the two copies of a block do not share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Apart {
    /// The zone of their donors.
    Zones,
    /// Only the donor.
    Donors,
}

impl Copies {
    /// Returns the number of a donor's zone.
    pub(super) fn zone(&self, donor: u8) -> u8 {
        // Relaxed: it changes only while the donor holds nothing.
        self.zones[usize::from(donor)].load(Ordering::Relaxed)
    }

    /// Returns what a donor has in common with those where a block with a copy there has no other
    /// one: its zone, or itself.
    pub(super) fn group(&self, apart: Apart, donor: u8) -> u8 {
        match apart {
            Apart::Zones => self.zone(donor),
            Apart::Donors => donor,
        }
    }

    /// Returns whether the copies of a block may be on both donors.
    pub(super) fn are_apart(&self, apart: Apart, one: u8, other: u8) -> bool {
        self.group(apart, one) != self.group(apart, other)
    }

    /// Returns how far apart the copies of a block are that these donors have: no move brings them
    /// closer.
    pub(super) fn apart_by(&self, one: u8, other: u8) -> Apart {
        match self.are_apart(Apart::Zones, one, other) {
            true => Apart::Zones,
            false => Apart::Donors,
        }
    }

    /// Takes a slot for a copy of a block that has its other one on a donor, and whether it is all
    /// zero: in another zone if one has room, else on another donor.
    pub(super) fn free_place(&self, ledger: &mut Ledger, other: u8) -> Option<(Place, bool)> {
        let place = self.free_place_apart(ledger, (Apart::Zones, ALL), other);
        place.or_else(|| self.free_place_apart(ledger, (Apart::Donors, ALL), other))
    }

    /// Takes a slot for a copy of a block that has a valid one `from`, and is to get another one in
    /// place of that of a lost donor.
    pub(super) fn other_place(
        &self,
        ledger: &mut Ledger,
        block: u32,
        from: Copy,
    ) -> Option<(Place, bool)> {
        let other = from.place.donor;
        let free = match self.width {
            2 => self.free_place(ledger, other),
            // A donor that is out may return: its pieces have only missed something.
            _ => self.free_place_for_piece(ledger, block, ALL),
        };
        // A block without a copy comes before one that moves.
        free.or_else(|| self.reserved_place(ledger, block, other))
    }

    /// Takes a slot of the donor with the most of them, of those in `targets` without a piece of a
    /// block.
    pub(super) fn free_place_for_piece(
        &self,
        ledger: &mut Ledger,
        block: u32,
        targets: u64,
    ) -> Option<(Place, bool)> {
        let has_piece = self
            .all(block)
            .fold(0_u64, |bits, copy| bits | 1 << copy.place.donor);
        let donors = (0..=u8::MAX).zip(&ledger.loans);
        let usable = donors.filter(|&(donor, loan)| {
            (targets & !has_piece) >> donor & 1 == 1
                && !self.is_out(donor)
                && !ledger.is_leaving(donor)
                && loan.room() > 0
        });
        let (donor, _) = usable.max_by_key(|(_, loan)| loan.room())?;
        let (slot, is_empty) = ledger.loans[usize::from(donor)].take()?;
        Some((Place { donor, slot }, is_empty))
    }

    /// Takes a slot of the donor with the most of them, in the zone with the most of them, of those
    /// donors that have a bit in `targets`.
    pub(super) fn free_place_apart(
        &self,
        ledger: &mut Ledger,
        (apart, targets): (Apart, u64),
        other: u8,
    ) -> Option<(Place, bool)> {
        let mut of_zones = [0_u32; 1 << u8::BITS];
        let usable = |ledger: &Ledger, donor: u8| {
            let is_usable =
                targets >> donor & 1 == 1 && !ledger.is_leaving(donor) && !self.is_out(donor);
            let loan = &ledger.loans[usize::from(donor)];
            if is_usable { loan.room() } else { 0 }
        };
        let donors = || (0..=u8::MAX).take(self.zones.len());
        for donor in donors() {
            of_zones[usize::from(self.zone(donor))] += usable(ledger, donor);
        }
        let allowed = donors().filter(|&donor| self.are_apart(apart, donor, other));
        let allowed = allowed.map(|donor| (donor, usable(ledger, donor)));
        // Blocks of that zone can use the room of all others, so that this leaves the most choice.
        let (donor, _) = allowed
            .filter(|(_, room)| *room > 0)
            .max_by_key(|&(donor, room)| (of_zones[usize::from(self.zone(donor))], room))?;
        let (slot, is_empty) = ledger.loans[usize::from(donor)].take()?;
        Some((Place { donor, slot }, is_empty))
    }

    /// Returns the number of blocks with both copies in one zone, and both readable.
    #[must_use]
    pub fn in_one_zone(&self) -> u32 {
        // Stripes know no zones.
        let is_in_one = |block: &u32| match self.readable(*block) {
            _ if self.width > 2 => false,
            [Some(first), Some(second)] => !self.are_apart(Apart::Zones, first.donor, second.donor),
            _ => false,
        };
        let count = (0..self.blocks()).filter(is_in_one).count();
        u32::try_from(count).expect("23 bits")
    }

    /// Returns the number of blocks for which a donor has room.
    #[must_use]
    pub fn room_at(&self, donor: u8) -> u32 {
        self.lock().loans[usize::from(donor)].room()
    }

    /// Returns the number of blocks whose first copy is on a donor, valid or not.
    #[must_use]
    pub fn first_copies_at(&self, donor: u8) -> u32 {
        let is_there = |block: &u32| self.copy(*block, 0).place.donor == donor;
        u32::try_from((0..self.blocks()).filter(is_there).count()).expect("23 bits")
    }

    /// Returns the number of blocks with a copy on a donor, valid or not.
    #[must_use]
    pub fn blocks_at(&self, donor: u8) -> u32 {
        let is_there = |block: &u32| self.all(*block).any(|copy| copy.place.donor == donor);
        u32::try_from((0..self.blocks()).filter(is_there).count()).expect("23 bits")
    }

    /// Returns the number of blocks by the donors of their copies, valid or not, the primary one
    /// first: each block is counted once, also while copies move.
    #[must_use]
    pub fn by_donors(&self) -> BTreeMap<Vec<u8>, u32> {
        let mut found: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
        for block in 0..self.blocks() {
            let donors = self.all(block).map(|copy| copy.place.donor).collect();
            *found.entry(donors).or_default() += 1;
        }
        found
    }
}
