//! The transactions of one page of a split block.

use fabric_pages::page::PageIndex;

use super::entry::{Copies, Entry};
use super::waiting::{Kind, List, Request, Waiting};
use crate::action::{DirectoryAction, Sink};
use crate::members::{Member, MemberSet};
use crate::message::{Behind, Grant, Left, Message, Number, Right, Source, Want};
use crate::mutation::{Switch, mutated};
use crate::offence::{Offence, Violation};

/// What a transaction needs besides the page's entry.
pub(super) struct Context<'a, S> {
    pub(super) waiting: &'a mut Waiting,
    pub(super) sink: &'a mut S,
    pub(super) switch: Switch,
}

impl<S: Sink<DirectoryAction>> Context<'_, S> {
    pub(super) fn send(&mut self, to: Member, message: Message) {
        self.sink.push(DirectoryAction::Send { to, message });
    }

    /// Serves an open request, or lets it wait behind the transaction in progress.
    pub(super) fn request(&mut self, entry: &mut Entry, request: Request) -> Result<(), Offence> {
        let is_put = matches!(request.kind, Kind::Put { .. });
        if is_put && mutated!(self, PutWhileBusy) {
            return self.serve(entry, request);
        }
        if entry.is_idle() {
            return self.serve(entry, request);
        }
        let mut list = List {
            head: entry.head,
            tail: entry.tail,
        };
        self.waiting.push(&mut list, request);
        (entry.head, entry.tail) = (list.head, list.tail);
        Ok(())
    }

    /// Takes the gets out of the waiting requests.
    pub(super) fn take_gets(&mut self, entry: &mut Entry) -> Vec<Member> {
        let mut gets = Vec::new();
        let mut list = List {
            head: entry.head,
            tail: entry.tail,
        };
        let mut others = List::EMPTY;
        while let Some(request) = self.waiting.pop(&mut list) {
            if matches!(request.kind, Kind::Get { .. }) {
                self.waiting.close(request.from);
                gets.push(request.from);
            } else {
                self.waiting.push(&mut others, request);
            }
        }
        (entry.head, entry.tail) = (others.head, others.tail);
        gets
    }

    fn serve(&mut self, entry: &mut Entry, request: Request) -> Result<(), Offence> {
        let Request { from, page, kind } = request;
        match kind {
            Kind::Get { want, early } => self.get(entry, from, page, want, early),
            Kind::Put { number, left } => self.put(entry, from, page, number, left),
        }
    }

    /// Serves waiting requests up to one that starts a transaction.
    fn serve_waiting(&mut self, entry: &mut Entry) -> Result<(), Offence> {
        while entry.requester().is_none() {
            let mut list = List {
                head: entry.head,
                tail: entry.tail,
            };
            let Some(request) = self.waiting.pop(&mut list) else {
                return Ok(());
            };
            (entry.head, entry.tail) = (list.head, list.tail);
            self.serve(entry, request)?;
        }
        Ok(())
    }

    fn get(
        &mut self,
        entry: &mut Entry,
        from: Member,
        page: PageIndex,
        want: Want,
        early: bool,
    ) -> Result<(), Offence> {
        let offence = |violation| Offence {
            peer: from,
            violation,
        };
        let has_copy = entry.holders().contains(from);
        let has_right = match want {
            Want::Read | Want::Write => has_copy,
            Want::Upgrade => has_copy && entry.copies == Copies::Exclusive,
        };
        if has_right {
            return Err(offence(Violation::AlreadyHeld(page)));
        }
        let next = entry.number().next();
        let mut number = next.ok_or(offence(Violation::NumbersExhausted(page)))?;
        if mutated!(self, ReuseNumber) {
            number = entry.number();
        }
        entry.heat_by(early);
        let behind = match entry.behind() {
            Behind::Zero => Source::Zero,
            Behind::Home => Source::Home,
        };
        let is_exclusive = entry.copies == Copies::Exclusive;
        let reads = want == Want::Read && !(is_exclusive && entry.is_migratory());
        let right = if reads && entry.copies != Copies::None {
            Right::Shared
        } else {
            Right::Exclusive
        };
        let others = entry.holders().without(from);
        let owner = entry.owner().filter(|owner| *owner != from);
        let is_own = has_copy || want == Want::Upgrade && mutated!(self, TrustUpgrade);
        let source = match owner {
            _ if is_own => Source::Own,
            Some(owner) => Source::Member(owner),
            None => behind,
        };
        let mut acks = MemberSet::EMPTY;
        if right == Right::Exclusive {
            let upgraded = want == Want::Upgrade && has_copy;
            let alone = owner.is_some_and(|owner| others == MemberSet::of(owner));
            if upgraded && alone && entry.has_owner_written() {
                entry.set_migratory(true);
            }
            acks = others;
            if mutated!(self, ForgetSharer)
                && let Some(first) = acks.first()
            {
                acks = acks.without(first);
            }
        }
        if let Source::Member(owner) = source {
            acks = acks.without(owner);
            let message = Message::Fetch {
                page,
                number,
                requester: from,
                right,
            };
            self.send(owner, message);
        }
        for sharer in acks.iter() {
            let message = Message::Invalidate {
                page,
                number,
                requester: from,
            };
            self.send(sharer, message);
        }
        let grant = Grant {
            page,
            number,
            right,
            source,
            acks,
            hold: entry.hold(),
        };
        self.send(from, Message::Grant(grant));
        self.sink
            .push(DirectoryAction::PageDeadline { page, number });

        entry.set_from_exclusive(is_exclusive);
        entry.set_number(number);
        entry.set_requester(Some(from));
        if right == Right::Exclusive {
            entry.copies = Copies::Exclusive;
            entry.set_owner(Some(from));
            entry.sharers = MemberSet::EMPTY;
        } else {
            // An owner that was exclusive stays the owner: it alone knows whether it wrote.
            entry.sharers = entry.holders().with(from);
            entry.copies = Copies::Shared;
        }
        if mutated!(self, SkipUnblock) {
            entry.set_requester(None);
        }
        Ok(())
    }

    fn put(
        &mut self,
        entry: &mut Entry,
        from: Member,
        page: PageIndex,
        number: Number,
        left: Left,
    ) -> Result<(), Offence> {
        let is_owner = entry.owner() == Some(from);
        let is_granted = match entry.copies {
            Copies::Exclusive if is_owner => number == entry.number(),
            _ => number <= entry.number(),
        };
        if !is_granted {
            let violation = Violation::NumberNotGranted(page, number);
            return Err(Offence {
                peer: from,
                violation,
            });
        }
        // Not the owner: the page was taken while the put was on its way.
        if is_owner {
            entry.set_owner(None);
            match left {
                Left::Unchanged => {}
                Left::Home if mutated!(self, ForgetWriteBack) => {}
                Left::Zero => entry.set_behind(Behind::Zero),
                Left::Home => entry.set_behind(Behind::Home),
            }
            if entry.copies == Copies::Exclusive {
                entry.copies = Copies::None;
            }
            remove_sharer(entry, from);
        }
        self.waiting.close(from);
        self.send(from, Message::PutDone { page, number });
        Ok(())
    }

    /// The sender dropped a clean copy. Not queued: nothing is sent for it, and a transaction in
    /// progress has already counted the sender or does not need it.
    pub(super) fn put_shared(
        &mut self,
        entry: &mut Entry,
        from: Member,
        page: PageIndex,
    ) -> Result<(), Offence> {
        if entry.owner() == Some(from) {
            return Err(Offence {
                peer: from,
                violation: Violation::DroppedOwned(page),
            });
        }
        remove_sharer(entry, from);
        Ok(())
    }

    pub(super) fn unblock(
        &mut self,
        entry: &mut Entry,
        from: Member,
        page: PageIndex,
        number: Number,
        written: bool,
    ) -> Result<(), Offence> {
        if mutated!(self, SkipUnblock) {
            self.waiting.close(from);
            return self.serve_waiting(entry);
        }
        if entry.requester() != Some(from) || entry.number() != number {
            return Err(Offence {
                peer: from,
                violation: Violation::UnblockNotAsked(page),
            });
        }
        if entry.is_from_exclusive() {
            entry.set_owner_written(written);
            if !written {
                entry.set_migratory(false);
            }
        }
        entry.set_from_exclusive(false);
        entry.set_requester(None);
        self.waiting.close(from);
        if entry.copies == Copies::Shared && entry.sharers.is_empty() {
            entry.copies = Copies::None;
        }
        self.serve_waiting(entry)
    }
}

/// Removes a sharer; during a transaction the last one is settled by its unblock.
fn remove_sharer(entry: &mut Entry, from: Member) {
    if entry.copies == Copies::Shared {
        entry.sharers = entry.sharers.without(from);
        if entry.sharers.is_empty() && entry.requester().is_none() {
            entry.copies = Copies::None;
        }
    }
}
