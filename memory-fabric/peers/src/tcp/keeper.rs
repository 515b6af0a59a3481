//! The threads that make connections: one accepts those of members before this one, one per member
//! after this one connects to it. They may wait; the thread that uses the connections does not.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use fabric_coherence::members::MEMBERS_MAX;
use fabric_host::Seldom;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::channel::Channel;
use super::handshake::{
    Credentials, HANDSHAKE_TIMEOUT, HandshakeError, accept, connect, refuse, secure_from, secure_to,
};
use super::path::Path;
use super::upgrade::Agreed;

/// First pause between attempts to connect; doubled after each, up to [`BACKOFF_MAX`].
const BACKOFF_MIN: Duration = Duration::from_millis(10);

/// Longest pause between attempts to connect.
const BACKOFF_MAX: Duration = Duration::from_millis(500);

/// Pause after a failure to accept, which mostly means that the process has no descriptor left.
const ACCEPT_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Most connections in their handshake. One more ends the oldest: who keeps them open cannot keep
/// members out.
const HANDSHAKES_MAX: usize = 2 * MEMBERS_MAX;

/// News of the threads that are kept until they are read; later ones wait or are dropped.
const NEWS_MAX: usize = 64;

/// What the threads report.
#[derive(Debug)]
pub(super) enum News {
    /// A connection is made.
    Connected(Member, Path),
    /// An attempt to connect to a member failed.
    Failed(Member, HandshakeError),
    /// A connection was not accepted.
    Refused(SocketAddr, HandshakeError),
}

/// Reports news, and makes the descriptor readable that the user of the connections waits on.
#[derive(Clone, Debug)]
struct Reporter {
    news: SyncSender<News>,
    notifier: Arc<OwnedFd>,
}

impl Reporter {
    /// Reports a connection. Returns whether it has a receiver.
    fn connected(&self, peer: Member, path: Path) -> bool {
        let sent = self.news.send(News::Connected(peer, path)).is_ok();
        self.signal();
        sent
    }

    /// Reports what is dropped if there is too much of it.
    fn report(&self, news: News) {
        if let Err(TrySendError::Full(_)) = self.news.try_send(news) {
            tracing::debug!("too many failed connections between compute nodes to report all");
        }
        self.signal();
    }

    fn signal(&self) {
        // Fails only when the counter is at its maximum: the notifier is readable anyway.
        let _ = rustix::io::write(&*self.notifier, &1_u64.to_ne_bytes());
    }
}

/// The threads.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) news: Receiver<News>,
    /// Readable when there may be news.
    pub(super) notifier: Arc<OwnedFd>,
    /// For each member after this one: asks for a connection.
    wanted: Vec<Option<SyncSender<()>>>,
    stop: Arc<OwnedFd>,
    acceptor: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the threads. Every connection is made without being asked for once.
    pub(super) fn start(
        credentials: Credentials,
        addresses: &[SocketAddr],
        listener: TcpListener,
    ) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let notifier = Arc::new(eventfd(0, flags)?);
        let stop = Arc::new(eventfd(0, flags)?);
        let (sender, news) = sync_channel(NEWS_MAX);
        let reporter = Reporter {
            news: sender,
            notifier: Arc::clone(&notifier),
        };
        let credentials = Arc::new(credentials);
        let me = credentials.me.index();
        let mut wanted = Vec::new();
        for (address, place) in addresses.iter().zip(0_u8..) {
            let peer = Member::at(place).filter(|peer| peer.index() > me);
            let Some(peer) = peer else {
                wanted.push(None);
                continue;
            };
            let (sender, requests) = sync_channel(1);
            let (address, reporter) = (*address, reporter.clone());
            let credentials = Arc::clone(&credentials);
            std::thread::Builder::new()
                .name(format!("peer-{place}-connect"))
                .spawn(move || {
                    keep_connecting(peer, address, &credentials, &requests, &reporter)
                })?;
            let _ = sender.try_send(());
            wanted.push(Some(sender));
        }
        let stopping = Arc::clone(&stop);
        listener.set_nonblocking(true)?;
        let acceptor = std::thread::Builder::new()
            .name("peers-accept".to_owned())
            .spawn(move || keep_accepting(&listener, &stopping, &credentials, &reporter))?;
        Ok(Self {
            news,
            notifier,
            wanted,
            stop,
            acceptor: Some(acceptor),
        })
    }

    /// Asks for a new connection to a member, if this node is the one that connects.
    pub(super) fn want(&self, peer: Member) {
        if let Some(Some(sender)) = self.wanted.get(peer.index()) {
            // If the place is taken, the request before this one is not read yet.
            let _ = sender.try_send(());
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.wanted.clear();
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        // Threads that connect end with their attempt, which has a deadline, and find the channel
        // closed. Nothing waits for them.
    }
}

fn keep_connecting(
    peer: Member,
    address: SocketAddr,
    credentials: &Credentials,
    requests: &Receiver<()>,
    reporter: &Reporter,
) {
    while requests.recv().is_ok() {
        let mut pause = BACKOFF_MIN;
        loop {
            match try_connect(peer, address, credentials) {
                Ok(stream) => {
                    if reporter.connected(peer, stream) {
                        break;
                    }
                    return;
                }
                Err(error) => reporter.report(News::Failed(peer, error)),
            }
            if let Err(RecvTimeoutError::Disconnected) = requests.recv_timeout(pause) {
                return;
            }
            pause = (pause * 2).min(BACKOFF_MAX);
        }
    }
}

fn try_connect(
    peer: Member,
    address: SocketAddr,
    credentials: &Credentials,
) -> Result<Path, HandshakeError> {
    let socket = TcpStream::connect_timeout(&address, HANDSHAKE_TIMEOUT)?;
    let mut stream = secure_to(socket, credentials, peer)?;
    let agreed = connect(&mut stream, credentials, peer)?;
    upgrade(stream, credentials, peer, agreed)
}

/// Makes rings over a connection whose ends agreed on that.
fn upgrade(
    stream: Channel,
    credentials: &Credentials,
    peer: Member,
    agreed: Agreed,
) -> Result<Path, HandshakeError> {
    match &credentials.upgrades {
        Some(upgrades) => upgrades.upgrade(stream, peer, agreed),
        None => Ok(Path::Socket(stream)),
    }
}

/// The connections in their handshake, oldest first.
#[derive(Debug, Default)]
struct Openings {
    streams: Mutex<VecDeque<(u64, TcpStream)>>,
    next: AtomicU64,
}

impl Openings {
    /// Adds a connection, and ends the oldest one if there are too many.
    fn add(&self, stream: &TcpStream) -> io::Result<u64> {
        // Relaxed: only the value has to be unique.
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.len() >= HANDSHAKES_MAX
            && let Some((_, oldest)) = streams.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        streams.push_back((id, stream.try_clone()?));
        Ok(id)
    }

    /// Removes a connection; returns whether it was not ended.
    fn remove(&self, id: u64) -> bool {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let place = streams.iter().position(|(other, _)| *other == id);
        place.and_then(|place| streams.remove(place)).is_some()
    }
}

fn keep_accepting(
    listener: &TcpListener,
    stop: &OwnedFd,
    credentials: &Arc<Credentials>,
    reporter: &Reporter,
) {
    let openings = Arc::new(Openings::default());
    // Any host that reaches the port can use up descriptors and threads.
    let notices = Seldom::notices();
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
        ];
        // Fails only when a signal arrives, or the kernel has no memory.
        let _ = poll(&mut fds, None);
        if !fds[1].revents().is_empty() {
            return;
        }
        let (stream, address) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => {
                if let Some(unreported) = notices.pass(Instant::now()) {
                    tracing::warn!(
                        unreported,
                        "no connection of a compute node can be accepted: {error}"
                    );
                }
                let mut fds = [PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
                let _ = poll(&mut fds, Some(&ACCEPT_PAUSE));
                continue;
            }
        };
        // Here, since the threads below begin in any order: the oldest is the one that came first.
        let id = match openings.add(&stream) {
            Ok(id) => id,
            Err(error) => {
                if let Some(unreported) = notices.pass(Instant::now()) {
                    tracing::warn!(unreported, "a connection of {address} is dropped: {error}");
                }
                continue;
            }
        };
        let (keeping, credentials) = (Arc::clone(&openings), Arc::clone(credentials));
        let reporter = reporter.clone();
        let spawned = std::thread::Builder::new()
            .name("peer-accept".to_owned())
            .spawn(move || open(&keeping, id, stream, address, &credentials, &reporter));
        if let Err(error) = spawned {
            openings.remove(id);
            if let Some(unreported) = notices.pass(Instant::now()) {
                tracing::warn!(
                    unreported,
                    "a connection of {address} is dropped: no thread for it: {error}"
                );
            }
        }
    }
}

/// Does the handshake of one connection.
fn open(
    openings: &Openings,
    id: u64,
    stream: TcpStream,
    address: SocketAddr,
    credentials: &Credentials,
    reporter: &Reporter,
) {
    let accepted = match secure_from(stream, credentials) {
        Ok((mut stream, known)) => match accept(&mut stream, credentials, known) {
            Ok((peer, agreed)) => Ok((peer, agreed, stream)),
            Err(error) => Err((error, Some(stream))),
        },
        Err((error, socket)) => Err((error, socket.map(Channel::Plain))),
    };
    let is_open = openings.remove(id);
    match accepted {
        // Who is let in is none of those who keep connections open.
        Ok((peer, agreed, stream)) if is_open => match upgrade(stream, credentials, peer, agreed) {
            Ok(path) => drop(reporter.connected(peer, path)),
            Err(error) => reporter.report(News::Refused(address, error)),
        },
        Ok(_) => {}
        Err((error, stream)) => {
            let refusal = error.refusal();
            // Before the other end learns it: what that does next may end the wait for members.
            reporter.report(News::Refused(address, error));
            if let (Some(reason), Some(mut stream)) = (refusal, stream) {
                refuse(&mut stream, reason);
            }
        }
    }
}
