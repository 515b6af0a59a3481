//! Carrying out what the protocol asks a node to do, in order, each action before the next.

use fabric_coherence::message::Want;
use fabric_coherence::{Bytes, CacheAction, Message, Number, Written};
use fabric_pages::page::{PageBytes, PageIndex};
use fabric_peers::{HomeMessage, PeerMessage, Peers};

use crate::Failure;
use crate::engine::{Engine, Inbound, thread_time};
use crate::home::Found;

impl<P: Peers> Engine<P> {
    /// Carries out actions, and those that follow from them.
    pub(crate) fn carry_out(&mut self, mut actions: Vec<CacheAction>) -> Result<(), Failure> {
        for action in actions.drain(..) {
            self.carry(action)?;
        }
        self.spare_actions.push(actions);
        Ok(())
    }

    fn carry(&mut self, action: CacheAction) -> Result<(), Failure> {
        match action {
            CacheAction::Send { to, message } => {
                self.count(&message);
                self.send(to, message)
            }
            CacheAction::SendPage { to, message, free } => {
                let Message::Data { page, dirty, .. } = message else {
                    let page = PageIndex::new(0);
                    return Err(Failure::Defect("a page without a data message", page));
                };
                self.send_frame(to, PeerMessage::Coherence(message), page)?;
                self.stats.sent.increment();
                if free {
                    if dirty {
                        self.home.forget(page);
                    }
                    self.free(page);
                }
                Ok(())
            }
            CacheAction::Zap(page) => self.frames.zap(page),
            CacheAction::WriteProtect(page) => self.frames.protect(page),
            CacheAction::Map { page, writable } => {
                self.frames.map(page, writable)?;
                self.arrived(page)
            }
            CacheAction::Install {
                page,
                writable,
                bytes,
            } => self.install(page, writable, bytes),
            CacheAction::Wake(page) | CacheAction::Fail(page) => {
                self.woken(page);
                self.frames.wake(page)
            }
            CacheAction::Free(page) => {
                self.free(page);
                Ok(())
            }
            CacheAction::AnswerDeadline { page, number } => {
                let cache = &self.cache;
                let is_over = |(page, number)| cache.overdue(page, number).is_ok();
                self.answers.begin((page, number), self.now, is_over);
                Ok(())
            }
            CacheAction::PutDeadline { page, number } => {
                let cache = &self.cache;
                let is_over = |(page, number)| cache.put_unanswered(page, number).is_ok();
                self.puts.begin((page, number), self.now, is_over);
                Ok(())
            }
            CacheAction::ReadHome(page) => self.read_home(page),
            CacheAction::WriteBack { page, number } => self.write_back(page, number),
            CacheAction::Dropped(page) => {
                let mut actions = self.actions();
                self.cache.dropped(page, &mut actions);
                self.carry_out(actions)
            }
            CacheAction::Hold { page, hold } => {
                self.stats.holds.increment();
                self.hold(page, hold);
                Ok(())
            }
            CacheAction::SplitBlock(block) => {
                self.stats.blocks_split.increment();
                self.owned.stop(block);
                self.give_up_blocks()
            }
            CacheAction::OwnBlock { block, pages } => {
                self.stats.blocks_taken.increment();
                self.owned.start(block, &pages);
                self.keep_block(block);
                let mut actions = self.actions();
                self.cache.owned(block, &mut actions);
                self.carry_out(actions)
            }
        }
    }

    fn count(&self, message: &Message) {
        let stats = &self.stats;
        let counter = match message {
            Message::Get { want, .. } => match want {
                Want::Read => &stats.reads,
                Want::Write => &stats.writes,
                Want::Upgrade => &stats.upgrades,
            },
            Message::Ack { .. } => &stats.invalidated,
            _ => return,
        };
        counter.increment();
    }

    fn install(&mut self, page: PageIndex, writable: bool, bytes: Bytes) -> Result<(), Failure> {
        match bytes {
            Bytes::Zero => {
                self.stats.zeroes.increment();
                self.frames.install_zeroes(page, writable)?;
            }
            Bytes::Here => {
                self.stats.hot.count(page, true);
                self.frames.upgrade(page)?;
            }
            Bytes::Home => {
                self.stats.from_home.increment();
                self.install_inbound(page, writable, |inbound| inbound.from.is_none())?;
            }
            Bytes::Member(member) => {
                self.stats.from_member.increment();
                if let Some(pages) = self.stats.from_each.get(member.index()) {
                    pages.increment();
                }
                self.stats.hot.count(page, writable);
                let now = self.ticks(self.now);
                for (thread, since) in self.stats.waits.threads(page) {
                    let waited = now.saturating_sub(since);
                    self.stats.sources.count(thread, member, waited);
                }
                self.install_inbound(page, writable, |inbound| inbound.from == Some(member))?;
            }
        }
        self.arrived(page)?;
        let mut actions = self.actions();
        self.cache.installed(page, &mut actions);
        if self.token.is_some() {
            // The page is held anyway, and its thread progresses with it.
            self.hold(page, 1);
        }
        // A page that others lately waited for is held, and its unblock comes later.
        self.give_way.can_wait = true;
        let carried = self.carry_out(actions);
        self.give_way.can_wait = false;
        carried?;
        self.ask_ahead(page)
    }

    fn hold(&mut self, page: PageIndex, level: u8) {
        let now = self.ticks(self.now);
        self.progress.hold(page, level, now, thread_time);
    }

    fn install_inbound(
        &mut self,
        page: PageIndex,
        writable: bool,
        is_it: impl Fn(&Inbound) -> bool,
    ) -> Result<(), Failure> {
        let is_it = |inbound: &Inbound| inbound.page == page && is_it(inbound);
        let place = self.inbound.iter().position(is_it);
        let place = place.ok_or(Failure::Defect("no bytes for a grant", page))?;
        let inbound = self.inbound.swap_remove(place);
        let installed = self.frames.install(page, &inbound.bytes, writable);
        self.spare_pages.push(inbound.bytes);
        installed
    }

    /// Reads a page of a split or owned block from its home.
    pub(crate) fn read_home(&mut self, page: PageIndex) -> Result<(), Failure> {
        let home = self.home_of(page);
        if home != self.config.me {
            let message = PeerMessage::Home(HomeMessage::Read { page });
            self.send_peer(home, message)?;
            self.home_waits.begin(page, false);
            return Ok(());
        }
        let mut place = self.spare_page();
        match self.home.read(page, &mut self.frames) {
            Found::Here(bytes) => place.copy_from_slice(bytes),
            Found::Away => {
                self.spare_pages.push(place);
                return self.ask_depot(page, home);
            }
            Found::Nowhere => return Err(Failure::NotStored { peer: home, page }),
        }
        self.home_bytes(page, place)
    }

    /// The bytes of a page came from its home.
    pub(crate) fn home_bytes(
        &mut self,
        page: PageIndex,
        bytes: Box<PageBytes>,
    ) -> Result<(), Failure> {
        if let Some(writable) = self.owned.was_read(page) {
            self.stats.from_home.increment();
            let installed = self.frames.install(page, &bytes, writable);
            self.spare_pages.push(bytes);
            installed?;
            self.arrived(page)?;
            return self.give_up_blocks();
        }
        self.inbound.push(Inbound {
            page,
            from: None,
            bytes,
        });
        let mut actions = self.actions();
        self.cache.home_read(page, &mut actions);
        self.carry_out(actions)
    }

    /// Gives up blocks that were to be split, and can be now.
    fn give_up_blocks(&mut self) -> Result<(), Failure> {
        while let Some((block, pages)) = self.owned.stopped() {
            let mut actions = self.actions();
            self.cache.split(block, &pages, &mut actions);
            self.keep_block(block);
            self.carry_out(actions)?;
        }
        Ok(())
    }

    /// Writes an unmapped page to its home.
    pub(crate) fn write_back(&mut self, page: PageIndex, number: Number) -> Result<(), Failure> {
        if self.is_zero(page) {
            return self.written(page, Written::Zero);
        }
        self.stats.write_backs.increment();
        let home = self.home_of(page);
        if home != self.config.me {
            let message = PeerMessage::Home(HomeMessage::Write { page, number });
            self.send_frame(home, message, page)?;
            self.home_waits.begin(page, true);
            return Ok(());
        }
        // The bytes stay in the frame until it is freed.
        let written = self.store(page, number, None);
        self.written(page, written)
    }
}
