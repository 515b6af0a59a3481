//! Which copies of a block may be read, and which are written: the state that the threads of a
//! pager share, as a pure state machine without I/O or time.
//!
//! A copy is *valid*, *being filled* or *stale*; a donor is *in use* or *out*. A copy is read only
//! if it is valid and its donor is in use.
//!
//! ```text
//! donor: in use -- lost, stalled --> out             only if every block keeps a readable copy
//!        out -- back with its memory --> in use      all its copies became stale before
//! copy:  valid -- its donor returns --> stale
//!        stale -- repair begins --> being filled     from here on it receives all write-backs
//!        being filled -- 512 pages copied --> valid
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
//! out, or if the donor is in use again, that the copy was stale: threads read the donor's state
//! before the copy's, and a returning donor's copies become stale before the donor is in use.
//! An answer of a donor that went out after the request is valid as well: the page is held, so the
//! bytes there are those of the last write-back.

mod join;
mod leave;
mod room;
mod vacated;

use crate::placement::Place;
use join::Standing;
use leave::Leaving;
pub use leave::{LeaveError, NextMove};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
pub(crate) use vacated::Noted;
use vacated::{Epochs, Kept};

/// In a word, for each copy: the slot, as wide as that of the home table.
const SLOT_BITS: u32 = 23;
/// The donor's link, of which there are at most 64.
const DONOR_BITS: u32 = 6;
const STATE_SHIFT: u32 = SLOT_BITS + DONOR_BITS;
/// Bits of one copy.
const COPY_BITS: u32 = STATE_SHIFT + 2;

const _: () = assert!(2 * COPY_BITS <= u64::BITS);

/// Limit of donors.
pub const DONORS_MAX: usize = 1 << DONOR_BITS;

/// What a copy is good for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CopyState {
    /// It has every page that was written back.
    Valid,
    /// It receives write-backs; pages written before are being copied.
    Filling,
    /// It has missed write-backs.
    Stale,
    /// It is a slot that was never written: all zero.
    Empty,
}

/// A copy of a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Copy {
    /// Its place.
    pub place: Place,
    /// Its state.
    pub state: CopyState,
}

impl Copy {
    fn to_bits(self) -> u64 {
        let state = match self.state {
            CopyState::Valid => 0,
            CopyState::Filling => 1,
            CopyState::Stale => 2,
            CopyState::Empty => 3,
        };
        state << STATE_SHIFT | u64::from(self.place.donor) << SLOT_BITS | u64::from(self.place.slot)
    }

    fn from_bits(bits: u64) -> Self {
        let field = |shift: u32, width: u32| {
            u32::try_from(bits >> shift & ((1 << width) - 1)).expect("fewer than 32 bits")
        };
        Self {
            place: Place {
                donor: u8::try_from(field(SLOT_BITS, DONOR_BITS)).expect("6 bits"),
                slot: field(0, SLOT_BITS),
            },
            state: match field(STATE_SHIFT, 2) {
                0 => CopyState::Valid,
                1 => CopyState::Filling,
                2 => CopyState::Stale,
                _ => CopyState::Empty,
            },
        }
    }
}

fn to_word([first, second]: [Copy; 2]) -> u64 {
    first.to_bits() | second.to_bits() << COPY_BITS
}

fn from_word(word: u64) -> [Copy; 2] {
    [word, word >> COPY_BITS].map(Copy::from_bits)
}

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
    /// The donor that leaves.
    leaving: Option<Leaving>,
    /// Places that copies have left, and that are not used yet.
    kept: Kept,
}

impl Ledger {
    fn standing(&self, donor: u8) -> Standing {
        self.loans[usize::from(donor)].standing
    }

    /// Returns whether a donor gets no copy, from the start of its drain until it has left, or the
    /// drain is given up.
    fn is_leaving(&self, donor: u8) -> bool {
        let leaving = self.leaving.as_ref();
        leaving.is_some_and(|leaving| leaving.donor == donor)
            || self.standing(donor) == Standing::Emptied
    }
}

/// The copies of all blocks, and the donors.
#[derive(Debug)]
pub struct Copies {
    words: Box<[AtomicU64]>,
    /// For each donor, its zone. Changes with the ledger, when a donor joins.
    zones: Box<[AtomicU8]>,
    /// For each donor, whether it is out.
    out: Box<[AtomicBool]>,
    /// Number of changes of donors.
    changes: AtomicU32,
    /// How far the threads are with places that copies have left.
    epochs: Epochs,
    /// Orders all changes.
    ledger: Mutex<Ledger>,
}

/// Why a donor cannot go out: a block has its only readable copy there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LastCopy;

/// A copy to be filled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Repair {
    /// The block.
    pub block: u32,
    /// The valid copy.
    pub from: Place,
    /// The copy to be filled.
    pub to: Place,
    /// Whether that is all zero.
    pub is_empty: bool,
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
        assert!(slots.len() <= DONORS_MAX, "{} donors", slots.len());
        assert_eq!(slots.len(), zones.len(), "each donor has a zone");
        let limit = 1 << SLOT_BITS;
        assert!(slots.iter().all(|&slots| slots <= limit), "{slots:?} slots");
        let valid = |place| Copy {
            place,
            state: CopyState::Valid,
        };
        let words = places.iter().map(|pair| to_word(pair.map(valid)));
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
            words: words.map(AtomicU64::new).collect(),
            zones: zones.iter().copied().map(AtomicU8::new).collect(),
            out: slots.iter().map(|_| AtomicBool::new(false)).collect(),
            changes: AtomicU32::new(0),
            epochs: Epochs::default(),
            ledger: Mutex::new(ledger),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.words.len()).expect("23 bits")
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

    /// Returns the copies of a block.
    #[must_use]
    pub fn of(&self, block: u32) -> [Copy; 2] {
        // Acquire: pairs with the Release of `set`.
        from_word(self.words[block as usize].load(Ordering::Acquire))
    }

    /// Returns the places from which a block may be read, the primary one first.
    #[must_use]
    pub fn readable(&self, block: u32) -> [Option<Place>; 2] {
        let mut copies = self.of(block);
        loop {
            let usable = copies.map(|copy| !self.is_out(copy.place.donor));
            // After the donors' states.
            let now = self.of(block);
            if now.map(|copy| copy.place) == copies.map(|copy| copy.place) {
                return [0, 1].map(|at| {
                    let is_readable = usable[at] && now[at].state == CopyState::Valid;
                    is_readable.then_some(now[at].place)
                });
            }
            copies = now;
        }
    }

    /// Returns the places to which a page of a block is written back. Only for the thread that
    /// repairs.
    #[must_use]
    pub fn writable(&self, block: u32) -> [Option<Place>; 2] {
        self.of(block).map(|copy| {
            let receives = matches!(copy.state, CopyState::Valid | CopyState::Filling);
            (receives && !self.is_out(copy.place.donor)).then_some(copy.place)
        })
    }

    fn set(&self, block: u32, copies: [Copy; 2]) {
        self.words[block as usize].store(to_word(copies), Ordering::Release);
    }

    fn is_valid(&self, copy: Copy) -> bool {
        copy.state == CopyState::Valid && !self.is_out(copy.place.donor)
    }

    /// Stops the use of a donor. From then on nothing is read from it, and write-backs complete
    /// without it. Returns false if it was out already.
    ///
    /// # Errors
    ///
    /// [`LastCopy`]: then nothing has changed.
    pub fn exclude(&self, donor: u8) -> Result<bool, LastCopy> {
        let _changes = self.lock();
        if self.is_out(donor) {
            return Ok(false);
        }
        let here = |copy: Copy| copy.place.donor == donor && copy.state == CopyState::Valid;
        let is_last = |[first, second]: [Copy; 2]| {
            (here(first) && !self.is_valid(second)) || (here(second) && !self.is_valid(first))
        };
        if (0..self.blocks()).any(|block| is_last(self.of(block))) {
            return Err(LastCopy);
        }
        self.out[usize::from(donor)].store(true, Ordering::Release);
        self.note_change();
        Ok(true)
    }

    /// Records that a donor that is out will not return, so that its copies get other places.
    pub fn lose(&self, donor: u8) {
        let mut ledger = self.lock();
        let standing = &mut ledger.loans[usize::from(donor)].standing;
        if *standing != Standing::Absent {
            *standing = Standing::Lost;
        }
        self.note_change();
    }

    /// Returns whether a donor will not return.
    #[must_use]
    pub fn is_lost(&self, donor: u8) -> bool {
        matches!(
            self.lock().standing(donor),
            Standing::Lost | Standing::Absent
        )
    }

    /// Uses a donor again that was out: all its copies are stale, until they are filled. The caller
    /// repairs, and has no request to this donor outstanding. Returns false if it is lost, or is
    /// not out.
    pub fn readmit(&self, donor: u8) -> bool {
        let mut ledger = self.lock();
        if !ledger.standing(donor).may_be_used() || !self.is_out(donor) {
            return false;
        }
        ledger.loans[usize::from(donor)].standing.use_again();
        for block in 0..self.blocks() {
            let copies = self.of(block);
            let stale = copies.map(|mut copy| {
                if copy.place.donor == donor {
                    copy.state = CopyState::Stale;
                }
                copy
            });
            if stale != copies {
                self.set(block, stale);
            }
        }
        // Release: a thread that finds the donor in use finds its copies stale.
        self.out[usize::from(donor)].store(false, Ordering::Release);
        self.note_change();
        true
    }

    /// Begins the next repair, from this block on: the first copy that is stale, on a donor in use,
    /// with a valid other copy. A copy on a lost donor gets another place if a donor has room. The
    /// copy receives write-backs from then on. Copies on a donor that leaves are not filled: they
    /// are moved.
    pub fn begin_repair(&self, from: u32) -> Option<Repair> {
        let mut ledger = self.lock();
        self.reclaim(&mut ledger);
        (from..self.blocks()).find_map(|block| {
            let mut copies = self.of(block);
            for (at, other) in [(0, 1), (1, 0)] {
                let donor = copies[at].place.donor;
                if self.is_valid(copies[at]) || !self.is_valid(copies[other]) {
                    continue;
                }
                if ledger.standing(donor) == Standing::Lost {
                    let other = copies[other].place.donor;
                    let free = self.free_place(&mut ledger, other);
                    // A block without a second copy comes before one that moves.
                    let free = free.or_else(|| self.reserved_place(&mut ledger, other));
                    let Some((place, is_empty)) = free else {
                        continue;
                    };
                    let state = match is_empty {
                        true => CopyState::Empty,
                        false => CopyState::Stale,
                    };
                    copies[at] = Copy { place, state };
                } else if self.is_out(donor) || ledger.is_leaving(donor) {
                    continue;
                }
                let repair = Repair {
                    block,
                    from: copies[other].place,
                    to: copies[at].place,
                    is_empty: copies[at].state == CopyState::Empty,
                };
                copies[at].state = CopyState::Filling;
                self.set(block, copies);
                return Some(repair);
            }
            None
        })
    }

    /// Ends a repair whose pages are all copied: the copy is valid. Returns false if its donor went
    /// out in the meantime; the copy stays invalid then.
    pub fn end_repair(&self, repair: &Repair) -> bool {
        let _changes = self.lock();
        if self.is_out(repair.to.donor) {
            return false;
        }
        let copies = self.of(repair.block).map(|mut copy| {
            if copy.place == repair.to && copy.state == CopyState::Filling {
                copy.state = CopyState::Valid;
            }
            copy
        });
        self.set(repair.block, copies);
        true
    }

    /// Returns the number of blocks with fewer than two readable copies.
    #[must_use]
    pub fn degraded(&self) -> u32 {
        let is_degraded = |block: &u32| self.readable(*block).contains(&None);
        let count = (0..self.blocks()).filter(is_degraded).count();
        u32::try_from(count).expect("23 bits")
    }
}
