//! The directory's word for one page of a split block.

use crate::members::{Member, MemberSet};
use crate::message::{Behind, HOLD_MAX, Number};

/// Who has copies of a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub(super) enum Copies {
    /// Nobody.
    None,
    /// The sharers, to read. One of them may be the owner, who answers for the bytes.
    Shared,
    /// The owner, to read and write.
    Exclusive,
}

/// No slot of the waiting requests.
pub(super) const NO_SLOT: u16 = u16::MAX;

const NOBODY: u8 = u8::MAX;
const ZERO_BEHIND: u8 = 1;
const MIGRATORY: u8 = 1 << 1;
const FROM_EXCLUSIVE: u8 = 1 << 2;
const OWNER_WRITTEN: u8 = 1 << 3;
const HEAT_SHIFT: u32 = 4;

/// What a page's heat rises to when it is lost too early for the first time. So it is held for the next
/// requests, too, by those who have not lost it: without that, each node would learn anew and by a loss
/// that others need the page.
const HEAT_CONTENDED: u8 = HEAT_MAX + 1 - HOLD_MAX;

/// The heat is in four bits.
const HEAT_MAX: u8 = 15;

/// State, owner, sharers, transaction and waiting requests of a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(C)]
pub(super) struct Entry {
    number_low: u32,
    number_high: u16,
    pub(super) sharers: MemberSet,
    /// First and last slot of the requests that wait for the page.
    pub(super) head: u16,
    pub(super) tail: u16,
    owner: u8,
    requester: u8,
    pub(super) copies: Copies,
    flags: u8,
}

const _: () = assert!(size_of::<Entry>() <= 16, "the budget of a split page");

impl Entry {
    /// A page without copies.
    pub(super) fn new(number: Number, behind: Behind) -> Self {
        let mut entry = Self {
            number_low: 0,
            number_high: 0,
            sharers: MemberSet::EMPTY,
            head: NO_SLOT,
            tail: NO_SLOT,
            owner: NOBODY,
            requester: NOBODY,
            copies: Copies::None,
            flags: 0,
        };
        entry.set_number(number);
        entry.set_behind(behind);
        entry
    }

    pub(super) fn number(&self) -> Number {
        let value = u64::from(self.number_high) << 32 | u64::from(self.number_low);
        Number::new(value).unwrap_or(Number::MAX)
    }

    pub(super) fn set_number(&mut self, number: Number) {
        let [a, b, c, d, e, f, ..] = number.value().to_le_bytes();
        self.number_low = u32::from_le_bytes([a, b, c, d]);
        self.number_high = u16::from_le_bytes([e, f]);
    }

    /// Who has the exclusive copy, or had it before others got shared ones.
    pub(super) fn owner(&self) -> Option<Member> {
        Member::at(self.owner)
    }

    pub(super) fn set_owner(&mut self, owner: Option<Member>) {
        self.owner = owner.map_or(NOBODY, Member::place);
    }

    /// Whose transaction is in progress.
    pub(super) fn requester(&self) -> Option<Member> {
        Member::at(self.requester)
    }

    pub(super) fn set_requester(&mut self, requester: Option<Member>) {
        self.requester = requester.map_or(NOBODY, Member::place);
    }

    pub(super) fn behind(&self) -> Behind {
        if self.flags & ZERO_BEHIND != 0 {
            Behind::Zero
        } else {
            Behind::Home
        }
    }

    pub(super) fn set_behind(&mut self, behind: Behind) {
        self.set_flag(ZERO_BEHIND, behind == Behind::Zero);
    }

    /// Readers of the page write it next: a read gets it exclusively.
    pub(super) fn is_migratory(&self) -> bool {
        self.flags & MIGRATORY != 0
    }

    pub(super) fn set_migratory(&mut self, is: bool) {
        self.set_flag(MIGRATORY, is);
    }

    /// The transaction in progress takes the page from an exclusive owner, who knows whether it
    /// wrote.
    pub(super) fn is_from_exclusive(&self) -> bool {
        self.flags & FROM_EXCLUSIVE != 0
    }

    pub(super) fn set_from_exclusive(&mut self, is: bool) {
        self.set_flag(FROM_EXCLUSIVE, is);
    }

    /// The owner wrote the page before it shared it, as it said to the requester.
    pub(super) fn has_owner_written(&self) -> bool {
        self.flags & OWNER_WRITTEN != 0
    }

    pub(super) fn set_owner_written(&mut self, has: bool) {
        self.set_flag(OWNER_WRITTEN, has);
    }

    /// Notes whether the requester lost the page, or another one of its access, before that progressed.
    pub(super) fn heat_by(&mut self, early: bool) {
        let heat = self.flags >> HEAT_SHIFT;
        let heat = if early {
            heat.max(HEAT_CONTENDED - 1) + 1
        } else {
            heat.saturating_sub(1)
        };
        self.flags = self.flags & ((1 << HEAT_SHIFT) - 1) | heat.min(HEAT_MAX) << HEAT_SHIFT;
    }

    /// The level of the minimum hold: 0 for none, 1 for one unit, doubled with each level.
    pub(super) fn hold(&self) -> u8 {
        match self.flags >> HEAT_SHIFT {
            0 => 0,
            heat => heat.saturating_sub(HEAT_CONTENDED) + 1,
        }
    }

    /// Whether no copy is left, no transaction in progress and no request waiting.
    pub(super) fn is_idle(&self) -> bool {
        self.requester().is_none() && self.head == NO_SLOT
    }

    /// Whether requests wait for the page.
    pub(super) fn has_waiting(&self) -> bool {
        self.head != NO_SLOT
    }

    /// All who have a copy.
    pub(super) fn holders(&self) -> MemberSet {
        match self.copies {
            Copies::None => MemberSet::EMPTY,
            Copies::Shared => self.sharers,
            Copies::Exclusive => self.owner().map_or(MemberSet::EMPTY, MemberSet::of),
        }
    }

    fn set_flag(&mut self, flag: u8, is: bool) {
        self.flags = if is {
            self.flags | flag
        } else {
            self.flags & !flag
        };
    }
}
