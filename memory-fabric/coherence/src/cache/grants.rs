//! From the grant of a page to its unblock.

use fabric_pages::page::PageIndex;

use super::Cache;
use super::blocks::Rights;
use super::word::{DIRTY, State, WRITTEN, Word};
use crate::action::{Bytes, CacheAction, Sink};
use crate::members::Member;
use crate::message::{Grant, HOLD_MAX, Right, Source, Want};
use crate::mutation::mutated;
use crate::offence::{Offence, Violation};

impl<const PAGES: usize> Cache<PAGES> {
    /// The bytes of [`CacheAction::ReadHome`] are here.
    pub fn home_read(&mut self, page: PageIndex, sink: &mut impl Sink<CacheAction>) {
        if let Some(place) = self.find(page)
            && let Some(pending) = &mut self.pending[place]
        {
            pending.home_was_read();
            self.try_complete(place, sink);
        }
    }

    /// The minimum hold of a page is over.
    pub fn released(&mut self, page: PageIndex, sink: &mut impl Sink<CacheAction>) {
        if let Some(place) = self.find(page)
            && self.is_held(place)
            && !self.is_protected
        {
            self.unblock(place, sink);
        }
    }

    /// This node got the starvation token, or gives it back. While it has the token, pages that it
    /// gets stay.
    pub fn protect(&mut self, is_protected: bool, sink: &mut impl Sink<CacheAction>) {
        self.is_protected = is_protected;
        for place in 0..self.pending.len() {
            if !is_protected && self.is_held(place) {
                self.unblock(place, sink);
            }
        }
    }

    pub(super) fn granted(
        &mut self,
        from: Member,
        grant: Grant,
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        let page = grant.page;
        let word = self.word(page);
        let not_asked = Violation::GrantNotAsked(page).of(from);
        let place = self.find(page).ok_or(not_asked)?;
        let is_owned = !matches!(self.rights(page), Some(Rights::Foreign | Rights::Split(_)));
        let has_own = grant.source != Source::Own || word.state() == State::Shared;
        if is_owned || !has_own {
            return Err(not_asked);
        }
        let sender = match grant.source {
            Source::Member(owner) => grant.acks.with(owner),
            _ => grant.acks,
        };
        if sender.contains(self.me) || !sender.is_within(self.members) {
            return Err(Violation::UnknownMember(page).of(from));
        }
        if grant.number <= word.number() {
            return Err(Violation::NumberReused(page, grant.number).of(from));
        }
        let Some(pending) = &mut self.pending[place] else {
            return Err(not_asked);
        };
        pending.granted(from, grant)?;
        let unblock = pending.unblock();
        if !pending.missing().is_empty() {
            let number = grant.number;
            sink.push(CacheAction::AnswerDeadline { page, number });
        }
        if grant.source == Source::Home {
            sink.push(CacheAction::ReadHome(page));
        }
        if mutated!(self, UnblockOnGrant)
            && let Some(message) = unblock
        {
            self.send_directory(page, message, sink);
        }
        self.try_complete(place, sink);
        Ok(())
    }

    /// Installs the page when grant, bytes and acknowledgements are here.
    pub(super) fn try_complete(&mut self, place: usize, sink: &mut impl Sink<CacheAction>) {
        let ignore_acks = mutated!(self, IgnoreAcks);
        let Some(pending) = &mut self.pending[place] else {
            return;
        };
        let Some(grant) = pending.complete(ignore_acks) else {
            return;
        };
        pending.is_installing = true;
        let bytes = match grant.source {
            Source::Zero => Bytes::Zero,
            Source::Home => Bytes::Home,
            Source::Member(owner) => Bytes::Member(owner),
            Source::Own => Bytes::Here,
        };
        sink.push(CacheAction::Install {
            page: grant.page,
            writable: pending.want != Want::Read,
            bytes,
        });
    }

    /// [`CacheAction::Install`] is done.
    pub fn installed(&mut self, page: PageIndex, sink: &mut impl Sink<CacheAction>) {
        let Some(place) = self.find(page).filter(|_| !self.is_stopped) else {
            return;
        };
        let Some(pending) = &mut self.pending[place] else {
            return;
        };
        let Some(grant) = pending
            .grant
            .filter(|_| pending.is_installing && !pending.is_held)
        else {
            return;
        };
        pending.is_held = true;
        let is_dirty = pending.data.is_some_and(|data| data.dirty);
        let (state, flags) = match grant.right {
            // The owner keeps the duty to write the page back.
            Right::Shared => (State::Shared, 0),
            Right::Exclusive if pending.want != Want::Read => (State::Modified, DIRTY | WRITTEN),
            Right::Exclusive if is_dirty => (State::Exclusive, DIRTY),
            Right::Exclusive => (State::Exclusive, 0),
        };
        self.set_word(page, Word::new(state, flags, grant.number));
        if self.is_protected {
            return;
        }
        if grant.hold == 0 || mutated!(self, NoHold) {
            self.unblock(place, sink);
        } else {
            let hold = grant.hold.min(HOLD_MAX);
            sink.push(CacheAction::Hold { page, hold });
        }
    }
}
