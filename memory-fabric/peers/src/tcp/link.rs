//! What is known of one peer: its connection, and what has to arrive there and here.

mod input;
mod output;

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use fabric_coherence::lanes::Inbox;
use fabric_pages::page::PageBytes;

use super::frame::Sequences;
use super::outbox::{Head, Outbox};
use super::path::Path;
#[cfg(test)]
use super::paths::PeerTransport;
use crate::codec::Bounds;
use crate::message::{PeerLane, PeerMessage};
use crate::ring::is_offence;
use input::Input;

/// Delay of a confirmation while nothing else is sent.
pub(super) const CONFIRM_DELAY: Duration = Duration::from_millis(10);

/// Messages after which a confirmation is not delayed: a fraction of what may be outstanding.
const CONFIRM_MESSAGES: u32 = 64;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// The connection broke: a new one continues.
    #[error(transparent)]
    Io(io::Error),
    /// The peer sent what no correct peer sends.
    #[error("{0}")]
    Broken(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match is_offence(&error) {
            true => Self::Broken(error.to_string()),
            false => Self::Io(error),
        }
    }
}

/// A time without a working connection.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) began: Instant,
    pub(super) reason: String,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// Each side has to report what it expects.
    Resuming,
    Up,
}

#[derive(Debug)]
struct Connection {
    stream: Path,
    state: State,
    /// [`super::frame::KIND_RESUME`] is not written yet.
    must_resume: bool,
    /// The frame that is written in part, and how much of it.
    partial: Option<(Head, usize)>,
    /// The kernel reports when there is room to write.
    waits_for_room: bool,
    /// When something arrived.
    last_received: Instant,
    /// When something was written.
    last_sent: Instant,
    /// Since when something waits for a confirmation, and none came.
    waiting_since: Option<Instant>,
    /// Since when something is not confirmed to the peer, and how many messages.
    unconfirmed_since: Option<Instant>,
    unconfirmed: u32,
}

/// One peer.
#[derive(Debug)]
pub(super) struct Link {
    peer: Member,
    epoch: u32,
    bounds: Bounds,
    stall: Duration,
    connection: Option<Connection>,
    outbox: Outbox,
    inbox: Inbox<{ PeerLane::COUNT }>,
    input: Input,
    /// A time in which nothing is confirmed, which a connection alone does not end.
    pub(super) outage: Option<Outage>,
    /// What [`Self::tick`] reports: a failure where none could be returned.
    failure: Option<Fault>,
}

impl Link {
    pub(super) fn new(peer: Member, epoch: u32, bounds: Bounds, stall: Duration) -> Self {
        Self {
            peer,
            epoch,
            bounds,
            stall,
            connection: None,
            outbox: Outbox::new(epoch),
            inbox: Inbox::new(epoch),
            input: Input::new(),
            outage: None,
            failure: None,
        }
    }

    pub(super) fn peer(&self) -> Member {
        self.peer
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Whether something has arrived of which no descriptor reports anything.
    pub(super) fn is_ready(&mut self) -> bool {
        let connection = self.connection.as_mut();
        connection.is_some_and(|one| one.stream.is_ready())
    }

    /// Whether reading says all there is to know of the connection: there is one, which is no ring
    /// and has room to write.
    pub(super) fn is_plainly_read(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(|one| !one.waits_for_room && one.stream.is_socket())
    }

    /// Whether there is room that was waited for, of which no descriptor reports anything.
    pub(super) fn has_new_room(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(|one| one.waits_for_room && one.stream.has_room())
    }

    /// The connection over which rings were set up is readable.
    pub(super) fn note_session(&mut self) -> Result<(), Fault> {
        let connection = self.connection.as_mut();
        Ok(connection.map_or(Ok(()), |one| one.stream.note_session())?)
    }

    /// Whether the frames travel through rings that broke by themselves.
    pub(super) fn is_broken_ring(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(|one| one.stream.is_broken_ring())
    }

    /// Whether everything is confirmed, in both directions, over a connection that works.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let is_up = |one: &Connection| one.state == State::Up && one.unconfirmed_since.is_none();
        self.connection.as_ref().is_some_and(is_up) && self.outbox.is_empty()
    }

    /// Whether the frames travel through rings.
    #[cfg(test)]
    pub(super) fn has_rings(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(|one| one.stream.transport() == PeerTransport::Rdma)
    }

    /// Both ends of the connection, if there is one.
    #[cfg(test)]
    pub(super) fn ends(&self) -> Option<[std::net::SocketAddr; 2]> {
        let socket = self.connection.as_ref()?.stream.session().socket();
        Some([socket.local_addr().ok()?, socket.peer_addr().ok()?])
    }

    /// The other end of the connection.
    #[cfg(test)]
    pub(super) fn remote(&self) -> std::net::SocketAddr {
        let connection = self.connection.as_ref().expect("connected");
        connection
            .stream
            .session()
            .socket()
            .peer_addr()
            .expect("connected")
    }

    /// Queues a message.
    pub(super) fn push(&mut self, message: &PeerMessage, page: Option<&PageBytes>) {
        if let Err(overflow) = self.outbox.push(message, page) {
            self.failure = Some(Fault::Broken(overflow.to_string()));
        }
    }

    /// Continues on a new connection, which replaces any other.
    pub(super) fn attach(
        &mut self,
        mut stream: Path,
        epoll: impl AsFd,
        now: Instant,
    ) -> Result<(), Fault> {
        self.connection = None;
        self.input.clear();
        stream.watch(epoll.as_fd(), self.peer.place().into())?;
        self.connection = Some(Connection {
            stream,
            state: State::Resuming,
            must_resume: true,
            partial: None,
            waits_for_room: false,
            last_received: now,
            last_sent: now,
            waiting_since: None,
            unconfirmed_since: None,
            unconfirmed: 0,
        });
        Ok(())
    }

    /// Ends the connection. What was not confirmed is sent again on the next one.
    pub(super) fn detach(&mut self, reason: String, now: Instant) {
        self.connection = None;
        self.outage.get_or_insert(Outage { began: now, reason });
    }

    /// Has the next [`Self::tick`] report a fault.
    pub(super) fn fail(&mut self, fault: Fault) {
        self.failure.get_or_insert(fault);
    }

    /// The last attempt to end an outage failed for another reason.
    pub(super) fn set_reason(&mut self, reason: String) {
        if let Some(outage) = &mut self.outage {
            outage.reason = reason;
        }
    }

    /// The connection works: an outage is over.
    fn note_progress(&mut self) {
        self.outage = None;
    }

    fn expected(&self) -> Sequences {
        PeerLane::ALL.map(|lane| self.inbox.expected(lane))
    }

    /// Does what is due without anything having arrived.
    pub(super) fn tick(&mut self, epoll: impl AsFd, now: Instant) -> Result<(), Fault> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let stall = self.stall;
        let Some(connection) = &self.connection else {
            return Ok(());
        };
        if now >= connection.last_received + stall {
            let text = format!("nothing arrived for {stall:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text).into());
        }
        if connection
            .waiting_since
            .is_some_and(|since| now >= since + stall)
        {
            let text = format!("nothing was confirmed for {stall:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text).into());
        }
        if self.must_send(now) {
            self.send(epoll, now)?;
        }
        Ok(())
    }

    /// Whether a frame without a message is due.
    fn must_send(&self, now: Instant) -> bool {
        let Some(connection) = &self.connection else {
            return false;
        };
        let is_late = |since: Instant| now >= since + CONFIRM_DELAY;
        connection.must_resume
            || connection.state == State::Up
                && (connection.unconfirmed_since.is_some_and(is_late)
                    || connection.unconfirmed >= CONFIRM_MESSAGES
                    || now >= connection.last_sent + self.stall / 4)
    }

    /// Prepares for sleeping. Returns when [`Self::tick`] has something to do, unless something
    /// arrives before.
    pub(super) fn due(&mut self, grace: Duration) -> Option<Instant> {
        if let Some(connection) = &mut self.connection {
            connection.stream.arm();
        }
        if self.failure.is_some() || self.is_ready() || self.has_new_room() {
            return Some(Instant::now());
        }
        let Some(connection) = &self.connection else {
            return self.outage.as_ref().map(|outage| outage.began + grace);
        };
        let heartbeat = connection.last_sent + self.stall / 4;
        let dues = [
            Some(connection.last_received + self.stall),
            (connection.state == State::Up).then_some(heartbeat),
            connection.waiting_since.map(|since| since + self.stall),
            connection
                .unconfirmed_since
                .map(|since| since + CONFIRM_DELAY),
        ];
        dues.into_iter().flatten().min()
    }

    /// Whether the peer has been out of reach for the grace time.
    pub(super) fn is_lost(&self, grace: Duration, now: Instant) -> bool {
        let is_over = |outage: &Outage| now >= outage.began + grace;
        self.connection.is_none() && self.outage.as_ref().is_some_and(is_over)
    }
}
