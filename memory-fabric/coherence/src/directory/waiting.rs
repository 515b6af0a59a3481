//! Requests that wait for a page or block: lists in one table, which never grows.

use fabric_pages::page::PageIndex;

use super::entry::NO_SLOT;
use crate::members::{MEMBERS_MAX, Member};
use crate::message::{Left, Number, Want};

/// A request of a member.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Request {
    pub(super) from: Member,
    pub(super) page: PageIndex,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Kind {
    Get { want: Want, early: bool },
    Put { number: Number, left: Left },
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Slot {
    request: Option<Request>,
    next: u16,
}

/// First and last slot of a list.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct List {
    pub(super) head: u16,
    pub(super) tail: u16,
}

impl List {
    pub(super) const EMPTY: Self = Self {
        head: NO_SLOT,
        tail: NO_SLOT,
    };
}

/// Requests that wait, and how many each member has open.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Waiting {
    slots: Vec<Slot>,
    free: u16,
    open: [u16; MEMBERS_MAX],
    limit: u16,
}

impl Waiting {
    /// Room for `limit` requests of each of `members` members.
    pub(super) fn new(members: u16, limit: u16) -> Self {
        let count = members.saturating_mul(limit).min(NO_SLOT - 1);
        let slot = |next| Slot {
            request: None,
            next: if next == count { NO_SLOT } else { next },
        };
        Self {
            slots: (1..=count).map(slot).collect(),
            free: if count == 0 { NO_SLOT } else { 0 },
            open: [0; MEMBERS_MAX],
            limit,
        }
    }

    pub(super) fn limit(&self) -> u16 {
        self.limit
    }

    /// Counts a request of `from`, unless it has too many open.
    pub(super) fn open(&mut self, from: Member) -> bool {
        let open = &mut self.open[from.index()];
        let fits = *open < self.limit;
        *open += u16::from(fits);
        fits
    }

    /// Counts that a request of `from` is done or void.
    pub(super) fn close(&mut self, from: Member) {
        let open = &mut self.open[from.index()];
        *open = open.saturating_sub(1);
    }

    /// Whether nobody has a request open.
    #[cfg(test)]
    pub(super) fn is_quiet(&self) -> bool {
        self.open.iter().all(|open| *open == 0)
    }

    /// Appends an open request to a list. There is a slot for each open request.
    pub(super) fn push(&mut self, list: &mut List, request: Request) {
        let place = self.free;
        let Some(slot) = self.slots.get_mut(usize::from(place)) else {
            debug_assert!(false, "a slot for each open request");
            return;
        };
        self.free = slot.next;
        *slot = Slot {
            request: Some(request),
            next: NO_SLOT,
        };
        match self.slots.get_mut(usize::from(list.tail)) {
            Some(last) => last.next = place,
            None => list.head = place,
        }
        list.tail = place;
    }

    /// Takes the first request of a list.
    pub(super) fn pop(&mut self, list: &mut List) -> Option<Request> {
        let place = list.head;
        let slot = self.slots.get_mut(usize::from(place))?;
        let request = slot.request.take();
        list.head = slot.next;
        if list.head == NO_SLOT {
            list.tail = NO_SLOT;
        }
        slot.next = self.free;
        self.free = place;
        request
    }
}
