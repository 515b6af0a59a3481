//! What each step does.

use fabric_pages::page::PageIndex;

use super::node::{Frame, Mapped, Vcpu, Work};
use super::world::{Access, Item, Kind, Step, World, member};
use crate::action::{Bytes, CacheAction};
use crate::cache::Touch;
use crate::members::Member;
use crate::message::Message;
use crate::mutation::Mutation;
use crate::token::Granted;

impl<const P: usize> World<P> {
    /// Does a step that is possible.
    pub(super) fn apply(&mut self, step: Step) {
        match step {
            Step::Deliver(from, to, lane) => self.deliver(from, to, lane, false),
            Step::DeliverAgain(from, to, lane) => {
                self.budget.duplicates -= 1;
                self.deliver(from, to, lane, true);
            }
            Step::Reconnect(from, to) => self.reconnect(from, to),
            Step::Evictor(me) => {
                if let Some(action) = self.nodes[me.index()].evictor.pop_front() {
                    self.execute(me, action);
                }
            }
            Step::Responder(me) => {
                if let Some(action) = self.nodes[me.index()].responder.pop_front() {
                    self.execute(me, action);
                }
            }
            Step::HomeRead(me) => self.home_read(me),
            Step::HomeWrite(me) => self.home_write(me, true),
            Step::HomeWritten(me, page) => self.home_written(me, page),
            Step::HomeWriteUnanswered(me) => {
                self.budget.replayed_writes -= 1;
                self.home_write(me, false);
            }
            Step::HoldOver(me, page) => self.hold_over(me, page),
            Step::Policy(me) => self.policy_step(me),
            Step::HoldOverEarly(me, page) => {
                self.budget.early_releases -= 1;
                self.hold_over(me, page);
            }
            Step::Access(me, access) => {
                let node = &mut self.nodes[me.index()];
                node.accesses += 1;
                let last = u32::from(access.backwards) * u32::from(access.count - 1);
                let page = PageIndex::new(access.first + last);
                self.policy_runs(me);
                let work = Work {
                    access,
                    page,
                    had: 0,
                    lost: false,
                };
                self.run(me, work);
            }
            Step::Retry(me) => {
                if let Vcpu::Trying(work) = self.nodes[me.index()].vcpu {
                    self.run(me, work);
                }
            }
            Step::Evict(me, page) => {
                self.budget.evictions = self.budget.evictions.saturating_sub(1);
                self.evict(me, page);
            }
            Step::Prefetch(me, page) => {
                self.budget.prefetches = self.budget.prefetches.saturating_sub(1);
                let mut actions = Vec::new();
                let cache = &mut self.nodes[me.index()].cache;
                let touch = cache.touch(page, false, false, &mut actions);
                self.execute_all(me, actions);
                if touch == Touch::Owned {
                    self.touch_owned(me, page, false);
                }
            }
            Step::Sweep(block) => {
                self.budget.sweeps -= 1;
                // A sweep counts only if nothing has happened since the one before.
                for _ in 0..crate::directory::MERGE_SWEEPS {
                    self.sweep(block);
                }
            }
            Step::Crash(lost) => {
                self.budget.crashes -= 1;
                self.crashed = Some(lost);
                self.nodes[lost.index()].is_alive = false;
            }
            Step::Fence(me) => self.fence(me),
            Step::Rest(_) => {}
        }
    }

    pub(super) fn hold_over(&mut self, me: Member, page: PageIndex) {
        let node = &mut self.nodes[me.index()];
        node.holds.retain(|held| *held != page);
        let mut actions = Vec::new();
        node.cache.released(page, &mut actions);
        self.execute_all(me, actions);
    }

    pub(super) fn queue_responses(&mut self, me: Member, actions: Vec<CacheAction>) {
        for action in actions {
            self.nodes[me.index()].responder.push_back(action);
            self.note(Step::Responder(me));
        }
    }

    pub(super) fn queue_revocations(&mut self, me: Member, actions: Vec<CacheAction>) {
        for action in actions {
            self.nodes[me.index()].evictor.push_back(action);
            self.note(Step::Evictor(me));
        }
    }

    pub(super) fn node_receives(&mut self, from: Member, to: Member, item: &Item) {
        let node = &mut self.nodes[to.index()];
        if let Message::Data { page, .. } = item.message
            && let Some(frame) = node.frames.get_mut(page.index())
        {
            frame.peer = Some((from, item.value));
        }
        let mut actions = Vec::new();
        if let Err(offence) = node.cache.handle(from, &item.message, &mut actions) {
            self.blame(to, offence);
        }
        match item.message {
            Message::Invalidate { .. }
            | Message::Fetch { .. }
            | Message::Split { .. }
            | Message::BlockGrant { .. } => self.queue_revocations(to, actions),
            _ => self.queue_responses(to, actions),
        }
    }

    pub(super) fn execute_all(&mut self, me: Member, actions: Vec<CacheAction>) {
        for action in actions {
            self.execute(me, action);
        }
    }

    fn execute(&mut self, me: Member, action: CacheAction) {
        match action {
            CacheAction::Send { to, message } => self.send(me, to, message, 0),
            CacheAction::SendPage { to, message, free } => {
                let Message::Data { page, .. } = message else {
                    return self.fail("a page is sent without a data message");
                };
                let Some(value) = self.frame(me, page).value else {
                    return self.fail("a freed page is sent");
                };
                if free {
                    self.frame(me, page).value = None;
                }
                self.send(me, to, message, value);
            }
            CacheAction::Zap(page) => self.frame(me, page).mapped = Mapped::No,
            CacheAction::WriteProtect(page) => {
                let mapped = &mut self.frame(me, page).mapped;
                *mapped = (*mapped).min(Mapped::ReadOnly);
            }
            CacheAction::Map { page, writable } => self.map(me, page, writable),
            CacheAction::Install {
                page,
                writable,
                bytes,
            } => {
                let frame = self.frame(me, page);
                let value = match bytes {
                    Bytes::Zero => Some(0),
                    Bytes::Home => frame.home.take(),
                    Bytes::Member(from) => {
                        let peer = frame.peer.take().filter(|(peer, _)| *peer == from);
                        peer.map(|(_, value)| value)
                    }
                    Bytes::Here => frame.value,
                };
                frame.value = value;
                self.map(me, page, writable);
                let mut actions = Vec::new();
                let cache = &mut self.nodes[me.index()].cache;
                cache.installed(page, &mut actions);
                self.policy_installed(me, page);
                self.execute_all(me, actions);
                self.policy_asks_ahead(me, page);
            }
            CacheAction::Wake(page) | CacheAction::Fail(page) => self.wake(me, page),
            CacheAction::AnswerDeadline { .. } | CacheAction::PutDeadline { .. } => {}
            CacheAction::Free(page) => {
                let frame = self.frame(me, page);
                frame.value = None;
                if frame.mapped != Mapped::No {
                    self.fail("a mapped page is freed");
                }
            }
            CacheAction::ReadHome(page) => {
                self.nodes[me.index()].reads.push_back(page);
                self.note(Step::HomeRead(me));
            }
            CacheAction::WriteBack { page, number } => self.write_back(me, page, number),
            CacheAction::Dropped(page) => {
                let mut actions = Vec::new();
                let cache = &mut self.nodes[me.index()].cache;
                cache.dropped(page, &mut actions);
                self.execute_all(me, actions);
            }
            CacheAction::Hold { page, hold } if self.policy_holds(me, page, hold) => {}
            CacheAction::Hold { page, hold } => {
                self.nodes[me.index()].holds.push(page);
                self.note_later(Step::HoldOver(me, page), 1 << (hold - 1));
            }
            CacheAction::SplitBlock(block) => self.split_block(me, block),
            CacheAction::OwnBlock { block, pages } => self.own_block(me, block, &pages),
        }
    }

    pub(super) fn frame(&mut self, me: Member, page: PageIndex) -> &mut Frame {
        &mut self.nodes[me.index()].frames[page.index()]
    }

    pub(super) fn wake(&mut self, me: Member, page: PageIndex) {
        self.policy_woken(me, page);
        if self.nodes[me.index()].wake(page) {
            self.note(Step::Retry(me));
        }
    }

    pub(super) fn map(&mut self, me: Member, page: PageIndex, writable: bool) {
        let frame = self.frame(me, page);
        if frame.value.is_none() {
            return self.fail("a page is mapped whose bytes are not here");
        }
        frame.mapped = if writable {
            Mapped::Writable
        } else {
            frame.mapped.max(Mapped::ReadOnly)
        };
        self.check_writers(page);
        if let Vcpu::Blocked(work) = &mut self.nodes[me.index()].vcpu
            && work.page == page
        {
            work.had |= 1 << (page.number() - work.access.first);
        }
        self.wake(me, page);
    }

    /// A vCPU tries its access, up to the first page that it has to wait for.
    fn run(&mut self, me: Member, mut work: Work) {
        let Access {
            first,
            count,
            kind,
            backwards,
        } = work.access;
        let write = kind != Kind::Read;
        let needed = if write {
            Mapped::Writable
        } else {
            Mapped::ReadOnly
        };
        let pages = (first..).take(count.into()).map(PageIndex::new);
        for place in 0..u32::from(count) {
            let place = if backwards {
                u32::from(count) - 1 - place
            } else {
                place
            };
            let page = PageIndex::new(first + place);
            if self.frame(me, page).mapped >= needed {
                continue;
            }
            let bit = 1 << (page.number() - first);
            let is_early = work.had & bit != 0;
            let seen = self.policy_waits(me, page, write);
            let early = seen.unwrap_or(is_early || work.lost);
            let mut actions = Vec::new();
            let cache = &mut self.nodes[me.index()].cache;
            let touch = cache.touch(page, write, early, &mut actions);
            self.execute_all(me, actions);
            match touch {
                Touch::Mapped => {}
                Touch::Owned => self.touch_owned(me, page, write),
                Touch::Waiting | Touch::Later => {
                    if seen.is_none() && is_early && work.access.count > 1 {
                        self.count_loss(me);
                    }
                    work.lost = early;
                    work.page = page;
                    work.had &= !bit;
                    if touch == Touch::Later && self.news.is_some() {
                        self.nodes[me.index()].vcpu = Vcpu::Trying(work);
                        return self.note_later(Step::Retry(me), 1);
                    }
                    self.nodes[me.index()].vcpu = Vcpu::Blocked(work);
                    return;
                }
                Touch::Stopped => {
                    self.nodes[me.index()].vcpu = Vcpu::Idle;
                    return;
                }
            }
        }
        for page in pages {
            self.perform(me, page, kind);
        }
        self.progress(me);
    }

    /// The access itself, which is where a wrong byte is seen.
    fn perform(&mut self, me: Member, page: PageIndex, kind: Kind) {
        let at = page.index();
        let truth = self.truth[at];
        if self.frame(me, page).value != Some(truth) {
            return self.fail("a node reads something else than was written last");
        }
        if kind == Kind::Read {
            return;
        }
        self.writes[at] += 1;
        let value = if kind == Kind::Zero {
            0
        } else {
            self.writes[at]
        };
        self.truth[at] = value;
        self.frame(me, page).value = Some(value);
    }

    fn fence(&mut self, me: Member) {
        let Some(lost) = self.crashed else { return };
        let losses = self.nodes[me.index()].directory.fence(lost);
        let mut actions = Vec::new();
        let node = &mut self.nodes[me.index()];
        node.cache.fence(&mut actions);
        node.is_fenced = true;
        // Of what the threads still had to do, only wakes count, and waiters of a block.
        for action in node.evictor.drain(..).chain(node.responder.drain(..)) {
            match action {
                CacheAction::Wake(_) => actions.push(action),
                CacheAction::SplitBlock(block) | CacheAction::OwnBlock { block, .. } => {
                    let pages = (crate::directory::first_page::<P>(block)..).take(P);
                    actions.extend(pages.map(PageIndex::new).map(CacheAction::Wake));
                }
                _ => {}
            }
        }
        node.holds.clear();
        for from in (0..self.nodes.len()).map(member) {
            for lane in crate::message::Lane::ALL {
                let at = self.queue_at(from, me, lane);
                self.queues[at].items.clear();
            }
        }
        self.execute_all(me, actions);
        if let Vcpu::Trying(_) = self.nodes[me.index()].vcpu {
            self.nodes[me.index()].vcpu = Vcpu::Idle;
        }
        self.check_losses(me, &losses);
    }

    /// The access lost a page that it had, and may starve: it asks for the token once.
    fn count_loss(&mut self, me: Member) {
        let node = &mut self.nodes[me.index()];
        node.losses = node.losses.saturating_add(1);
        if node.losses >= self.starves_after {
            self.want_token(me);
        }
    }

    /// Asks for the token, unless the node has done so or has it.
    pub(super) fn want_token(&mut self, me: Member) {
        let node = &mut self.nodes[me.index()];
        if node.token.is_none() && !node.wants_token {
            node.wants_token = true;
            self.send(me, member(0), Message::TokenWant, 0);
        }
    }

    fn progress(&mut self, me: Member) {
        let node = &mut self.nodes[me.index()];
        node.vcpu = Vcpu::Idle;
        node.losses = 0;
        if !self.policy_rests(me) && self.mutation != Some(Mutation::KeepToken) {
            self.return_token(me);
        }
        self.note(Step::Rest(me));
    }

    pub(super) fn return_token(&mut self, me: Member) {
        let node = &mut self.nodes[me.index()];
        if let Some(number) = node.token.take() {
            let mut actions = Vec::new();
            node.cache.protect(false, &mut actions);
            self.execute_all(me, actions);
            self.send(me, member(0), Message::TokenBack { number }, 0);
        }
    }

    pub(super) fn token(&mut self, from: Member, to: Member, message: &Message) {
        if let Message::TokenGrant { number } = *message {
            let node = &mut self.nodes[to.index()];
            node.token = Some(number);
            node.wants_token = false;
            node.cache.protect(true, &mut Vec::new());
            let losses = node.losses;
            if !self.policy_got_token(to) && losses == 0 {
                self.return_token(to);
            }
            return;
        }
        match self.keeper.handle(from, message) {
            Ok(Some(Granted { to: next, number })) => {
                self.send(to, next, Message::TokenGrant { number }, 0);
            }
            Ok(None) => {}
            Err(offence) => self.blame(to, offence),
        }
    }
}
