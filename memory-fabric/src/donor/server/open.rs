//! The open connections of a donor, and what its threads share.

mod endings;

use super::mailbox::Mailbox;
use crate::donor::Ending;
use crate::donor::buffers::{BuffersFull, Made};
use crate::donor::connection::{Controlled, Served};
use crate::donor::places::{Admission, Full, Place, Places, Purpose, Reason};
use crate::stream::{Closer, Stream};
use crate::transport::rdma::resources::Share;
use crate::transport::resting::Resting;
use fabric_host::metrics::Counter;
use fabric_host::{Seldom, lock};
use fabric_identity::presented::Presented;
use fabric_identity::{Fingerprint, SharedCredentials};
use fabric_transport::tls::Peer;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// State that the threads of a donor share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) served: Served,
    pub(super) credentials: Option<Arc<SharedCredentials>>,
    pub(super) stopping: AtomicBool,
    open: Mutex<Open>,
    /// Rung when a thread has ended, so that a connection that has none gets one.
    pub(super) ended: EventFd,
    pub(super) dropped: Dropped,
    /// Control connections that come to rest.
    pub(super) rest: Mailbox<Box<Arrival>>,
    notices: Seldom,
}

/// Connections that were dropped, by the reason.
#[derive(Debug, Default)]
pub struct Dropped {
    /// Too many from one address had not shown a lease.
    pub address: Counter,
    /// Too many had not shown a lease.
    pub total: Counter,
    /// Nothing was received on them in time.
    pub silent: Counter,
    /// Their peers showed no certificate that is accepted, or broke the protocol before.
    pub handshake: Counter,
    /// Too many connections of leases were open.
    pub full: Counter,
}

#[derive(Debug)]
pub(super) struct Open {
    places: Places,
    registered: HashMap<u64, Registered>,
}

/// An open connection.
#[derive(Debug)]
struct Registered {
    closer: Closer,
    address: SocketAddr,
    /// Who the peer is, once it has shown that.
    peer: Option<Arc<Peer>>,
    /// The last second of the validity of its certificate, since 1970.
    not_after: i64,
    /// Ends the vCPUs that the peer has here.
    ending: Option<Arc<Ending>>,
}

impl Registered {
    /// Ends what a peer has that may not use this node any more.
    fn end(&self, why: &str) {
        match &self.ending {
            Some(ending) => ending.end(why),
            None => self.closer.close(),
        }
    }
}

/// Why a connection gets no thread.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotWoken {
    #[error(transparent)]
    Buffers(#[from] BuffersFull),
    #[error(transparent)]
    Places(#[from] Full),
}

/// The place of a connection that has a thread; released when this is dropped.
#[derive(Debug)]
pub(super) struct TakenPlace {
    shared: Arc<Shared>,
    number: u64,
    peer: SocketAddr,
    /// What its buffers are while it has a thread.
    made: Made,
    /// Of the buffers of the connection; `None` once its place is being released.
    share: Option<Share>,
}

/// A control connection that comes to rest, whose place has noted that.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) place: TakenPlace,
    pub(super) connection: Resting,
    pub(super) of: Controlled,
}

impl Place for TakenPlace {
    fn establish(&self, purpose: Purpose) -> Result<(), Full> {
        let mut open = self.shared.open();
        let (from, now) = (self.peer.ip(), Instant::now());
        let established = open.places.establish(self.number, from, purpose, now);
        drop(open);
        self.note_if_full(&established);
        // Its thread does not count as one of a stranger any more.
        self.shared.ring();
        established
    }

    fn stay(&self) -> Result<(), Full> {
        let stayed = self.shared.open().places.stay(self.number);
        self.note_if_full(&stayed);
        stayed
    }

    fn ends_with(&self, ending: &Arc<Ending>) {
        if let Some(registered) = self.shared.open().registered.get_mut(&self.number) {
            registered.ending = Some(Arc::clone(ending));
        }
    }

    fn belongs_to(&self, member: &Arc<Peer>) -> Result<(), String> {
        self.note_member(member);
        // After that: who reads credentials or rules again looks at what is noted here.
        let credentials = self.shared.credentials.as_ref();
        credentials.map_or(Ok(()), |shared| shared.current().confirm(&member.chain))
    }
}

impl TakenPlace {
    /// Returns the peer's address.
    pub(super) const fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the number of the connection.
    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    fn note_if_full<T>(&self, taken: &Result<T, Full>) {
        if taken.is_err() {
            self.shared.dropped.full.increment();
        }
    }

    /// Notes that the connection rests from now on, without buffers. Its peer has shown
    /// certificates of `chain_bytes`. Returns false if it has to keep its thread.
    pub(super) fn rest(&mut self, chain_bytes: usize) -> bool {
        let made = Made::Resting { chain_bytes };
        let Ok(share) = self.shared.served.buffers.take(made) else {
            return false;
        };
        let mut open = self.shared.open();
        let rests = open.places.rest(self.number).is_ok();
        if rests {
            // While it is locked: who sees that it rests sees what it occupies as well.
            self.share = Some(share);
        }
        rests
    }

    /// Notes that the connection gets a thread and buffers again.
    ///
    /// # Errors
    ///
    /// When it may have none.
    pub(super) fn wake(&mut self, purpose: Purpose) -> Result<(), NotWoken> {
        let share = self.shared.served.buffers.take(self.made)?;
        let woken = self.shared.open().places.wake(self.number, purpose);
        self.note_if_full(&woken);
        woken?;
        self.share = Some(share);
        Ok(())
    }

    /// Notes that the peer has shown who it is: what, unless it is a process to which a member has
    /// [delegated](Place::belongs_to) something. Fails when the peer is not accepted any more:
    /// credentials may have been replaced since the handshake began.
    pub(super) fn note_peer(&self, stream: &Stream, is_delegate: bool) -> Result<(), String> {
        match stream.peer() {
            Some(_) if is_delegate => {
                let mut open = self.shared.open();
                open.places.note_member(self.number, Instant::now());
                Ok(())
            }
            Some(peer) => self.belongs_to(peer),
            None => Ok(()),
        }
    }

    fn note_member(&self, peer: &Arc<Peer>) {
        let certificate = peer.chain.first();
        let presented = certificate.and_then(|one| Presented::read(one).ok());
        let mut open = self.shared.open();
        open.places.note_member(self.number, Instant::now());
        if let Some(registered) = open.registered.get_mut(&self.number) {
            // It was read before, when the connection was made.
            registered.not_after = presented.map_or(i64::MIN, |presented| presented.not_after);
            registered.peer = Some(Arc::clone(peer));
        }
    }
}

impl Drop for TakenPlace {
    fn drop(&mut self) {
        // First: whoever gets its place has to find room for buffers.
        self.share = None;
        let mut open = self.shared.open();
        open.places.end(self.number, Instant::now());
        open.registered.remove(&self.number);
        drop(open);
        self.shared.ring();
    }
}

impl Shared {
    pub(super) fn new(
        served: Served,
        credentials: Option<Arc<SharedCredentials>>,
        lease_duration_max: Duration,
        ended: EventFd,
        rest: Mailbox<Box<Arrival>>,
    ) -> Self {
        Self {
            served,
            credentials,
            stopping: AtomicBool::new(false),
            open: Mutex::new(Open {
                places: Places::new(lease_duration_max),
                registered: HashMap::new(),
            }),
            ended,
            dropped: Dropped::default(),
            rest,
            notices: Seldom::notices(),
        }
    }

    /// Returns the certificate of a peer that is no member, but a process to which one has
    /// delegated something.
    pub(super) fn delegate(&self, stream: &Stream) -> Option<Fingerprint> {
        let (shared, peer) = (self.credentials.as_ref()?, stream.peer()?);
        shared.of_delegate(&peer.subject, &peer.chain)
    }

    pub(super) fn open(&self) -> MutexGuard<'_, Open> {
        lock(&self.open)
    }

    /// Wakes the thread that accepts connections by TCP.
    fn ring(&self) {
        // It fails when it has been rung 2^64 times.
        let _ = self.ended.write(1);
    }

    /// Takes a place for a new connection, which may drop another. Returns its number, unless it is
    /// to be closed at once.
    pub(super) fn admit(&self, address: SocketAddr, closer: Closer) -> Option<u64> {
        let mut open = self.open();
        let admission = open.places.admit(address.ip(), Instant::now());
        let (number, victim, reason) = match admission {
            Admission::Admitted(number) => (Some(number), None, None),
            Admission::Instead(number, victim, reason) => {
                let victim = open.close(victim);
                (Some(number), victim, Some(reason))
            }
            Admission::Refused(reason) => (None, Some(address), Some(reason)),
        };
        if let Some(number) = number {
            let registered = Registered {
                closer,
                address,
                peer: None,
                not_after: i64::MAX,
                ending: None,
            };
            open.registered.insert(number, registered);
        }
        drop(open);
        if let (Some(victim), Some(reason)) = (victim, reason) {
            self.note_dropped(victim, reason);
        }
        number
    }

    fn note_dropped(&self, victim: SocketAddr, reason: Reason) {
        let (counter, why) = match reason {
            Reason::Address => (&self.dropped.address, "too many of its address"),
            Reason::Total => (&self.dropped.total, "too many"),
        };
        counter.increment();
        if let Some(unreported) = self.notices.pass(Instant::now()) {
            tracing::warn!(
                peer = %victim,
                unreported,
                "a connection that had shown no lease was dropped for another: {why} wait"
            );
        }
    }

    /// Notes that a handshake failed.
    pub(super) fn note_refused(&self, peer: SocketAddr, why: &io::Error) {
        self.dropped.handshake.increment();
        // The peer learns little about why it is refused, so this node has to say it.
        if let Some(unreported) = self.notices.pass(Instant::now()) {
            tracing::info!(%peer, error = %why, unreported, "connection refused");
        }
    }

    /// Notes that the host refuses what a connection needs, such as a descriptor.
    pub(super) fn note_not_accepted(&self, error: &io::Error) {
        if let Some(unreported) = self.notices.pass(Instant::now()) {
            tracing::warn!(%error, unreported, "cannot accept a connection");
        }
    }

    /// Notes that a connection got no thread.
    pub(super) fn note_not_served(&self, peer: SocketAddr, why: &dyn std::error::Error) {
        if let Some(unreported) = self.notices.pass(Instant::now()) {
            tracing::warn!(%peer, error = fabric_host::describe(why), unreported, "connection refused");
        }
    }

    /// Returns the place of a connection that is about to get a thread and buffers; `None` if it may
    /// have none.
    pub(super) fn begin(
        self: &Arc<Self>,
        number: u64,
        peer: SocketAddr,
        made: Made,
    ) -> Option<TakenPlace> {
        let share = match self.served.buffers.take(made) {
            Ok(share) => share,
            Err(full) => {
                self.note_not_served(peer, &full);
                return None;
            }
        };
        let begun = self.open().places.begin(number, Instant::now());
        begun.then(|| TakenPlace {
            shared: Arc::clone(self),
            number,
            peer,
            made,
            share: Some(share),
        })
    }

    /// Returns the descriptors of silent connections, while others may have threads. They may be
    /// closed at any time, and then belong to another file: what they say has to be verified.
    pub(super) fn silent(&self) -> Vec<(u64, RawFd)> {
        let open = self.open();
        if !open.places.has_thread() {
            return Vec::new();
        }
        let descriptor = |number| match &open.registered.get(&number)?.closer {
            Closer::Tcp(stream) => Some((number, stream.as_raw_fd())),
            Closer::Udp(_) => None,
        };
        open.places.silent().filter_map(descriptor).collect()
    }

    /// Returns when the oldest silent connection arrived.
    pub(super) fn silent_since(&self) -> Option<Instant> {
        self.open().places.silent_since()
    }

    /// Closes connections that have been silent since `before`.
    pub(super) fn drop_silent(&self, before: Instant) {
        let mut open = self.open();
        for number in open.places.drop_silent(before) {
            open.registered.remove(&number);
            self.dropped.silent.increment();
        }
    }

    /// Closes a silent connection.
    pub(super) fn remove_silent(&self, number: u64) {
        let mut open = self.open();
        open.places.remove_silent(number);
        open.registered.remove(&number);
    }

    /// Returns the socket of a silent connection, and its peer; `None` if it was dropped.
    pub(super) fn handle(&self, number: u64) -> Option<(Arc<TcpStream>, SocketAddr)> {
        let open = self.open();
        let registered = open.registered.get(&number);
        registered.and_then(|one| match &one.closer {
            Closer::Tcp(stream) => Some((Arc::clone(stream), one.address)),
            Closer::Udp(_) => None,
        })
    }

    /// Returns the numbers of connections that wait, and of those of leases.
    pub(super) fn counts(&self) -> (usize, usize) {
        let open = self.open();
        (open.places.waiting(), open.places.established())
    }

    /// Returns the number of connections of leases that rest.
    pub(super) fn resting(&self) -> usize {
        self.open().places.resting()
    }

    /// Returns the number of connections that are open, or whose threads have not ended.
    pub(super) fn connections(&self) -> usize {
        self.open().registered.len()
    }

    /// Returns the number of open connections of peers that have shown who they are.
    pub(super) fn members(&self) -> usize {
        let open = self.open();
        let of_members = open.registered.values().filter(|one| one.peer.is_some());
        of_members.count()
    }

    /// Takes all places of leases.
    #[cfg(test)]
    pub(super) fn fill(&self) {
        let (from, now) = ([192, 0, 2, 1].into(), Instant::now());
        let places = &mut self.open().places;
        while let Admission::Admitted(number) = places.admit(from, now)
            && places.begin(number, now)
            && places
                .establish(number, from, Purpose::Control, now)
                .is_ok()
        {}
    }
}

impl Open {
    /// Closes a connection that lost its place. Its thread, if it has one, ends and removes it.
    fn close(&mut self, number: u64) -> Option<SocketAddr> {
        let registered = self.registered.get(&number)?;
        registered.closer.close();
        let address = registered.address;
        // A silent one has no thread; of the others the thread removes it as well.
        self.registered.remove(&number);
        Some(address)
    }
}
