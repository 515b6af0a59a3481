//! What a node has of the shared memory, and its side of the protocol.

mod blocks;
mod deadlines;
mod evict;
mod grants;
mod pending;
mod revoke;
mod word;

use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::PageIndex;

use crate::action::{CacheAction, Sink};
use crate::directory::{block_index, page_in_block};
use crate::members::{Member, MemberSet};
use crate::message::{Message, Number, Want};
use crate::mutation::{Switch, mutated};
use crate::offence::{Offence, Violation};
use blocks::{NodeBlock, Rights};
use pending::{Data, Pending};
use word::{ALONE, DIRTY, State, WANTED, WRITTEN, Word};

/// Most requests and held pages of a node: 64 vCPUs wait for a page each, and one of them holds the
/// about 30 pages that an instruction needs where page walks are writes.
pub const PENDING_MAX: usize = 128;

/// What became of a touch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Touch {
    /// The page is mapped by an action.
    Mapped,
    /// The block is this node's: the owner's protocol serves the touch.
    Owned,
    /// An action wakes the waiters later.
    Waiting,
    /// The block changes hands, or all requests are in use: touch again after the next action.
    Later,
    /// The VM is stopping.
    Stopped,
}

/// What became of a wish to evict.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Evict {
    /// Actions do it.
    Started,
    /// The page cannot be evicted now; another one can.
    InUse,
    /// The page is not here.
    NotHere,
    /// The block is this node's: the owner's protocol evicts.
    Owned,
}

/// How a write-back ended.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Written {
    /// The home stores the bytes.
    Home,
    /// The page is all zero and was not sent.
    Zero,
    /// The home has bytes of a later grant.
    Refused,
}

/// The cache of a node.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Cache<const PAGES: usize = { BLOCK_PAGES as usize }> {
    me: Member,
    members: MemberSet,
    blocks: Vec<NodeBlock<PAGES>>,
    /// Up to the last place in use, so that a search looks at no others.
    pending: Vec<Option<Pending>>,
    /// Most places.
    pending_max: usize,
    /// Unblocks wait for the starvation token's return.
    is_protected: bool,
    is_stopped: bool,
    pub(crate) switch: Switch,
}

impl<const PAGES: usize> Cache<PAGES> {
    /// The cache of node `me`, for a memory whose blocks have these directories.
    #[must_use]
    pub fn new(me: Member, members: MemberSet, directories: impl Iterator<Item = Member>) -> Self {
        Self::with_room(me, members, directories, PENDING_MAX)
    }

    pub(crate) fn with_room(
        me: Member,
        members: MemberSet,
        directories: impl Iterator<Item = Member>,
        pending: usize,
    ) -> Self {
        Self {
            me,
            members,
            blocks: directories.map(NodeBlock::new).collect(),
            pending: Vec::with_capacity(pending),
            pending_max: pending,
            is_protected: false,
            is_stopped: false,
            switch: Switch::default(),
        }
    }

    /// A vCPU or device touched a page that is not mapped for the access. `early`: for this same access
    /// it had this page or another one, and lost it before it progressed.
    pub fn touch(
        &mut self,
        page: PageIndex,
        write: bool,
        early: bool,
        sink: &mut impl Sink<CacheAction>,
    ) -> Touch {
        let Some(block) = self.blocks.get(block_index::<PAGES>(page).index()) else {
            return Touch::Later;
        };
        if self.is_stopped {
            return Touch::Stopped;
        }
        match block.rights {
            Rights::Owned { .. } => return Touch::Owned,
            Rights::Taking { .. } | Rights::Splitting { .. } => return Touch::Later,
            Rights::Foreign | Rights::Split(_) => {}
        }
        let mut word = self.word(page);
        if word.state() == State::Cleaning {
            if mutated!(self, IgnoreTouch) {
                let writable = write;
                sink.push(CacheAction::Map { page, writable });
                return Touch::Mapped;
            }
            // The write-back is cancelled; its answer is ignored.
            let state = if word.has(ALONE) {
                State::Exclusive
            } else {
                State::Shared
            };
            word = word.with(state, 0, ALONE);
        }
        let touch = match (word.state(), write) {
            (State::Exclusive | State::Modified, true) => {
                word = word.with(State::Modified, DIRTY | WRITTEN, 0);
                sink.push(CacheAction::Map {
                    page,
                    writable: true,
                });
                Touch::Mapped
            }
            (State::Shared | State::Exclusive | State::Modified, false) => {
                let writable = word.state() == State::Modified;
                sink.push(CacheAction::Map { page, writable });
                Touch::Mapped
            }
            (State::Shared, true) => self.ask(page, Want::Upgrade, early, sink),
            (State::Invalid, true) => self.ask(page, Want::Write, early, sink),
            (State::Invalid, false) => self.ask(page, Want::Read, early, sink),
            _ => {
                word = word.with(word.state(), WANTED, 0);
                Touch::Waiting
            }
        };
        self.set_word(page, word);
        touch
    }

    fn ask(
        &mut self,
        page: PageIndex,
        want: Want,
        early: bool,
        sink: &mut impl Sink<CacheAction>,
    ) -> Touch {
        if let Some(place) = self.find(page) {
            if !self.is_held(place) {
                return Touch::Waiting;
            }
            // The next request of the page is served after the unblock.
            self.unblock(place, sink);
        }
        let mut free = self.free_place();
        if free.is_none()
            && let Some(held) = (0..self.pending.len()).find(|place| self.is_held(*place))
        {
            self.unblock(held, sink);
            free = self.free_place();
        }
        let Some(place) = free else {
            return Touch::Later;
        };
        self.pending[place] = Some(Pending::new(page, want));
        let message = Message::Get { page, want, early };
        self.send_directory(page, message, sink);
        Touch::Waiting
    }

    /// Whether a page may be requested that no thread waits for: another node can have it, no
    /// request for it is open, and half of the requests stay for threads that wait.
    #[must_use]
    pub fn may_ask(&self, page: PageIndex, write: bool) -> bool {
        let is_split = matches!(self.rights(page), Some(Rights::Foreign | Rights::Split(_)));
        let is_lacking = match self.word(page).state() {
            State::Invalid => true,
            State::Shared => write,
            _ => false,
        };
        let used = self.pending.iter().flatten().count();
        let has_room = used < self.pending_max / 2;
        is_split && is_lacking && has_room && self.find(page).is_none() && !self.is_stopped
    }

    /// Handles a message of a node.
    ///
    /// # Errors
    /// When a node broke the protocol, which may be another one than the sender. The caller fences
    /// that node on all nodes.
    pub fn handle(
        &mut self,
        from: Member,
        message: &Message,
        sink: &mut impl Sink<CacheAction>,
    ) -> Result<(), Offence> {
        if self.is_stopped {
            return Ok(());
        }
        if !self.members.contains(from) {
            return Err(Violation::NotAMember.of(from));
        }
        match *message {
            Message::Invalidate {
                page,
                number,
                requester,
            } => {
                self.check(from, page, Some(requester))?;
                self.invalidate(from, page, number, requester, sink)
            }
            Message::Fetch {
                page,
                number,
                requester,
                right,
            } => {
                self.check(from, page, Some(requester))?;
                self.fetch(from, page, number, (requester, right), sink)
            }
            Message::Grant(grant) => {
                self.check(from, grant.page, None)?;
                self.granted(from, grant, sink)
            }
            Message::PutDone { page, number } => {
                self.check(from, page, None)?;
                self.put_done(from, page, number, sink)
            }
            Message::Ack { page, number } => {
                let place = self.find(page);
                let pending = place.and_then(|place| self.pending[place].as_mut());
                let pending = pending.ok_or(Violation::AckNotAsked(page).of(from))?;
                pending.acknowledged(from, number)?;
                self.try_complete(place.unwrap_or_default(), sink);
                Ok(())
            }
            Message::Data {
                page,
                number,
                dirty,
                written,
            } => {
                let place = self.find(page);
                let pending = place.and_then(|place| self.pending[place].as_mut());
                let pending = pending.ok_or(Violation::DataNotAsked(page).of(from))?;
                let data = Data {
                    from,
                    dirty,
                    written,
                };
                pending.received(number, data)?;
                self.try_complete(place.unwrap_or_default(), sink);
                Ok(())
            }
            Message::Split { block, number } => self.start_split(from, block, number, sink),
            Message::BlockGrant {
                block,
                number,
                ref behind,
            } => self.own_block(from, block, number, behind, sink),
            _ => Err(Violation::WrongRole.of(from)),
        }
    }

    /// Whether a message is from the page's directory and names a member.
    fn check(
        &self,
        from: Member,
        page: PageIndex,
        requester: Option<Member>,
    ) -> Result<(), Offence> {
        let Some(block) = self.blocks.get(block_index::<PAGES>(page).index()) else {
            return Err(Violation::NoSuchPage(page).of(from));
        };
        if block.directory != from {
            return Err(Violation::ElsewhereDirectory(page).of(from));
        }
        match requester {
            Some(one) if one == self.me || !self.members.contains(one) => {
                Err(Violation::UnknownMember(page).of(from))
            }
            _ => Ok(()),
        }
    }

    /// Stops: a node is lost, and with it its vCPUs. All who wait are answered with
    /// [`CacheAction::Fail`], or by wakes that the caller still has to carry out; it may drop all
    /// other actions. Every later call does nothing.
    pub fn fence(&mut self, sink: &mut impl Sink<CacheAction>) {
        self.is_stopped = true;
        for pending in self.pending.iter().flatten().filter(|one| !one.is_held) {
            sink.push(CacheAction::Fail(pending.page));
        }
        self.fail_wanted(sink);
    }

    /// The home of a page answers the request for it with a copy of a merged table. Returns false if
    /// there is no such request.
    #[must_use]
    pub fn cancel(&mut self, page: PageIndex) -> bool {
        let is_open = |one: &Pending| one.grant.is_none() && !one.is_held;
        let is_free = self.word(page).state() == State::Invalid;
        let place = self.find(page).filter(|_| is_free);
        let place = place.filter(|place| self.pending[*place].as_ref().is_some_and(is_open));
        place.and_then(|place| self.take(place)).is_some()
    }

    /// Whether this node has the only copy of a page, mapped writable, of a block that is split.
    #[must_use]
    pub fn is_modified(&self, page: PageIndex) -> bool {
        self.word(page).state() == State::Modified
    }

    /// Whether this node has the only copy of a page of a block that is split, and no request for it is
    /// open and it is not held.
    #[must_use]
    pub fn is_alone(&self, page: PageIndex) -> bool {
        let state = self.word(page).state();
        matches!(state, State::Exclusive | State::Modified) && self.find(page).is_none()
    }

    /// Whether a request is open or a page held.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.pending.iter().any(Option::is_some)
    }

    fn unblock(&mut self, place: usize, sink: &mut impl Sink<CacheAction>) {
        let pending = self.take(place);
        let message = pending.and_then(|pending| pending.unblock());
        if let (Some(pending), Some(message)) = (pending, message)
            && !mutated!(self, NeverUnblock)
            && !mutated!(self, UnblockOnGrant)
        {
            self.send_directory(pending.page, message, sink);
        }
    }

    fn find(&self, page: PageIndex) -> Option<usize> {
        let is_it = |one: &Option<Pending>| one.is_some_and(|pending| pending.page == page);
        self.pending.iter().position(is_it)
    }

    fn is_held(&self, place: usize) -> bool {
        let pending = self.pending.get(place).and_then(Option::as_ref);
        pending.is_some_and(|pending| pending.is_held)
    }

    /// The first free place, if not all are in use.
    fn free_place(&mut self) -> Option<usize> {
        let free = self.pending.iter().position(Option::is_none);
        let place = free.unwrap_or(self.pending.len());
        if place == self.pending.len() && place < self.pending_max {
            self.pending.push(None);
        }
        (place < self.pending.len()).then_some(place)
    }

    fn take(&mut self, place: usize) -> Option<Pending> {
        let pending = self.pending.get_mut(place)?.take();
        self.trim();
        pending
    }

    /// Removes the free places behind the last one in use.
    fn trim(&mut self) {
        while self.pending.last().is_some_and(Option::is_none) {
            self.pending.pop();
        }
    }

    fn send_directory(&self, page: PageIndex, message: Message, sink: &mut impl Sink<CacheAction>) {
        let to = self.directory(page);
        sink.push(CacheAction::Send { to, message });
    }

    fn rights(&self, page: PageIndex) -> Option<&Rights<PAGES>> {
        let block = self.blocks.get(block_index::<PAGES>(page).index());
        block.map(|block| &block.rights)
    }

    /// The member that keeps the directory of a page.
    #[must_use]
    pub fn directory_of(&self, page: PageIndex) -> Member {
        self.directory(page)
    }

    fn directory(&self, page: PageIndex) -> Member {
        let block = self.blocks.get(block_index::<PAGES>(page).index());
        block.map_or(self.me, |block| block.directory)
    }

    fn word(&self, page: PageIndex) -> Word {
        match self.rights(page) {
            Some(Rights::Split(words)) => words[page_in_block::<PAGES>(page)],
            _ => Word::new(State::Invalid, 0, Number::ZERO),
        }
    }

    /// Changes the word of a page. A block gets words with its first one that is not invalid.
    fn set_word(&mut self, page: PageIndex, word: Word) {
        let block = &mut self.blocks[block_index::<PAGES>(page).index()];
        if let Rights::Foreign = block.rights
            && word.state() != State::Invalid
        {
            let invalid = Word::new(State::Invalid, 0, Number::ZERO);
            block.rights = Rights::Split(Box::new([invalid; PAGES]));
        }
        if let Rights::Split(words) = &mut block.rights {
            words[page_in_block::<PAGES>(page)] = word;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn searches_look_at_requests_in_progress_only() {
        let [me, other] = [0, 1].map(|place| Member::at(place).expect("a place"));
        let members = MemberSet::of(me).with(other);
        let mut cache = Cache::<{ BLOCK_PAGES as usize }>::new(me, members, [other].into_iter());
        let touch = |cache: &mut Cache, page| {
            cache.touch(PageIndex::new(page), true, false, &mut Vec::new())
        };
        let room = u32::try_from(PENDING_MAX).expect("a small number");
        for page in 0..room {
            assert_eq!(touch(&mut cache, page), Touch::Waiting);
        }
        assert_eq!(touch(&mut cache, room), Touch::Later, "all are in use");
        assert!(cache.cancel(PageIndex::new(1)));
        assert_eq!(cache.pending.len(), PENDING_MAX);
        assert_eq!(touch(&mut cache, room), Touch::Waiting, "the place is free");
        for page in (2..=room).rev() {
            assert!(cache.cancel(PageIndex::new(page)));
        }
        assert_eq!(cache.pending.len(), 1, "page 0 is waited for");
        assert!(cache.cancel(PageIndex::new(0)) && !cache.is_waiting());
        assert_eq!(cache.pending.len(), 0);
    }
}
