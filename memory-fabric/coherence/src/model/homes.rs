//! Pages on their way to their homes and back.

use fabric_pages::page::PageIndex;

use super::node::Write;
use super::world::{Step, World};
use crate::cache::{Evict, Written};
use crate::directory::block_index;
use crate::members::Member;
use crate::message::Number;
use crate::mutation::Mutation;

impl<const P: usize> World<P> {
    pub(super) fn home_read(&mut self, me: Member) {
        let node = &mut self.nodes[me.index()];
        let Some(page) = node.reads.pop_front() else {
            return;
        };
        node.frames[page.index()].home = Some(self.homes[page.index()].value);
        let mut actions = Vec::new();
        node.cache.home_read(page, &mut actions);
        self.queue_responses(me, actions);
    }

    /// A page is not written back again before its last write-back is answered.
    pub(super) fn may_evict(&self, me: Member, page: PageIndex) -> bool {
        let mixes = self.mutation == Some(Mutation::MixWriteBacks);
        mixes || !self.nodes[me.index()].is_writing(page)
    }

    pub(super) fn evict(&mut self, me: Member, page: PageIndex) {
        if !self.may_evict(me, page) {
            return;
        }
        let mut actions = Vec::new();
        let node = &mut self.nodes[me.index()];
        match node.cache.evict(page, &mut actions) {
            Evict::Owned => self.evict_owned(me, page),
            Evict::Started => self.queue_revocations(me, actions),
            Evict::InUse | Evict::NotHere => {}
        }
    }

    pub(super) fn write_back(&mut self, me: Member, page: PageIndex, number: Number) {
        match self.frame(me, page).value {
            None => self.fail("a freed page is written back"),
            Some(0) => self.written(me, page, Written::Zero),
            Some(value) => {
                let write = Write {
                    page,
                    number,
                    value,
                };
                self.nodes[me.index()].writes.push_back(write);
                self.note(Step::HomeWrite(me));
            }
        }
    }

    /// A home stores what a node writes back, unless it has newer bytes.
    pub(super) fn home_write(&mut self, me: Member, is_answered: bool) {
        let writes = &mut self.nodes[me.index()].writes;
        let Some(Write {
            page,
            number,
            value,
        }) = writes.front().copied()
        else {
            return;
        };
        let home = self.nodes[me.index()].cache.directory_of(page);
        let is_stored = match self.nodes[home.index()].directory.stores(me, page, number) {
            Ok(is_owner) => is_owner || self.mutation == Some(Mutation::HomeTakesAll),
            Err(offence) => return self.blame(home, offence),
        };
        let stored = &mut self.homes[page.index()];
        let is_taken =
            number.may_replace(stored.number) || self.mutation == Some(Mutation::HomeTakesAll);
        if is_taken && is_stored {
            stored.number = number;
            stored.value = value;
        }
        if !is_answered {
            return;
        }
        let written = if is_taken || !is_stored {
            Written::Home
        } else {
            Written::Refused
        };
        let node = &mut self.nodes[me.index()];
        node.writes.pop_front();
        node.answers.push_back((page, written));
        self.note(Step::HomeWritten(me, page));
    }

    pub(super) fn written(&mut self, me: Member, page: PageIndex, written: Written) {
        self.nodes[me.index()].forgotten.retain(|one| *one != page);
        if self.nodes[me.index()].owned[block_index::<P>(page).index()] {
            return self.written_owned(me, page, written);
        }
        let mut actions = Vec::new();
        let node = &mut self.nodes[me.index()];
        if let Err(offence) = node.cache.written(page, written, &mut actions) {
            self.blame(me, offence);
        }
        self.execute_all(me, actions);
    }

    pub(super) fn home_written(&mut self, me: Member, page: PageIndex) {
        let answers = &mut self.nodes[me.index()].answers;
        let place = answers.iter().position(|(written, _)| *written == page);
        if let Some((_, written)) = place.and_then(|place| answers.remove(place)) {
            self.written(me, page, written);
        }
    }
}
