//! One end of a connection: the protocol, the socket, and the frames.

mod establish;
mod lingering;
mod overdue;
mod receiving;
mod settling;
#[cfg(test)]
mod tests;

use super::settings;
use super::streams::{Inbox, STREAMS, inbox_bytes_max, place};
use crate::UNKNOWN_BYTES_MAX;
use crate::tls::{Peer, TlsError};
use bytes::{Bytes, BytesMut};
use fabric_wire::{HEADER_BYTES, TrafficClass};
use quinn_proto::{
    Connection, ConnectionHandle, Dir, Endpoint, Side, StreamId, Transmit, VarInt, WriteError,
};
use quinn_udp::{UdpSockRef, UdpSocketState};
use socket2::SockRef;
use std::fmt;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr, UdpSocket};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Size of a buffer that the kernel fills with coalesced datagrams.
pub(super) const DATAGRAM_BUFFER_BYTES: usize = 64 << 10;

/// Buffers filled in one call.
const BATCH: usize = 4;

/// Limit of calls before received data is processed.
const BATCHES_MAX: usize = 16;

/// Datagrams passed to the kernel in one call: those of a page on Ethernet, and some more.
const SEGMENTS_MAX: usize = 10;

/// Bytes passed to the kernel in one call: the size of an IP packet before segmentation.
const BURST_BYTES_MAX: usize = 65_000;

/// Requested size of a socket's buffer. The kernel limits it to `net.core.rmem_max`.
pub(super) const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// Limit of received frames of a peer that has shown no lease, which are short: more stays in the
/// protocol, whose window then closes.
const WAITING_INBOX_BYTES: usize = 8 << 10;

/// Limit of received frames of a VM that are not answered yet.
const INBOX_BYTES: usize = 256 << 10;

/// Bytes that an accepted connection occupies before its limits are lifted: the datagrams that began
/// it, buffers for input and output, and received data in the protocol and in the inbox.
pub const WAITING_BYTES: usize =
    2 * UNKNOWN_BYTES_MAX + 2 * DATAGRAM_BUFFER_BYTES + inbox_bytes_max(WAITING_INBOX_BYTES);

/// Returns how many bytes more it occupies after that.
#[must_use]
pub const fn lifted_bytes(class: TrafficClass) -> usize {
    (BATCH - 1) * DATAGRAM_BUFFER_BYTES
        + inbox_bytes_max(INBOX_BYTES)
        + settings::REQUEST_BYTES_MAX as usize
        + settings::answer_bytes_max(class)
}

/// Datagrams from one address.
pub(super) type Datagrams = Vec<BytesMut>;

/// A connection over UDP that carries frames: see the module. It is non-blocking, and makes
/// progress only when it is called.
///
/// Dropping it closes the connection. At the donor's end another thread does that once the peer has
/// acknowledged all that was sent: see `lingering`.
#[derive(Debug)]
pub struct UdpStream {
    /// Present until it is dropped.
    driver: Option<Box<Driver>>,
}

impl From<Driver> for UdpStream {
    fn from(driver: Driver) -> Self {
        Self {
            driver: Some(Box::new(driver)),
        }
    }
}

impl Deref for UdpStream {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        self.driver.as_ref().expect("present until it is dropped")
    }
}

impl DerefMut for UdpStream {
    fn deref_mut(&mut self) -> &mut Driver {
        self.driver.as_mut().expect("present until it is dropped")
    }
}

impl Drop for UdpStream {
    fn drop(&mut self) {
        if let Some(driver) = self.driver.take()
            && let Err(mut driver) = lingering::keep(driver)
        {
            driver.close();
        }
    }
}

/// The protocol of a [`UdpStream`] with its socket.
pub struct Driver {
    socket: Arc<UdpSocket>,
    udp: UdpSocketState,
    /// Whether another thread has closed it.
    ended: Arc<AtomicBool>,
    peer: SocketAddr,
    endpoint: Endpoint,
    handle: ConnectionHandle,
    connection: Connection,
    connected: bool,
    /// Whom the peer's certificate names, if it has shown one of the cluster.
    member: Option<Arc<Peer>>,
    /// Why it has failed.
    failed: Option<Failure>,
    /// Since when the peer's host says that no process has its port, and nothing has come from there.
    refused_since: Option<Instant>,
    /// Whether the first refusal ends it.
    believes_refusals: bool,
    inbox: Inbox,
    /// Streams that may have data to read.
    readable: [bool; STREAMS],
    /// The frame being written: its stream, and the remaining bytes.
    writing: Option<(usize, usize)>,
    /// Whether the protocol has reported room to write.
    writable: bool,
    /// Limit of received bytes that the protocol keeps at the donor's end.
    receivable: usize,
    input: Box<[u8]>,
    output: Vec<u8>,
    /// The part of `output` that the socket did not accept.
    unsent: Option<Transmit>,
}

#[derive(Debug)]
enum Failure {
    /// Of the protocol or the network.
    Broken(io::ErrorKind, String),
    /// One end does not accept the other.
    Tls(TlsError),
}

impl Failure {
    fn error(&self) -> io::Error {
        match self {
            Self::Broken(kind, text) => io::Error::new(*kind, text.clone()),
            Self::Tls(error) => error.clone().into(),
        }
    }
}

/// Closes a connection from another thread.
#[derive(Clone, Debug)]
pub struct UdpCloser {
    socket: Arc<UdpSocket>,
    ended: Arc<AtomicBool>,
}

impl UdpCloser {
    pub(super) fn new(socket: &Arc<UdpSocket>, ended: &Arc<AtomicBool>) -> Self {
        Self {
            socket: Arc::clone(socket),
            ended: Arc::clone(ended),
        }
    }

    /// Makes all current and future operations on the connection fail.
    pub fn close(&self) {
        // Release: pairs with `check`; the thread is woken only after that.
        self.ended.store(true, Ordering::Release);
        let _ = SockRef::from(&*self.socket).shutdown(Shutdown::Read);
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("peer", &self.peer)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// Returns who is at the other end, where certificates of the cluster say so.
    #[must_use]
    pub const fn peer(&self) -> Option<&Arc<Peer>> {
        self.member.as_ref()
    }

    fn new(
        socket: Arc<UdpSocket>,
        udp: UdpSocketState,
        ended: Arc<AtomicBool>,
        peer: SocketAddr,
        endpoint: Endpoint,
        handle: ConnectionHandle,
        connection: Connection,
    ) -> Self {
        // A smaller buffer loses packets earlier, which are then retransmitted.
        let _ = udp.set_recv_buffer_size(UdpSockRef::from(&*socket), SOCKET_BUFFER_BYTES);
        let _ = udp.set_send_buffer_size(UdpSockRef::from(&*socket), SOCKET_BUFFER_BYTES);
        Self {
            socket,
            udp,
            ended,
            peer,
            endpoint,
            handle,
            connection,
            connected: false,
            member: None,
            failed: None,
            refused_since: None,
            believes_refusals: false,
            inbox: Inbox::new(usize::MAX),
            readable: [false; STREAMS],
            writing: None,
            writable: false,
            receivable: UNKNOWN_BYTES_MAX,
            input: vec![0; DATAGRAM_BUFFER_BYTES].into_boxed_slice(),
            output: Vec::new(),
            unsent: None,
        }
    }

    /// Makes the buffers as large as page traffic needs them. Until then there is one for input, the
    /// smallest in which the kernel can coalesce, and one for output that grows with what is sent:
    /// strangers may have many connections.
    fn enlarge_buffers(&mut self) {
        if self.input.len() < BATCH * DATAGRAM_BUFFER_BYTES {
            self.input = vec![0; BATCH * DATAGRAM_BUFFER_BYTES].into_boxed_slice();
        }
        // Never in use between calls unless it is unsent, which stays where it is.
        let missing = DATAGRAM_BUFFER_BYTES.saturating_sub(self.output.len());
        self.output.reserve(missing);
    }

    /// Accepts as much as from a VM that has shown its lease, for traffic of this class. From now on
    /// the connection occupies [`WAITING_BYTES`] and [`lifted_bytes`].
    pub fn lift_limits(&mut self, class: TrafficClass) {
        self.enlarge_buffers();
        self.inbox.set_limit(INBOX_BYTES);
        let window = VarInt::from_u32(settings::REQUEST_BYTES_MAX);
        self.connection.set_receive_window(window);
        self.receivable = settings::REQUEST_BYTES_MAX as usize;
        let window = settings::answer_bytes_max(class);
        self.connection.set_send_window(window as u64);
    }

    /// Returns the descriptor to wait for: for input, or for room to send when blocked.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Returns whether the socket did not accept all output.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.unsent.is_some()
    }

    /// Returns whether received data was not read yet.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.failed.is_some() || self.inbox.is_ready()
    }

    /// Returns the latest time of the next [`poll_io`](Self::poll_io).
    #[must_use]
    pub fn wake_by(&mut self) -> Option<Instant> {
        self.connection.poll_timeout()
    }

    /// Returns the local address.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns a handle that closes the connection from another thread.
    #[must_use]
    pub fn closer(&self) -> UdpCloser {
        UdpCloser::new(&self.socket, &self.ended)
    }

    /// Receives data, and sends what is due: acknowledgements and retransmissions.
    ///
    /// # Errors
    ///
    /// Fails when the connection has failed.
    pub fn poll_io(&mut self) -> io::Result<()> {
        self.receive();
        self.send_due()
    }

    /// Sends what is due. Does not receive: data that the caller has not seen must remain in the
    /// socket, so that it stays readable.
    fn send_due(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if self.connection.poll_timeout().is_some_and(|due| due <= now) {
            self.connection.handle_timeout(now);
            self.take_events();
        }
        self.transmit();
        self.check()
    }

    /// Reads received data: whole frames, one after the other. Returns 0 when the peer has closed
    /// the connection in order.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is no data; otherwise the connection has failed.
    pub fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let mut taken = self.inbox.take(target);
        if taken == 0 {
            self.receive();
            taken = self.inbox.take(target);
        }
        if taken > 0 {
            return Ok(taken);
        }
        match self.send_due() {
            Ok(()) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Sends frames, each of which starts with its whole header in one part.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when nothing was accepted; otherwise the connection has failed.
    pub fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.check()?;
        let mut written = self.write_parts(parts)?;
        self.transmit();
        if written == 0 {
            // The peer may have granted room.
            self.poll_io()?;
            written = self.write_parts(parts)?;
            self.transmit();
        }
        if written == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(written)
    }

    fn write_parts(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut written = 0;
        for part in parts {
            let mut rest: &[u8] = part;
            while !rest.is_empty() {
                let (number, left) = match self.writing {
                    Some(writing) => writing,
                    None => rest
                        .first_chunk::<HEADER_BYTES>()
                        .and_then(place)
                        .expect("frames of ours, with whole headers"),
                };
                let some = &rest[..left.min(rest.len())];
                match self.connection.send_stream(stream_id(number)).write(some) {
                    Ok(count) => {
                        written += count;
                        rest = &rest[count..];
                        self.writing = (left > count).then_some((number, left - count));
                    }
                    Err(WriteError::Blocked) => return Ok(written),
                    Err(error) => {
                        self.fail(io::ErrorKind::ConnectionReset, error.to_string());
                        self.check()?;
                    }
                }
            }
        }
        Ok(written)
    }

    /// Sleeps until this end or its user may have work; returns early when a timer of the protocol
    /// is due.
    ///
    /// # Errors
    ///
    /// `TimedOut` after the deadline.
    pub fn wait(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let now = Instant::now();
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let until = [deadline, self.wake_by()].into_iter().flatten().min();
        let room = if self.is_blocked() { libc::POLLOUT } else { 0 };
        fabric_host::poll::sleep_on(self.fd(), libc::POLLIN | room, until)
    }

    fn check(&self) -> io::Result<()> {
        // Acquire: pairs with `close`.
        if self.ended.load(Ordering::Acquire) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        self.failed.as_ref().map_or(Ok(()), |why| Err(why.error()))
    }

    fn fail(&mut self, kind: io::ErrorKind, text: String) {
        self.failed.get_or_insert(Failure::Broken(kind, text));
    }

    fn transmit(&mut self) {
        if let Some(transmit) = self.unsent.take()
            && !self.send(transmit)
        {
            return;
        }
        let fitting = BURST_BYTES_MAX / usize::from(self.connection.current_mtu());
        let segments = self
            .udp
            .max_gso_segments()
            .min(fitting)
            .clamp(1, SEGMENTS_MAX);
        loop {
            self.output.clear();
            let now = Instant::now();
            let next = self
                .connection
                .poll_transmit(now, segments, &mut self.output);
            let Some(transmit) = next else {
                return;
            };
            if !self.send(transmit) {
                return;
            }
        }
    }

    /// Sends `output`. Returns false when the socket is full; the data is then kept.
    fn send(&mut self, transmit: Transmit) -> bool {
        let contents = &self.output[..transmit.size];
        let sent = match transmit.segment_size {
            Some(segment) if segment < transmit.size => {
                let several = quinn_udp::Transmit {
                    destination: self.peer,
                    ecn: None,
                    contents,
                    segment_size: Some(segment),
                    src_ip: None,
                };
                self.udp.try_send(UdpSockRef::from(&*self.socket), &several)
            }
            _ => self.socket.send(contents).map(drop),
        };
        match sent {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.unsent = Some(transmit);
                false
            }
            // Treated as a loss, so it is retransmitted. Errors for datagrams that are too long are
            // how the path MTU is discovered.
            Err(error) => {
                self.note_send_error(&error);
                true
            }
            Ok(()) => true,
        }
    }

    /// Closes the connection. What was not acknowledged is lost if it does not arrive now.
    fn close(&mut self) {
        // Best effort: notifies the peer.
        if self.failed.is_none() {
            self.connection.close(Instant::now(), CLOSED, Bytes::new());
            self.transmit();
        }
    }
}

/// Error code of an orderly close.
const CLOSED: VarInt = VarInt::from_u32(0);

/// The VM opens all streams.
fn stream_id(number: usize) -> StreamId {
    StreamId::new(Side::Client, Dir::Bi, number as u64)
}
