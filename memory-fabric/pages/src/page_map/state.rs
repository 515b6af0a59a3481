//! The state word of a page: its kind, flags, and the slot of its fingerprint.

use std::fmt;

const KIND_MASK: u32 = 0xf;
pub(super) const DIRTY: u32 = 1 << 4;
pub(super) const CONTENDED: u32 = 1 << 5;
pub(super) const LISTED: u32 = 1 << 6;
pub(super) const AHEAD: u32 = 1 << 7;
pub(super) const CHAINED: u32 = 1 << 8;
pub(super) const FLAG_BITS: u32 = 9;
/// The number of a fingerprint slot plus one, or 0, above the flags.
pub(super) const SLOT: u32 = !0 << FLAG_BITS;

/// Fingerprint slots that a state word can name.
pub const SLOTS_MAX: u32 = (1 << (u32::BITS - FLAG_BITS)) - 1;

/// The kind of a state, without flags.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Kind {
    /// All bytes are zero, and stored nowhere.
    Untouched = 0,
    /// The only valid bytes are at home.
    Remote = 1,
    /// A fault thread or the prefetcher waits for the bytes.
    Fetching = 2,
    /// A fault thread maps the page or changes its protection.
    Installing = 3,
    /// The bytes are local; the page is mapped, or a touch maps it with a minor fault.
    Resident = 4,
    /// Unmapped by the evictor to see whether it is touched again, or prefetched and not mapped
    /// yet.
    Probation = 5,
    /// The evictor is writing the bytes back.
    WritingBack = 6,
    /// The evictor is freeing the local bytes.
    Dropping = 7,
    /// The only valid bytes were at a home whose memory is lost.
    Lost = 8,
}

/// A state word: a [`Kind`] and flags.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct State(pub(super) u32);

impl State {
    /// Creates a state without flags.
    #[must_use]
    pub const fn new(kind: Kind) -> Self {
        Self(kind as u32)
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self.0 & KIND_MASK {
            0 => Kind::Untouched,
            1 => Kind::Remote,
            2 => Kind::Fetching,
            3 => Kind::Installing,
            4 => Kind::Resident,
            5 => Kind::Probation,
            6 => Kind::WritingBack,
            7 => Kind::Dropping,
            8 => Kind::Lost,
            // The word is private to this file, which stores kinds only.
            other => unreachable!("page state {other}"),
        }
    }

    /// Returns whether the local bytes differ from those at home.
    #[must_use]
    pub const fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// Returns whether a fault waits for the holder of the page.
    #[must_use]
    pub const fn is_contended(self) -> bool {
        self.0 & CONTENDED != 0
    }

    /// Returns whether the page is in one of the evictor's places.
    #[must_use]
    pub const fn is_listed(self) -> bool {
        self.0 & LISTED != 0
    }

    /// Returns whether the page was prefetched, and not touched since.
    #[must_use]
    pub const fn is_ahead(self) -> bool {
        self.0 & AHEAD != 0
    }

    /// Returns whether it is to be mapped along with the page before it.
    #[must_use]
    pub const fn is_chained(self) -> bool {
        self.0 & CHAINED != 0
    }

    /// Returns the slot of the fingerprint of the bytes at home.
    #[must_use]
    pub const fn fingerprint(self) -> Option<u32> {
        (self.0 >> FLAG_BITS).checked_sub(1)
    }

    /// Returns the same flags and slot with another kind.
    pub(super) const fn with_kind(self, kind: Kind) -> Self {
        Self((self.0 & !KIND_MASK) | kind as u32)
    }

    /// Returns another kind, with only the flag of the evictor's places, and no slot.
    pub(super) const fn only_listed(self, kind: Kind) -> Self {
        Self((self.0 & LISTED) | kind as u32)
    }

    /// Returns another kind with only these flags, and the slot.
    pub(super) const fn with_only(self, kind: Kind, flags: u32) -> Self {
        Self((self.0 & (flags | SLOT)) | kind as u32)
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dirty = if self.is_dirty() { "+dirty" } else { "" };
        let contended = if self.is_contended() {
            "+contended"
        } else {
            ""
        };
        let listed = if self.is_listed() { "+listed" } else { "" };
        let ahead = if self.is_ahead() { "+ahead" } else { "" };
        let chained = if self.is_chained() { "+chained" } else { "" };
        write!(
            f,
            "{:?}{dirty}{contended}{listed}{ahead}{chained}",
            self.kind()
        )?;
        if let Some(slot) = self.fingerprint() {
            write!(f, "+fingerprint {slot}")?;
        }
        Ok(())
    }
}
