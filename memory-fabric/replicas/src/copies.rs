//! Which copies of a block may be read, and which are written: the state that the threads of a
//! pager share, as a pure state machine without I/O or time.
//!
//! A block has two copies, of which one is *needed*, or the pieces of a [stripe](crate::stripe), of
//! which as many are needed as there are pieces of data. What follows says copies for both.
//!
//! A copy is *valid*, *behind*, *stale*, or *being filled*; a donor is *in use* or *out*. A copy is
//! read only if it is valid and its donor is in use.
//!
//! ```text
//! donor: in use -- lost, stalled --> out             only if every block keeps a readable copy
//!        out -- back with its memory --> in use      its copies became behind or stale before
//! copy:  valid -- its donor returns --> behind       if it has [missed] a page meanwhile
//!        being filled -- its donor returns --> stale  or behind, if it was only catching up
//!        stale, behind -- repair begins --> being filled  from here on it receives all write-backs
//!        being filled -- the pages that donors have, or those it missed, copied --> valid
//!        (donor is lost) --> stale, in another place
//!        (donor leaves) --> valid, in another place; see [`leave`]
//! ```
//!
//! A donor that joins while the guest runs is one that is out, and returns with an empty loan; see
//! [`join`].
//!
//! **No wrong byte.** Three threads read: fault thread, prefetcher and evictor (for repairs). Only
//! the evictor writes. A write-back that completes without a donor completes after that donor is
//! out. A thread that requests a page holds it, so that no write-back of it is in progress, and it
//! has acquired the page's state after the last one completed. It therefore sees that the donor is
//! out, or if the donor is in use again, that the copy has missed it: threads read the donor's
//! state before the copy's, and a returning donor's copies become behind or stale before it is in
//! use.
//! An answer of a donor that went out after the request is valid as well: the page is held, so the
//! bytes there are those of the last write-back.

mod holes;
mod join;
mod leave;
mod missed;
mod rebalance;
mod room;
mod usage;
mod vacated;
mod word;

use crate::placement::Place;
use crate::stripe::Layout;
use fabric_homes::BLOCK_PAGES;
use holes::Holes;
pub(crate) use holes::{Has, bits_of};
use join::Standing;
use leave::Leaving;
pub use leave::{LeaveError, NextMove};
use missed::Missed;
pub(crate) use missed::{BlockWords, PageSet};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
pub use usage::Spared;
pub(crate) use vacated::Noted;
use vacated::{Epochs, Kept};
use word::DONOR_BITS;
pub use word::SLOTS_MAX;
pub use word::{Copy, CopyState};

/// Limit of donors.
pub const DONORS_MAX: usize = 1 << DONOR_BITS;

/// The slots of a donor that hold nothing.
#[derive(Clone, Debug)]
struct Loan {
    used: u32,
    slots: u32,
    /// Slots below `used` that hold nothing any more, but bytes that were copied there.
    spare: Vec<u32>,
    standing: Standing,
}

impl Loan {
    /// Returns the number of slots for another copy.
    fn room(&self) -> u32 {
        self.slots - self.used + u32::try_from(self.spare.len()).expect("23 bits")
    }

    /// Takes a slot, and whether it is all zero.
    fn take(&mut self) -> Option<(u32, bool)> {
        if self.used < self.slots {
            self.used += 1;
            return Some((self.used - 1, true));
        }
        Some((self.spare.pop()?, false))
    }
}

/// What changes under the lock.
#[derive(Debug)]
struct Ledger {
    loans: Vec<Loan>,
    /// What moves.
    leaving: Option<Leaving>,
    /// Places that copies have left, and that are not used yet.
    kept: Kept,
}

impl Ledger {
    fn standing(&self, donor: u8) -> Standing {
        self.loans[usize::from(donor)].standing
    }

    /// Returns the donors that do not return, a bit each.
    fn gone(&self) -> u64 {
        let is_gone = |loan: &Loan| matches!(loan.standing, Standing::Lost | Standing::Absent);
        let donors = self.loans.iter().enumerate();
        let gone = donors.filter(|(_, loan)| is_gone(loan));
        gone.fold(0, |bits, (donor, _)| bits | 1 << donor)
    }

    /// Returns whether a donor gets no copy, from the start of its drain until it has left, or the
    /// drain is given up.
    fn is_leaving(&self, donor: u8) -> bool {
        let leaving = self.leaving.as_ref();
        leaving.is_some_and(|leaving| leaving.donor == Some(donor))
            || self.standing(donor) == Standing::Emptied
    }
}

/// The copies of all blocks, and the donors.
#[derive(Debug)]
pub struct Copies {
    /// A word for each copy; those of a block follow each other. A change concerns one copy.
    words: Box<[AtomicU32]>,
    /// Copies of a block.
    width: usize,
    /// Copies without which a block cannot be read.
    needed: usize,
    /// For each donor, its zone. Changes with the ledger, when a donor joins.
    zones: Box<[AtomicU8]>,
    /// For each donor, whether it is out.
    out: Box<[AtomicBool]>,
    /// Number of changes of donors.
    changes: AtomicU32,
    /// How far the threads are with places that copies have left.
    epochs: Epochs,
    holes: Holes,
    missed: Missed,
    /// Orders all changes.
    ledger: Mutex<Ledger>,
}

/// Why a donor cannot go out: a block has a copy there that it needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LastCopy;

/// A copy to be filled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Repair {
    /// The block.
    pub block: u32,
    /// Which of its copies is filled.
    pub at: usize,
    /// A valid copy.
    pub from: Place,
    /// The copy to be filled.
    pub to: Place,
    /// Whether that is all zero.
    pub is_empty: bool,
    /// Whether only pages are copied that it has missed.
    pub catches_up: bool,
}

impl Copies {
    /// Creates the state of blocks whose copies are in these places and are all zero. `slots` has
    /// the blocks that each donor lends, `used` how many of them have a copy: the first ones;
    /// `zones` the zone that each is in.
    ///
    /// # Panics
    ///
    /// With more than [`DONORS_MAX`] donors, one without a zone, or slots beyond 16 TiB.
    #[must_use]
    pub fn new(places: &[[Place; 2]], slots: &[u32], used: &[u32], zones: &[u8]) -> Self {
        Self::with(places.as_flattened(), (2, 1), slots, used, zones)
    }

    /// The same for stripes of this layout, whose pieces are in these places: those of a block
    /// follow each other. Slots are those for pieces of a block, and each donor is in a zone of its
    /// own.
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new).
    #[must_use]
    pub fn striped(places: &[Place], layout: Layout, slots: &[u32], used: &[u32]) -> Self {
        let zones: Vec<u8> = (0..=u8::MAX).take(slots.len()).collect();
        let counts = (layout.pieces(), layout.data());
        Self::with(places, counts, slots, used, &zones)
    }

    fn with(
        places: &[Place],
        (width, needed): (usize, usize),
        slots: &[u32],
        used: &[u32],
        zones: &[u8],
    ) -> Self {
        assert!(slots.len() <= DONORS_MAX, "{} donors", slots.len());
        assert_eq!(slots.len(), zones.len(), "each donor has a zone");
        assert!(
            slots.iter().all(|&slots| slots <= SLOTS_MAX),
            "{slots:?} slots"
        );
        let valid = |place| Copy {
            place,
            state: CopyState::Valid,
        };
        let words = places.iter().map(|&place| valid(place).to_bits());
        let loans = slots.iter().zip(used).map(|(&slots, &used)| Loan {
            used,
            slots,
            spare: Vec::new(),
            standing: Standing::Member,
        });
        let ledger = Ledger {
            loans: loans.collect(),
            leaving: None,
            kept: Kept::default(),
        };
        Self {
            words: words.map(AtomicU32::new).collect(),
            width,
            needed,
            zones: zones.iter().copied().map(AtomicU8::new).collect(),
            out: slots.iter().map(|_| AtomicBool::new(false)).collect(),
            changes: AtomicU32::new(0),
            epochs: Epochs::default(),
            holes: Holes::default(),
            missed: Missed::default(),
            ledger: Mutex::new(ledger),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.words.len() / self.width).expect("23 bits")
    }

    /// Returns the number of copies of a block.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns how many copies a read of a block needs.
    #[must_use]
    pub fn needed(&self) -> usize {
        self.needed
    }

    /// Returns the layout of stripes; `None` for two copies.
    #[must_use]
    pub fn layout(&self) -> Option<Layout> {
        let count = |pieces| u8::try_from(pieces).ok();
        let (data, parity) = (count(self.needed)?, count(self.width - self.needed)?);
        Layout::new(data, parity).ok()
    }

    /// Returns whether a donor is out.
    #[must_use]
    pub fn is_out(&self, donor: u8) -> bool {
        // Acquire: pairs with the Release of `readmit`; see the module's documentation.
        self.out[usize::from(donor)].load(Ordering::Acquire)
    }

    /// Returns how often the state of a donor has changed.
    #[must_use]
    pub fn changes(&self) -> u32 {
        // Acquire: the reader then sees the change.
        self.changes.load(Ordering::Acquire)
    }

    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn word(&self, block: u32, at: usize) -> &AtomicU32 {
        debug_assert!(at < self.width);
        &self.words[block as usize * self.width + at]
    }

    /// Returns a copy of a block.
    #[must_use]
    pub fn copy(&self, block: u32, at: usize) -> Copy {
        // Acquire: pairs with the Release of `set`.
        Copy::from_bits(self.word(block, at).load(Ordering::Acquire))
    }

    /// Returns all copies of a block.
    pub fn all(&self, block: u32) -> impl Iterator<Item = Copy> {
        (0..self.width).map(move |at| self.copy(block, at))
    }

    /// Returns the first two copies of a block.
    #[must_use]
    pub fn of(&self, block: u32) -> [Copy; 2] {
        [0, 1].map(|at| self.copy(block, at))
    }

    /// Returns the place of a copy, if it may be read.
    #[must_use]
    pub fn readable_at(&self, block: u32, at: usize) -> Option<Place> {
        let mut copy = self.copy(block, at);
        loop {
            let is_usable = !self.is_out(copy.place.donor);
            // After the donor's state.
            let now = self.copy(block, at);
            if now.place == copy.place {
                let is_readable = is_usable && now.state == CopyState::Valid;
                return is_readable.then_some(now.place);
            }
            copy = now;
        }
    }

    /// Returns the places from which a block may be read, the primary one first; of a stripe, the
    /// first two.
    #[must_use]
    pub fn readable(&self, block: u32) -> [Option<Place>; 2] {
        [0, 1].map(|at| self.readable_at(block, at))
    }

    /// Returns the place of a copy, if a page of a block is written back there. Only for the thread
    /// that repairs.
    #[must_use]
    pub fn writable_at(&self, block: u32, at: usize) -> Option<Place> {
        let copy = self.copy(block, at);
        let receives = matches!(
            copy.state,
            CopyState::Valid | CopyState::Filling | CopyState::CatchingUp
        );
        (receives && !self.is_out(copy.place.donor)).then_some(copy.place)
    }

    fn set(&self, block: u32, at: usize, copy: Copy) {
        self.word(block, at)
            .store(copy.to_bits(), Ordering::Release);
    }

    fn is_valid(&self, copy: Copy) -> bool {
        copy.state == CopyState::Valid && !self.is_out(copy.place.donor)
    }

    /// Begins the next repair, from this block on: the first copy that is behind or stale, on a donor
    /// in use, with as many valid other copies as are needed. A copy on a lost donor gets another place
    /// if a donor has room. The copy receives write-backs from then on. Copies on a donor that leaves
    /// are not filled: they are moved.
    pub fn begin_repair(&self, from: u32) -> Option<Repair> {
        let mut ledger = self.lock();
        self.reclaim(&mut ledger);
        (from..self.blocks()).find_map(|block| {
            for at in 0..self.width {
                let mut copy = self.copy(block, at);
                if self.is_valid(copy) {
                    continue;
                }
                let donor = copy.place.donor;
                let mut valid = self.all(block).filter(|copy| self.is_valid(*copy));
                let Some(from) = valid.next().filter(|_| valid.count() + 1 >= self.needed) else {
                    continue;
                };
                if ledger.standing(donor) == Standing::Lost {
                    self.fill_holes(copy.place, 0, BLOCK_PAGES);
                    let Some((place, is_empty)) = self.other_place(&mut ledger, block, from) else {
                        continue;
                    };
                    let state = match is_empty {
                        true => CopyState::Empty,
                        false => CopyState::Stale,
                    };
                    self.missed.forget(copy.place);
                    copy = Copy { place, state };
                    self.begin_place(place);
                } else if self.is_out(donor) || ledger.is_leaving(donor) {
                    continue;
                }
                let catches_up = matches!(copy.state, CopyState::Behind | CopyState::CatchingUp);
                let repair = Repair {
                    block,
                    at,
                    from: from.place,
                    to: copy.place,
                    is_empty: copy.state == CopyState::Empty,
                    catches_up,
                };
                copy.state = match catches_up {
                    true => CopyState::CatchingUp,
                    false => {
                        self.missed.forget(copy.place);
                        CopyState::Filling
                    }
                };
                self.set(block, at, copy);
                return Some(repair);
            }
            None
        })
    }

    /// Ends a repair whose pages are all copied from these copies: it is valid. Returns false if one of
    /// them is not any more, its own donor went out in the meantime, which the caller may not have
    /// seen yet, or it was found to be wrong; the copy stays invalid then.
    pub fn end_repair(&self, repair: &Repair, sources: &[(usize, Place)]) -> bool {
        let _changes = self.lock();
        if self.is_out(repair.to.donor) || !self.are_valid(repair.block, sources) {
            return false;
        }
        let mut copy = self.copy(repair.block, repair.at);
        let is_filled = matches!(copy.state, CopyState::Filling | CopyState::CatchingUp);
        if copy.place != repair.to || !is_filled {
            return false;
        }
        self.missed.forget(copy.place);
        copy.state = CopyState::Valid;
        self.set(repair.block, repair.at, copy);
        true
    }

    /// Returns whether these copies of a block are valid. Write-backs complete without others: what was
    /// read from them may be old.
    pub(crate) fn are_valid(&self, block: u32, sources: &[(usize, Place)]) -> bool {
        sources.iter().all(|&(at, place)| {
            let copy = self.copy(block, at);
            copy.place == place && self.is_valid(copy)
        })
    }

    /// Returns the number of blocks with a copy that is not readable.
    #[must_use]
    pub fn degraded(&self) -> u32 {
        let is_degraded =
            |block: &u32| (0..self.width).any(|at| self.readable_at(*block, at).is_none());
        let count = (0..self.blocks()).filter(is_degraded).count();
        u32::try_from(count).expect("23 bits")
    }
}
