//! A copy of a block as a word.

use crate::placement::Place;

/// In a copy's word: the slot, as wide as that of the home table.
const SLOT_BITS: u32 = 23;
/// The donor's link, of which there are at most 64.
pub(super) const DONOR_BITS: u32 = 6;
/// Limit of the slots that are used at a donor.
pub const SLOTS_MAX: u32 = 1 << SLOT_BITS;
const STATE_SHIFT: u32 = SLOT_BITS + DONOR_BITS;
const STATE_BITS: u32 = 3;

const _: () = assert!(STATE_SHIFT + STATE_BITS <= u32::BITS);

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
    /// It has missed write-backs, of which it is known which ones: its donor was out meanwhile.
    Behind,
    /// It receives write-backs; those that it has missed are being copied.
    CatchingUp,
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
    pub(super) fn to_bits(self) -> u32 {
        let state = match self.state {
            CopyState::Valid => 0,
            CopyState::Filling => 1,
            CopyState::Stale => 2,
            CopyState::Empty => 3,
            CopyState::Behind => 4,
            CopyState::CatchingUp => 5,
        };
        state << STATE_SHIFT | u32::from(self.place.donor) << SLOT_BITS | self.place.slot
    }

    pub(super) fn from_bits(bits: u32) -> Self {
        let field = |shift: u32, width: u32| bits >> shift & ((1 << width) - 1);
        Self {
            place: Place {
                donor: u8::try_from(field(SLOT_BITS, DONOR_BITS)).expect("6 bits"),
                slot: field(0, SLOT_BITS),
            },
            state: match field(STATE_SHIFT, STATE_BITS) {
                0 => CopyState::Valid,
                1 => CopyState::Filling,
                2 => CopyState::Stale,
                3 => CopyState::Empty,
                4 => CopyState::Behind,
                _ => CopyState::CatchingUp,
            },
        }
    }
}
