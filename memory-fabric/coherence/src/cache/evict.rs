//! Giving up pages that this node does not need.

use fabric_pages::page::PageIndex;

use super::blocks::Rights;
use super::word::{ALONE, DIRTY, OWNER, State, WANTED, Word};
use super::{Cache, Evict, Written};
use crate::action::{CacheAction, Sink};
use crate::members::Member;
use crate::message::{Left, Message, Number};
use crate::mutation::mutated;
use crate::offence::{Offence, Violation};

impl<const PAGES: usize> Cache<PAGES> {
    /// The evictor chose a page that this node does not need, and of which no write-back is unanswered,
    /// be it one that was cancelled: its answer would be taken for that of the next one.
    pub fn evict(&mut self, page: PageIndex, sink: &mut impl Sink<CacheAction>) -> Evict {
        match self.rights(page) {
            Some(Rights::Owned { .. }) => return Evict::Owned,
            Some(Rights::Split(_)) if !self.is_stopped => {}
            _ => return Evict::NotHere,
        }
        let word = self.word(page);
        let is_dirty = word.has(DIRTY);
        match word.state() {
            State::Shared | State::Exclusive | State::Modified => {}
            State::Invalid => return Evict::NotHere,
            _ => return Evict::InUse,
        }
        if self.find(page).is_some() {
            return Evict::InUse;
        }
        sink.push(CacheAction::Zap(page));
        let is_shared = word.state() == State::Shared;
        let is_dropped = is_shared && (!word.has(OWNER) || mutated!(self, DropOwned));
        let alone = if is_shared { 0 } else { ALONE };
        if is_dirty && !is_dropped {
            self.set_word(page, word.with(State::Cleaning, alone, 0));
            let number = word.number();
            sink.push(CacheAction::WriteBack { page, number });
        } else if is_dropped {
            let state = if mutated!(self, DropWithoutWait) {
                State::Invalid
            } else {
                State::Dropping
            };
            self.set_word(page, word.lost(state));
            sink.push(CacheAction::Free(page));
            self.send_directory(page, Message::PutShared { page }, sink);
            sink.push(CacheAction::Dropped(page));
        } else {
            self.put(
                page,
                word.with(word.state(), alone, 0),
                Left::Unchanged,
                sink,
            );
        }
        Evict::Started
    }

    fn put(&mut self, page: PageIndex, word: Word, left: Left, sink: &mut impl Sink<CacheAction>) {
        self.set_word(page, word.with(State::Putting, 0, 0));
        let number = word.number();
        self.send_directory(page, Message::Put { page, number, left }, sink);
        sink.push(CacheAction::PutDeadline { page, number });
        if mutated!(self, FreeOnPut) {
            sink.push(CacheAction::Free(page));
        }
    }

    /// The drop of a shared copy is done: all actions before [`CacheAction::Dropped`].
    pub fn dropped(&mut self, page: PageIndex, sink: &mut impl Sink<CacheAction>) {
        let word = self.word(page);
        if word.state() == State::Dropping {
            self.end(page, word, sink);
        }
    }

    /// The page is gone from this node; its waiters try again.
    fn end(&mut self, page: PageIndex, word: Word, sink: &mut impl Sink<CacheAction>) {
        let next = word.lost(State::Invalid);
        self.set_word(page, next.with(State::Invalid, 0, WANTED));
        if word.has(WANTED) {
            sink.push(CacheAction::Wake(page));
        }
    }

    /// A write-back ended, which means nothing if it was cancelled.
    ///
    /// # Errors
    /// When the home refused the bytes of the page's owner: the directory used a number twice.
    pub fn written(
        &mut self,
        page: PageIndex,
        written: Written,
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        if self.is_stopped || !matches!(self.rights(page), Some(Rights::Split(_))) {
            return Ok(());
        }
        let word = self.word(page);
        let left = match written {
            _ if word.state() != State::Cleaning => return Ok(()),
            Written::Home => Left::Home,
            Written::Zero => Left::Zero,
            Written::Refused => {
                let violation = Violation::NumberReused(page, word.number());
                return Err(violation.of(self.directory(page)));
            }
        };
        self.put(page, word, left, sink);
        Ok(())
    }

    pub(super) fn put_done(
        &mut self,
        from: Member,
        page: PageIndex,
        number: Number,
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        let word = self.word(page);
        if !self.is_putting(page) || word.number() != number {
            return Err(Violation::PutNotAsked(page).of(from));
        }
        if word.state() == State::Putting {
            sink.push(CacheAction::Free(page));
        }
        self.end(page, word, sink);
        Ok(())
    }

    /// The page is being given back: its bytes leave when the directory confirms it.
    #[must_use]
    pub fn is_putting(&self, page: PageIndex) -> bool {
        matches!(self.word(page).state(), State::Putting | State::Gone)
    }
}
