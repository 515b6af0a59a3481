//! Setting up rings over a connection whose ends know each other.
//!
//! The ends exchange offers, then whether they could connect, then whether the bytes arrive that
//! each writes into the other's ring, with the reason where something fails. Both have seen the same
//! messages and so decide alike: the rings carry the frames, or the connection does.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use fabric_coherence::members::MEMBERS_MAX;
use fabric_host::metrics::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::channel::Channel;
use super::config::RdmaPeers;
use super::handshake::{HandshakeError, Opening};
use super::hello::{NONCE_BYTES, Rdma, Step};
use super::path::{Path, RingPath};
use crate::ring::{Closer, OFFER_BYTES, RingStream, Rings};

/// Time limit of setting up rings.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit of the first bytes: more than the adapters' own retries take.
const PROBE_TIMEOUT: Duration = Duration::from_millis(2500);

/// Rings to a member that broke so often are not made again, where they are not demanded.
const BREAKS_MAX: u8 = 3;

/// Longest reason that travels.
const REASON_BYTES_MAX: usize = 200;

/// What rings are made with, and what became of them.
#[derive(Debug)]
pub(super) struct Upgrades {
    rings: Arc<dyn Rings>,
    is_demanded: bool,
    closer: Closer,
    /// How long WRITEs to rings take.
    write_times: Arc<Histogram>,
    /// By member: how often its rings broke.
    breaks: [AtomicU8; MEMBERS_MAX],
    /// By member: whether rings are being made.
    is_busy: [AtomicBool; MEMBERS_MAX],
}

/// What both ends of a connection know after the handshake.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    /// Both ends offer RDMA.
    pub(super) rdma: bool,
    /// The challenges of this connection.
    pub(super) mine: [u8; NONCE_BYTES],
    pub(super) theirs: [u8; NONCE_BYTES],
}

/// Returned when an end of a connection could not do its part, for the same reason at both ends.
type Failed = String;

impl Upgrades {
    pub(super) fn new(rdma: &RdmaPeers, write_times: &Arc<Histogram>) -> io::Result<Self> {
        Ok(Self {
            rings: Arc::clone(&rdma.rings),
            is_demanded: rdma.is_demanded,
            closer: Closer::start()?,
            write_times: Arc::clone(write_times),
            breaks: Default::default(),
            is_busy: Default::default(),
        })
    }

    /// What this end says of RDMA to a member.
    pub(super) fn choice(&self, to: Member) -> Rdma {
        // Relaxed: it orders no other memory accesses.
        let breaks = self.breaks[to.index()].load(Ordering::Relaxed);
        match self.is_demanded {
            true => Rdma::Demanded,
            false if breaks < BREAKS_MAX => Rdma::Offered,
            false => Rdma::Absent,
        }
    }

    /// The rings to a member broke.
    pub(super) fn note_break(&self, peer: Member) {
        // Relaxed: see above. One thread changes it.
        let breaks = &self.breaks[peer.index()];
        let count = breaks.load(Ordering::Relaxed).saturating_add(1);
        breaks.store(count, Ordering::Relaxed);
        if count == BREAKS_MAX && !self.is_demanded {
            tracing::warn!("RDMA to {peer} broke {count} times: TCP is used from now on");
        }
    }

    /// Makes rings over a connection, if both ends want to and can.
    pub(super) fn upgrade(
        &self,
        mut channel: Channel,
        peer: Member,
        agreed: Agreed,
    ) -> Result<Path, HandshakeError> {
        if !agreed.rdma {
            return Ok(Path::Socket(channel));
        }
        let busy = &self.is_busy[peer.index()];
        // Acquire and Release: one at a time.
        if busy.swap(true, Ordering::Acquire) {
            let text = format!("another connection to {peer} is being made");
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text).into());
        }
        let made = self.try_upgrade(&mut channel, peer, agreed);
        busy.store(false, Ordering::Release);
        match made? {
            Ok(stream) => {
                tracing::info!("RDMA is used to {peer}");
                Ok(Path::Rings(Box::new(RingPath::new(stream, channel))))
            }
            Err(reason) if self.is_demanded => Err(HandshakeError::Rdma(reason)),
            Err(reason) => {
                tracing::info!("TCP is used to {peer}, as RDMA is not possible: {reason}");
                Ok(Path::Socket(channel))
            }
        }
    }

    fn try_upgrade(
        &self,
        channel: &mut Channel,
        peer: Member,
        agreed: Agreed,
    ) -> Result<Result<RingStream, Failed>, HandshakeError> {
        let deadline = Instant::now() + UPGRADE_TIMEOUT;
        let socket = channel.socket();
        let (local, remote) = (socket.local_addr()?.ip(), socket.peer_addr()?.ip());
        let made = self.rings.prepare(local, remote, &peer.to_string());
        let offer = made.as_ref().map(|made| made.offer());
        let offer = offer.as_ref().map_err(|error| *error);
        let theirs = match exchange(channel, deadline, offer)? {
            Ok(theirs) => theirs,
            Err(reason) => return Ok(Err(reason)),
        };
        let connected = made.and_then(|made| made.connect(&theirs));
        let done = connected.as_ref().map(|_| &[]);
        if let Err(reason) = exchange::<0>(channel, deadline, done)? {
            return Ok(Err(reason));
        }
        let write_times = Arc::clone(&self.write_times);
        let mut stream = RingStream::new(connected?, self.closer.clone(), write_times);
        let until = deadline.min(Instant::now() + PROBE_TIMEOUT);
        let probed = probe(&mut stream, agreed, until);
        let works = exchange::<0>(channel, deadline, probed.as_ref().map(|()| &[]))?;
        Ok(works.map(|_| stream))
    }
}

/// Sends what this end has, or why it has nothing, and receives the same of the other end. Fails for
/// the same reason at both ends.
fn exchange<const BYTES: usize>(
    channel: &mut Channel,
    deadline: Instant,
    mine: Result<&[u8; BYTES], &io::Error>,
) -> Result<Result<[u8; BYTES], Failed>, HandshakeError> {
    const { assert!(BYTES <= OFFER_BYTES && OFFER_BYTES <= REASON_BYTES_MAX) };
    let mut opening = Opening::until(channel, deadline);
    let text = mine.err().map(|error| fabric_host::describe(error));
    let (is_good, bytes) = match (&mine, &text) {
        (Ok(bytes), _) => (1, bytes.as_slice()),
        (_, text) => (0, shortened(text.as_deref().unwrap_or_default()).as_bytes()),
    };
    let length = u8::try_from(bytes.len()).expect("a short reason");
    opening.write(Step::Rings, &[&[is_good, length], bytes])?;
    opening.expect(Step::Rings)?;
    let [is_good, length] = opening.read()?;
    let mut bytes = vec![0; usize::from(length)];
    opening.fill(&mut bytes)?;
    let theirs = match is_good {
        0 => {
            let text = String::from_utf8_lossy(&bytes);
            let text = text.chars().filter(|one| !one.is_control());
            Err(format!("at the other end, {}", text.collect::<String>()))
        }
        _ => Ok(bytes.try_into().map_err(|_| HandshakeError::NotAPeer)?),
    };
    Ok(match text {
        Some(text) => Err(text),
        None => theirs,
    })
}

/// The beginning of a reason that is too long.
fn shortened(text: &str) -> &str {
    let mut end = text.len().min(REASON_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Sends this end's challenge through the rings, and waits for that of the other end.
fn probe(stream: &mut RingStream, agreed: Agreed, deadline: Instant) -> io::Result<()> {
    let count = stream.write(&[IoSlice::new(&agreed.mine)])?;
    assert_eq!(count, NONCE_BYTES, "an empty ring has room");
    let mut bytes = [0; NONCE_BYTES];
    let mut filled = 0;
    while filled < NONCE_BYTES {
        match stream.read(&mut bytes[filled..]) {
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, deadline)?,
            Err(error) => return Err(error),
        }
    }
    match bytes == agreed.theirs {
        true => Ok(()),
        false => Err(io::Error::other("other bytes arrive than were sent")),
    }
}

/// Waits until there may be something to read.
fn wait(stream: &mut RingStream, deadline: Instant) -> io::Result<()> {
    stream.arm();
    if stream.is_readable() {
        return Ok(());
    }
    let left = deadline.saturating_duration_since(Instant::now());
    if left == Duration::ZERO {
        let text = format!("nothing that is written arrives within {PROBE_TIMEOUT:?}");
        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
    }
    let timeout = Timespec::try_from(left).ok();
    let fd = stream.event_fd();
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
