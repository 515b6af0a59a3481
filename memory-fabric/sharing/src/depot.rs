//! The depot of a home: memory elsewhere, for pages that the home has no room for.
//!
//! Only the home of a page uses its place there; other nodes ask the home, as they do without one. The
//! protocol knows nothing of it: a home that has to ask is a home that answers later.
//!
//! What is written back to a full home is confirmed when a page has left for the depot, so that nodes
//! cannot send more than the depot takes. That waits for the depot alone, and for no other node: a
//! full home has pages that may leave, at least those that are not confirmed.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::time::Instant;

use fabric_coherence::Member;
use fabric_pages::page::{PageBytes, PageIndex};
use fabric_peers::{HomeMessage, PeerError, PeerMessage, Peers};

use crate::Failure;
use crate::away::{Asked, READS_MAX, WRITES_MAX};
use crate::engine::Engine;
use crate::evict::RESERVE;
use crate::home::Found;

/// What a depot has completed.
#[derive(Debug)]
pub enum Stored<'a> {
    /// The page that was asked for; valid during the call.
    Read(PageIndex, &'a PageBytes),
    /// The depot has the page.
    Written(PageIndex),
}

/// Stores pages outside this node's memory. Called by the engine's thread alone, and never waits.
///
/// At most one read and one write of a page are outstanding at a time. Requests are completed in any
/// order, each once; a depot that cannot complete them any more reports that to its owner, who ends
/// the VM.
pub trait Depot: Send {
    /// How many of the guest's pages have a place.
    fn pages(&self) -> usize;

    /// Whether the page has a place. Never changes.
    fn has_place(&self, page: PageIndex) -> bool;

    /// Asks for a page that was written; false if there are too many requests now. One that is not
    /// taken is tried again after the next [`poll`](Self::poll), so [`arm`](Self::arm) and the
    /// descriptors report when there may be room.
    fn read(&mut self, page: PageIndex) -> bool;

    /// Writes a page, whose bytes are taken before the call returns; false if there are too many
    /// requests now.
    fn write(&mut self, page: PageIndex, bytes: &PageBytes) -> bool;

    /// Sends what was asked for and written.
    fn flush(&mut self);

    /// Gives all that is complete to `done`.
    fn poll(&mut self, done: &mut dyn FnMut(Stored<'_>));

    /// To be called before sleeping; false when something is complete already.
    fn arm(&mut self) -> bool;

    /// When to [`poll`](Self::poll) at the latest.
    fn wake_by(&mut self) -> Option<Instant>;

    /// The descriptors that wake, and whether to wait until they can be written, too.
    fn watch(&self, watch: &mut dyn FnMut(RawFd, bool));

    /// A sleep has ended; [`poll`](Self::poll) follows.
    fn slept(&mut self);
}

/// A depot, and what waits for it.
pub(crate) struct Store {
    pub(crate) depot: Box<dyn Depot>,
    /// Confirmations of pages that were written back to a full home.
    owed: VecDeque<(Member, HomeMessage)>,
    /// Pages written whose completion is not handled yet.
    written: Vec<PageIndex>,
    /// The same of pages read.
    read: Vec<(PageIndex, Box<PageBytes>)>,
    /// The depot did not take a request: it may although none of this home is outstanding, and is
    /// then asked again when it wakes.
    has_refused: bool,
}

impl Store {
    pub(crate) fn new(depot: Box<dyn Depot>) -> Self {
        Self {
            depot,
            owed: VecDeque::new(),
            written: Vec::new(),
            read: Vec::new(),
            has_refused: false,
        }
    }
}

impl<P: Peers> Engine<P> {
    /// Asks the depot for a page, for a node or this one.
    pub(crate) fn ask_depot(&mut self, page: PageIndex, node: Member) -> Result<(), Failure> {
        if self.home.away.ask(page, node) == Asked::TooMuch {
            if node == self.config.me {
                return Err(Failure::Defect("reading from the depot twice", page));
            }
            let reason = format!(
                "it asks for {page} twice, or for more than {READS_MAX} pages, which is the limit"
            );
            return Err(PeerError::Broken { peer: node, reason }.into());
        }
        self.post_reads();
        Ok(())
    }

    /// Posts what is to be read, as far as possible.
    fn post_reads(&mut self) {
        let Some(store) = &mut self.store else {
            return;
        };
        while let Some(page) = self.home.away.to_read() {
            if !store.depot.read(page) {
                store.has_refused = true;
                break;
            }
            self.home.away.reads_now(page);
        }
    }

    /// Confirms a page that was written back; when the home is full, after one has left.
    pub(crate) fn answer_write(
        &mut self,
        to: Member,
        page: PageIndex,
        answer: HomeMessage,
    ) -> Result<(), Failure> {
        if let Some(store) = &mut self.store
            && self.home.has_place(page)
            && self.frames.resident() + self.home.stored() >= self.queue.limit()
        {
            store.owed.push_back((to, answer));
            return Ok(());
        }
        self.send_peer(to, PeerMessage::Home(answer))
    }

    /// Writes pages to the depot until so many are on their way or none may leave. Returns how many
    /// are.
    pub(crate) fn send_away(&mut self, wanted: usize) -> usize {
        let Some(store) = &mut self.store else {
            return 0;
        };
        while self.home.away.writes() < wanted.min(WRITES_MAX) {
            let Some((page, bytes)) = self.home.next_to_leave() else {
                break;
            };
            if !store.depot.write(page, bytes) {
                store.has_refused = true;
                self.home.stays(page);
                break;
            }
            self.home.away.writes_now(page);
            self.stats.sent_away.increment();
        }
        self.home.away.writes()
    }

    /// Handles what the depot has completed.
    pub(crate) fn serve_depot(&mut self) -> Result<bool, Failure> {
        let Self {
            store, spare_pages, ..
        } = self;
        let Some(store) = store else {
            return Ok(false);
        };
        let Store {
            depot,
            written,
            read,
            has_refused,
            ..
        } = store;
        depot.poll(&mut |stored| match stored {
            Stored::Written(page) => written.push(page),
            Stored::Read(page, bytes) => {
                let place = spare_pages.pop();
                let mut place = place.unwrap_or_else(|| Box::new([0; size_of::<PageBytes>()]));
                place.copy_from_slice(bytes);
                read.push((page, place));
            }
        });
        let worked = !(written.is_empty() && read.is_empty());
        if std::mem::take(has_refused) || worked {
            let (mut written, mut read) = (std::mem::take(written), std::mem::take(read));
            for (page, bytes) in read.drain(..) {
                self.came(page, bytes)?;
                self.deliver_local()?;
            }
            for page in written.drain(..) {
                self.spare_pages.extend(self.home.left(page));
                self.pay(1)?;
            }
            if let Some(store) = &mut self.store {
                (store.written, store.read) = (written, read);
            }
            self.post_reads();
            if self.local_pages() + RESERVE > self.queue.limit() {
                self.make_room()?;
                self.deliver_local()?;
            }
        }
        // Pages that cannot leave have room, and nothing else would end the wait.
        if self.home.away.writes() == 0 || self.local_pages() < self.queue.limit() {
            self.pay(usize::MAX)?;
        }
        Ok(worked)
    }

    /// Sends what was asked of the depot.
    pub(crate) fn flush_depot(&mut self) {
        if let Some(store) = &mut self.store {
            store.depot.flush();
        }
    }

    /// Sends confirmations that were delayed.
    fn pay(&mut self, count: usize) -> Result<(), Failure> {
        for _ in 0..count {
            let owed = self.store.as_mut().and_then(|store| store.owed.pop_front());
            let Some((to, answer)) = owed else {
                break;
            };
            self.send_peer(to, PeerMessage::Home(answer))?;
        }
        Ok(())
    }

    /// A page came from the depot. Those that wait get it, or what was stored meanwhile.
    fn came(&mut self, page: PageIndex, bytes: Box<PageBytes>) -> Result<(), Failure> {
        let Some(nodes) = self.home.away.came(page) else {
            return Err(Failure::Defect("the depot read what was not asked", page));
        };
        self.stats.from_depot.increment();
        let mut bytes = bytes;
        match self.home.read(page, &mut self.frames) {
            Found::Here(newer) => bytes.copy_from_slice(newer),
            Found::Away => {}
            Found::Nowhere => {
                let peer = nodes.first().copied().unwrap_or(self.config.me);
                return Err(Failure::NotStored { peer, page });
            }
        }
        let mut is_for_me = false;
        for node in nodes {
            if node == self.config.me {
                is_for_me = true;
                continue;
            }
            let answer = PeerMessage::Home(HomeMessage::Bytes { page });
            if self.may_leave(&answer)? {
                self.give_way.is_urgent = true;
                self.peers.send(node, answer, Some(&bytes));
            } else {
                self.hold_back(node, answer, Some(bytes.clone()));
            }
        }
        if is_for_me {
            return self.home_bytes(page, bytes);
        }
        self.spare_pages.push(bytes);
        Ok(())
    }

    /// What to wait for before the depot has something to do.
    pub(crate) fn depot_wakes_by(&mut self) -> Option<Instant> {
        self.store.as_mut()?.depot.wake_by()
    }
}
