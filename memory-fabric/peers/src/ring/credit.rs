//! The value with which a WRITE notifies.

use super::{NOTES_MAX, RING_BYTES};

/// Marks a credit.
const CREDIT: u32 = 1 << 31;

/// Bits of a number of bytes.
const BYTES_BITS: u32 = 20;

const _: () = assert!(RING_BYTES < 1 << BYTES_BITS && NOTES_MAX < 1 << (31 - BYTES_BITS));

/// What a WRITE means.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Note {
    /// So many bytes are in the ring behind those before.
    Bytes(usize),
    /// The other end has read so many bytes of so many WRITEs.
    Credit {
        /// Bytes.
        bytes: usize,
        /// WRITEs.
        notes: usize,
    },
}

impl Note {
    /// The value. The numbers are no larger than the ring and the limit of WRITEs.
    pub(super) fn encode(self) -> u32 {
        let small = |number: usize| u32::try_from(number).expect("a number with a limit");
        match self {
            Self::Bytes(bytes) => small(bytes),
            Self::Credit { bytes, notes } => CREDIT | small(notes) << BYTES_BITS | small(bytes),
        }
    }

    /// What any value means; the numbers may be too large.
    pub(super) fn decode(value: u32) -> Self {
        let bytes = |value| usize::try_from(value).unwrap_or(usize::MAX);
        if value & CREDIT == 0 {
            return Self::Bytes(bytes(value));
        }
        Self::Credit {
            bytes: bytes(value & ((1 << BYTES_BITS) - 1)),
            notes: bytes((value & !CREDIT) >> BYTES_BITS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_values_survive() {
        let (bytes, notes) = (RING_BYTES, NOTES_MAX);
        for note in [
            Note::Bytes(1),
            Note::Bytes(bytes),
            Note::Credit { bytes, notes },
            Note::Credit { bytes: 0, notes: 1 },
        ] {
            assert_eq!(Note::decode(note.encode()), note);
        }
        // A hostile length is not taken for a small one.
        assert_eq!(Note::decode(0x7fff_ffff), Note::Bytes(0x7fff_ffff));
    }
}
