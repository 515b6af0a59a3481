//! Peers over TCP: one connection for each pair of members.
//!
//! The first member of a pair connects to the second. Threads of their own make connections, so
//! that the thread that uses them never waits. A frame carries a message, its place in its lane, and
//! what its sender has received. What is not confirmed is kept, and sent again on the next
//! connection; the receiver drops what it has.

mod channel;
mod config;
mod frame;
mod handshake;
mod hello;
mod keeper;
mod link;
mod outbox;
mod path;
mod paths;
mod streams;
#[cfg(test)]
mod tests;
mod upgrade;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use fabric_coherence::members::MEMBERS_MAX;
use fabric_host::Seldom;
use fabric_pages::page::PageBytes;
use ring::hmac;
use rustix::event::{Timespec, epoll};

#[cfg(test)]
use crate::PeerLane;
use crate::codec::Bounds;
use crate::{PeerError, PeerMessage, Peers, Receiver};
pub use channel::{Channel, SecureStream, Security};
pub use config::{
    GRACE_DEFAULT, RdmaPeers, STALL_DEFAULT, START_TIMEOUT_DEFAULT, Secret, TcpPeersConfig,
};
use handshake::Credentials;
pub use hello::PEER_VERSION;
use keeper::{Keeper, News};
use link::{Fault, Link};
pub use outbox::{UNCONFIRMED_HOME_MAX, UNCONFIRMED_MAX, UNCONFIRMED_PAGES_MAX};
use path::SESSION;
pub use paths::{Paths, PeerPath, PeerTransport};
pub use streams::Streams;
use upgrade::Upgrades;

/// What an event of the keeper has instead of a member.
const BELL: u64 = u64::MAX;

/// Connections that are read without asking the kernel first which of them have something: each costs
/// a system call, as asking does.
const QUICK_LINKS: usize = 2;

/// After so many such polls, or this time, the kernel is asked for everything else.
const QUICK_POLLS: u32 = 16;
const QUICK_TIME: Duration = Duration::from_millis(1);

/// This node's connections to all other compute nodes.
#[derive(Debug)]
pub struct TcpPeers {
    epoll: OwnedFd,
    keeper: Keeper,
    /// By member; this node has none.
    links: Vec<Option<Link>>,
    grace: Duration,
    /// What rings are made with; `None` for none.
    upgrades: Option<Arc<Upgrades>>,
    paths: Arc<Paths>,
    /// Why a connection was not accepted last.
    refused: Option<String>,
    /// Any host that reaches the port can cause refusals.
    notices: Seldom,
    /// Polls that may follow without asking the kernel for everything, until this time.
    quick: u32,
    quick_until: Instant,
}

impl TcpPeers {
    /// Connects to all other members, and returns when all are connected.
    ///
    /// # Errors
    /// When a member refuses this node, or is refused, or not all are connected in time.
    ///
    /// # Panics
    /// When there is not one address for each member of the table, or this node is none of them.
    pub fn connect(config: TcpPeersConfig) -> Result<Self, PeerError> {
        config.check();
        let deadline = Instant::now() + config.start_timeout;
        let mut peers = Self::start(config).map_err(PeerError::System)?;
        while let Some(missing) = peers.missing() {
            let left = deadline.saturating_duration_since(Instant::now());
            match peers.keeper.news.recv_timeout(left) {
                Ok(News::Failed(peer, error)) if error.is_final() => {
                    let reason = error.to_string();
                    return Err(PeerError::Refused { peer, reason });
                }
                Ok(news) => peers.take(news, Instant::now()),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(peers.not_connected(missing));
                }
            }
        }
        Ok(peers)
    }

    fn start(config: TcpPeersConfig) -> io::Result<Self> {
        let bounds = Bounds {
            pages: config.memory_pages,
            members: u8::try_from(config.addresses.len()).unwrap_or(u8::MAX),
        };
        let link = |place| {
            let peer = Member::at(place).filter(|peer| *peer != config.me);
            peer.map(|peer| Link::new(peer, config.epoch, bounds, config.stall))
        };
        let links = (0..bounds.members).map(link).collect();
        let key = hmac::Key::new(hmac::HMAC_SHA256, &config.secret.0);
        let paths = Arc::<Paths>::default();
        let upgrades = config.rdma.as_ref();
        let upgrades = upgrades.map(|rdma| Upgrades::new(rdma, &paths.ring_writes));
        let upgrades = upgrades.transpose()?.map(Arc::new);
        let mut credentials = Credentials::new(&config, key);
        credentials.upgrades.clone_from(&upgrades);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let keeper = Keeper::start(credentials, &config.addresses, config.listener)?;
        let data = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, &*keeper.notifier, data, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            keeper,
            links,
            grace: config.grace,
            upgrades,
            paths,
            refused: None,
            notices: Seldom::notices(),
            quick: 0,
            quick_until: Instant::now(),
        })
    }

    /// How messages travel to each peer, now and later.
    #[must_use]
    pub fn paths(&self) -> Arc<Paths> {
        Arc::clone(&self.paths)
    }

    /// A member that is not connected.
    fn missing(&self) -> Option<Member> {
        let mut links = self.links.iter().flatten();
        links.find(|link| !link.is_connected()).map(Link::peer)
    }

    fn not_connected(&mut self, peer: Member) -> PeerError {
        let link = self.links[peer.index()].as_ref();
        let outage = link.and_then(|link| link.outage.as_ref());
        let mut reason = "it did not connect in time".to_owned();
        for detail in outage
            .map(|one| &one.reason)
            .into_iter()
            .chain(&self.refused)
        {
            reason = format!("{reason}; {detail}");
        }
        PeerError::Lost { peer, reason }
    }

    /// Takes what the keeper reports.
    fn take(&mut self, news: News, now: Instant) {
        match news {
            News::Connected(peer, stream) => {
                let Some(Some(link)) = self.links.get_mut(peer.index()) else {
                    return;
                };
                tracing::debug!("connected to {peer}");
                self.paths.note(peer, stream.transport());
                let mut attached = link.attach(stream, &self.epoll, now);
                if attached.is_ok() {
                    attached = link.send(&self.epoll, now);
                }
                if let Err(fault) = attached {
                    link.detach(fault.to_string(), now);
                    self.keeper.want(peer);
                }
            }
            News::Failed(peer, error) => {
                if let Some(Some(link)) = self.links.get_mut(peer.index())
                    && !link.is_connected()
                {
                    tracing::debug!("no connection to {peer}: {error}");
                    link.detach(error.to_string(), now);
                    link.set_reason(error.to_string());
                }
            }
            News::Refused(address, error) => self.note_refused(address, &error.to_string()),
        }
    }

    fn note_refused(&mut self, address: SocketAddr, reason: &str) {
        let text = format!("a connection of {address} was not accepted: {reason}");
        if let Some(unreported) = self.notices.pass(Instant::now()) {
            tracing::warn!(unreported, "{text}");
        }
        self.refused = Some(text);
    }

    /// Whether it is enough to read from each connection. Not after a sleep, which ends with
    /// whatever the kernel reports.
    fn is_quick(&mut self, now: Instant) -> bool {
        let can_be = self.quick > 0 && now < self.quick_until;
        let others = self.links.len() <= QUICK_LINKS + 1;
        let mut links = self.links.iter().flatten();
        if can_be && others && links.all(Link::is_plainly_read) {
            self.quick -= 1;
            return true;
        }
        (self.quick, self.quick_until) = (QUICK_POLLS, now + QUICK_TIME);
        false
    }

    /// Reads from each connection.
    fn poll_quick(&mut self, receiver: &mut Receiver<'_>, now: Instant) -> Result<bool, PeerError> {
        let mut has_arrived = false;
        for place in 0..self.links.len() {
            let Some(Some(link)) = self.links.get_mut(place) else {
                continue;
            };
            match link.receive(receiver, now) {
                Ok(came) => has_arrived |= came,
                Err(fault) => self.handle(place, fault, now)?,
            }
        }
        Ok(has_arrived)
    }

    /// Reads what the kernel has for this node, from the connections that have something.
    fn poll(&mut self, receiver: &mut Receiver<'_>, now: Instant) -> Result<bool, PeerError> {
        let event = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        // Of rings and of their session.
        let mut events = [event; 2 * MEMBERS_MAX + 1];
        let at_once = Timespec::default();
        let count = match epoll::wait(&self.epoll, events.as_mut_slice(), Some(&at_once)) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(PeerError::System(error.into())),
        };
        let mut has_arrived = false;
        let mut has_news = false;
        // What is left of the last call: sockets report nothing of it.
        for place in 0..self.links.len() {
            let Some(Some(link)) = self.links.get_mut(place) else {
                continue;
            };
            if link.is_ready() {
                match link.receive(receiver, now) {
                    Ok(came) => has_arrived |= came,
                    Err(fault) => {
                        self.handle(place, fault, now)?;
                        continue;
                    }
                }
            }
            if link.has_new_room()
                && let Err(fault) = link.send(&self.epoll, now)
            {
                self.handle(place, fault, now)?;
            }
        }
        for event in &events[..count] {
            let (data, flags) = (event.data.u64(), event.flags);
            if data == BELL {
                has_news = true;
                continue;
            }
            let place = usize::try_from(data & !SESSION).unwrap_or(usize::MAX);
            let Some(Some(link)) = self.links.get_mut(place) else {
                continue;
            };
            let noted = match data & SESSION {
                0 => Ok(()),
                _ => link.note_session(),
            };
            let received = noted.and_then(|()| link.receive(receiver, now));
            let (came, fault) = match received {
                Ok(came) => (came, None),
                Err(fault) => (false, Some(fault)),
            };
            has_arrived |= came;
            let fault = match fault {
                None if flags.contains(epoll::EventFlags::OUT) => link.send(&self.epoll, now).err(),
                fault => fault,
            };
            if let Some(fault) = fault {
                self.handle(place, fault, now)?;
            }
        }
        if has_news {
            let mut count = [0; 8];
            // A later signal makes the notifier readable again.
            let _ = rustix::io::read(&*self.keeper.notifier, &mut count);
            while let Ok(news) = self.keeper.news.try_recv() {
                self.take(news, now);
            }
        }
        Ok(has_arrived)
    }

    /// Ends the connection with a fault, and asks for another one.
    fn handle(&mut self, place: usize, fault: Fault, now: Instant) -> Result<(), PeerError> {
        let Some(Some(link)) = self.links.get_mut(place) else {
            return Ok(());
        };
        let peer = link.peer();
        match fault {
            Fault::Io(error) => {
                tracing::warn!("the connection to {peer} ended: {error}");
                if let Some(upgrades) = &self.upgrades
                    && link.is_broken_ring()
                {
                    upgrades.note_break(peer);
                }
                link.detach(error.to_string(), now);
                self.keeper.want(peer);
                Ok(())
            }
            Fault::Broken(reason) => {
                link.detach(reason.clone(), now);
                Err(PeerError::Broken { peer, reason })
            }
        }
    }
}

impl Peers for TcpPeers {
    fn send(&mut self, to: Member, message: PeerMessage, bytes: Option<&PageBytes>) {
        let link = self.links.get_mut(to.index()).and_then(Option::as_mut);
        let link = link.unwrap_or_else(|| panic!("{to} is no peer of this node"));
        link.push(&message, bytes);
    }

    fn flush(&mut self) {
        let mut now = None;
        for place in 0..self.links.len() {
            let Some(Some(link)) = self.links.get_mut(place) else {
                continue;
            };
            if link.can_send() {
                let now = *now.get_or_insert_with(Instant::now);
                // A connection that fails here is found broken by the next `receive` too.
                if let Err(fault) = link.send(&self.epoll, now) {
                    link.fail(fault);
                }
            }
        }
    }

    fn receive(&mut self, receiver: &mut Receiver<'_>) -> Result<bool, PeerError> {
        let now = Instant::now();
        let has_arrived = match self.is_quick(now) {
            true => self.poll_quick(receiver, now)?,
            false => self.poll(receiver, now)?,
        };
        for place in 0..self.links.len() {
            let Some(Some(link)) = self.links.get_mut(place) else {
                continue;
            };
            if let Err(fault) = link.tick(&self.epoll, now) {
                self.handle(place, fault, now)?;
            } else if link.is_lost(self.grace, now) {
                let peer = link.peer();
                let outage = link.outage.as_ref();
                let reason = outage.map_or_else(String::new, |outage| outage.reason.clone());
                let grace = self.grace;
                let reason = format!("it was out of reach for {grace:?}: {reason}");
                return Err(PeerError::Lost { peer, reason });
            }
        }
        Ok(has_arrived)
    }

    fn poll_fd(&self) -> RawFd {
        self.epoll.as_fd().as_raw_fd()
    }

    fn wake_by(&mut self) -> Option<Instant> {
        self.quick = 0;
        let links = self.links.iter_mut().flatten();
        links.filter_map(|link| link.due(self.grace)).min()
    }
}
