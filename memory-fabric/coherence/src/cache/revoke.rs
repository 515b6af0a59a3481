//! Giving up pages: to a writer, or to a reader.

use fabric_pages::page::PageIndex;

use super::Cache;
use super::blocks::Rights;
use super::word::{ALONE, DIRTY, OWNER, State, WRITTEN};
use crate::action::{CacheAction, Sink};
use crate::members::Member;
use crate::message::{Message, Number, Right};
use crate::mutation::mutated;
use crate::offence::{Offence, Violation};

impl<const PAGES: usize> Cache<PAGES> {
    pub(super) fn invalidate(
        &mut self,
        from: Member,
        page: PageIndex,
        number: Number,
        requester: Member,
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        self.check_revocation(from, page, number)?;
        let word = self.word(page);
        if word.is_alone() {
            return Err(Violation::NotHeld(page).of(from));
        }
        let message = Message::Ack { page, number };
        let ack = CacheAction::Send {
            to: requester,
            message,
        };
        let is_early = mutated!(self, AckBeforeZap);
        if is_early {
            sink.push(ack.clone());
        }
        match word.state() {
            State::Shared => {
                self.set_word(page, word.lost(State::Invalid));
                sink.push(CacheAction::Zap(page));
                sink.push(CacheAction::Free(page));
            }
            State::Cleaning => {
                self.set_word(page, word.lost(State::Invalid));
                sink.push(CacheAction::Free(page));
            }
            State::Putting => {
                self.set_word(page, word.lost(State::Gone));
                sink.push(CacheAction::Free(page));
            }
            // The copy was dropped while the message was on its way.
            _ => {}
        }
        if !is_early && !mutated!(self, DropAck) {
            sink.push(ack);
        }
        Ok(())
    }

    pub(super) fn fetch(
        &mut self,
        from: Member,
        page: PageIndex,
        number: Number,
        (requester, right): (Member, Right),
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        self.check_revocation(from, page, number)?;
        let word = self.word(page);
        if !word.is_alone() && !word.has(OWNER) {
            return Err(Violation::NotHeld(page).of(from));
        }
        let is_shared = right == Right::Shared;
        let message = Message::Data {
            page,
            number,
            dirty: word.has(DIRTY) && !mutated!(self, CallItClean),
            written: word.has(WRITTEN),
        };
        let send = CacheAction::SendPage {
            to: requester,
            message,
            free: !is_shared,
        };
        let (state, unmap) = match word.state() {
            State::Exclusive | State::Modified if is_shared => {
                (State::Shared, Some(CacheAction::WriteProtect(page)))
            }
            State::Shared if is_shared => (State::Shared, None),
            State::Cleaning if is_shared => (State::Cleaning, None),
            State::Putting if is_shared => (State::Putting, None),
            State::Putting => (State::Gone, None),
            State::Cleaning => (State::Invalid, None),
            _ => (State::Invalid, Some(CacheAction::Zap(page))),
        };
        self.set_word(
            page,
            if is_shared {
                word.with(state, OWNER, ALONE)
            } else {
                word.lost(state)
            },
        );
        let unmap = unmap.filter(|_| !(is_shared && mutated!(self, KeepWritable)));
        if mutated!(self, CopyBeforeZap) {
            sink.push(send);
            unmap.into_iter().for_each(|unmap| sink.push(unmap));
        } else {
            unmap.into_iter().for_each(|unmap| sink.push(unmap));
            sink.push(send);
        }
        Ok(())
    }

    /// Whether a revocation is of a transaction after the grant that it revokes.
    fn check_revocation(
        &self,
        from: Member,
        page: PageIndex,
        number: Number,
    ) -> Result<(), Offence> {
        if !matches!(self.rights(page), Some(Rights::Foreign | Rights::Split(_))) {
            return Err(Violation::NotHeld(page).of(from));
        }
        if number <= self.word(page).number() {
            return Err(Violation::NumberReused(page, number).of(from));
        }
        Ok(())
    }
}
