//! A connection that carries frames: TCP, with or without TLS, or QUIC over UDP.

use crate::PathKind;
use crate::tls::{Peer, TlsStream};
use crate::udp::{self, Expected, Fingerprint, UdpCloser, UdpStream};
use fabric_host::poll::sleep_on;
use fabric_host::prefer_latency;
use fabric_identity::ExpectedNode;
use fabric_wire::TrafficClass;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What connections to a donor are made of.
#[derive(Clone, Debug, Default)]
pub enum Carrier {
    /// TCP.
    #[default]
    Tcp,
    /// TCP under TLS, to this node.
    Tls(ExpectedNode),
    /// QUIC over UDP, to the donor with this fingerprint, or to any.
    Udp(Option<Fingerprint>),
    /// QUIC over UDP with certificates of the cluster, to this node.
    Quic(ExpectedNode),
}

impl Carrier {
    /// What pages travel by on such connections.
    #[must_use]
    pub const fn kind(&self) -> PathKind {
        match self {
            Self::Tcp | Self::Tls(_) => PathKind::Tcp,
            Self::Udp(_) | Self::Quic(_) => PathKind::Udp,
        }
    }

    /// Whether it is TCP, with or without TLS.
    #[must_use]
    pub const fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp | Self::Tls(_))
    }
}

/// A connection. What was sent on it before it broke may have arrived or not.
#[derive(Debug)]
pub enum Stream {
    /// TCP.
    Tcp(Arc<TcpStream>),
    /// TCP under TLS.
    Tls(Box<TlsStream>),
    /// QUIC over UDP.
    Udp(UdpStream),
}

/// Ends a connection from another thread.
#[derive(Debug)]
pub enum Closer {
    /// Of a TCP connection: the descriptor of the connection itself.
    Tcp(Arc<TcpStream>),
    /// Of a QUIC connection.
    Udp(UdpCloser),
}

impl Closer {
    /// Closes the connection: its waiters and users get an error, or its end, from now on.
    pub fn close(&self) {
        match self {
            // It may be over already.
            Self::Tcp(stream) => drop(stream.shutdown(Shutdown::Both)),
            Self::Udp(closer) => closer.close(),
        }
    }
}

impl Stream {
    /// Connects.
    ///
    /// # Errors
    ///
    /// After `timeout` at the latest, and [`HANDSHAKE_TIMEOUT`](crate::tls::HANDSHAKE_TIMEOUT) under
    /// TLS.
    pub fn connect(peer: SocketAddr, carrier: &Carrier, timeout: Duration) -> io::Result<Self> {
        Ok(match carrier {
            Carrier::Tcp => {
                let stream = TcpStream::connect_timeout(&peer, timeout)?;
                prefer_latency(&stream)?;
                Self::Tcp(stream.into())
            }
            Carrier::Tls(node) => {
                let stream = TcpStream::connect_timeout(&peer, timeout)?;
                Self::Tls(Box::new(TlsStream::connect(stream, node)?))
            }
            Carrier::Udp(fingerprint) => {
                Self::over_udp(peer, &Expected::Fingerprint(*fingerprint), timeout)?
            }
            Carrier::Quic(node) => Self::over_udp(peer, &Expected::Node(node.clone()), timeout)?,
        })
    }

    fn over_udp(peer: SocketAddr, expected: &Expected, timeout: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + timeout;
        UdpStream::connect(peer, expected, deadline).map(Self::Udp)
    }

    /// From now on [`read`](Self::read) and [`write`](Self::write_vectored) do not block.
    ///
    /// # Errors
    ///
    /// When the connection is over.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nonblocking(true),
            // They never block.
            Self::Tls(_) | Self::Udp(_) => Ok(()),
        }
    }

    /// Reads what there is; 0 at the end.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is nothing now; else the connection broke.
    pub fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&**stream).read(target),
            Self::Tls(stream) => stream.read(target),
            Self::Udp(stream) => stream.read(target),
        }
    }

    /// Writes frames, of which each begins with its whole header in one part. What was not taken is
    /// to be written next.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when nothing is taken now; else the connection broke.
    pub fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&**stream).write_vectored(parts),
            Self::Tls(stream) => stream.write_vectored(parts),
            Self::Udp(stream) => stream.write_vectored(parts),
        }
    }

    /// Reads as [`read`](Self::read) does, but waits until there is something.
    ///
    /// # Errors
    ///
    /// `TimedOut` after `deadline`; else the connection broke.
    pub fn read_by(&mut self, target: &mut [u8], deadline: Instant) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => {
                let left = time_left(deadline)?;
                stream.set_read_timeout(Some(left))?;
                match (&**stream).read(target) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        Err(io::ErrorKind::TimedOut.into())
                    }
                    read => read,
                }
            }
            Self::Tls(_) | Self::Udp(_) => loop {
                match self.read(target) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.wait(false, Some(deadline))?;
                    }
                    read => return read,
                }
            },
        }
    }

    /// Writes a whole frame.
    ///
    /// # Errors
    ///
    /// `TimedOut` after `deadline`; else the connection broke.
    pub fn write_all_by(&mut self, frame: &[u8], deadline: Instant) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_write_timeout(Some(time_left(deadline)?))?;
                (&**stream).write_all(frame)
            }
            Self::Tls(_) | Self::Udp(_) => {
                let mut rest = frame;
                while !rest.is_empty() {
                    match self.write_vectored(&[IoSlice::new(rest)]) {
                        Ok(count) => rest = &rest[count..],
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            self.wait(true, Some(deadline))?;
                        }
                        Err(error) => return Err(error),
                    }
                }
                while self.is_blocked() {
                    self.wait(true, Some(deadline))?;
                    self.poll_io()?;
                }
                Ok(())
            }
        }
    }

    /// Sleeps until there is something to read, or room to write if that is wanted; may return
    /// early.
    ///
    /// # Errors
    ///
    /// `TimedOut` after `deadline`.
    pub fn wait(&mut self, writable: bool, deadline: Option<Instant>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                if let Some(deadline) = deadline {
                    time_left(deadline)?;
                }
                let events = if writable {
                    libc::POLLOUT
                } else {
                    libc::POLLIN
                };
                sleep_on(stream.as_raw_fd(), events, deadline)
            }
            Self::Tls(stream) => {
                if let Some(deadline) = deadline {
                    time_left(deadline)?;
                }
                stream.wait(writable, deadline)
            }
            // Room is made by what the peer sends.
            Self::Udp(stream) => stream.wait(deadline),
        }
    }

    /// Does what is due while nothing is asked for.
    ///
    /// # Errors
    ///
    /// When the connection is of no more use.
    pub fn poll_io(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(_) => Ok(()),
            Self::Tls(stream) => stream.poll_io(),
            Self::Udp(stream) => stream.poll_io(),
        }
    }

    /// Whether the socket has not accepted yet what was encrypted.
    fn is_blocked(&self) -> bool {
        match self {
            Self::Tls(stream) => stream.is_blocked(),
            // It sends again what is lost anyway.
            Self::Tcp(_) | Self::Udp(_) => false,
        }
    }

    /// Acknowledges all that has come: the caller pauses, and nobody else drives the connection.
    pub fn acknowledge(&mut self) {
        if let Self::Udp(stream) = self {
            stream.acknowledge();
        }
    }

    /// Waits for the peer, and asks it for an acknowledgement if nothing has come by `overdue`: see
    /// [`ControlStream::ask_if_silent`](crate::control::ControlStream::ask_if_silent).
    pub fn ask_if_silent(&mut self, overdue: Instant) {
        if let Self::Udp(stream) = self {
            stream.ask_if_silent(overdue);
        }
    }

    /// Waits until all that was sent is acknowledged, or the deadline: see
    /// [`ControlStream::settle`](crate::control::ControlStream::settle).
    pub fn settle(&mut self, deadline: Instant) {
        if let Self::Udp(stream) = self {
            stream.settle(deadline);
        }
    }

    /// When it has to be tended at the latest.
    pub fn wake_by(&mut self) -> Option<Instant> {
        match self {
            Self::Tcp(_) | Self::Tls(_) => None,
            Self::Udp(stream) => stream.wake_by(),
        }
    }

    /// What to watch, whether for room too, and whether it is to be watched while nothing is asked
    /// for.
    pub fn interest(&self, sending: bool) -> (RawFd, bool, bool) {
        match self {
            Self::Tcp(stream) => (stream.as_raw_fd(), sending, false),
            Self::Tls(stream) => {
                let blocked = stream.is_blocked();
                (stream.socket().as_raw_fd(), sending || blocked, blocked)
            }
            Self::Udp(stream) => (stream.fd(), stream.is_blocked(), true),
        }
    }

    /// Whether something was received that was not read yet.
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Tcp(_) => false,
            Self::Tls(stream) => stream.is_ready(),
            Self::Udp(stream) => stream.is_ready(),
        }
    }

    /// Returns how many bytes more an accepted connection occupies once its limits are lifted.
    #[must_use]
    pub const fn lifted_bytes(&self, class: TrafficClass) -> usize {
        match self {
            Self::Tcp(_) | Self::Tls(_) => 0,
            Self::Udp(_) => udp::lifted_bytes(class),
        }
    }

    /// Whether whatever was received or encrypted has been read or sent, so that its socket alone
    /// says when there is something to do. Never over UDP, where the protocol has timers.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        match self {
            Self::Tcp(_) => true,
            Self::Tls(stream) => stream.is_quiet(),
            Self::Udp(_) => false,
        }
    }

    /// Lifts the limits of what the peer may send before it has shown what it may do.
    pub fn lift_limits(&mut self, class: TrafficClass) {
        if let Self::Udp(stream) = self {
            stream.lift_limits(class);
        }
    }

    /// This end's address.
    ///
    /// # Errors
    ///
    /// When it has none any more.
    pub fn local(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.local_addr(),
            Self::Tls(stream) => stream.socket().local_addr(),
            Self::Udp(stream) => stream.local(),
        }
    }

    /// What ends the connection from another thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        match self {
            Self::Tcp(stream) => Closer::Tcp(Arc::clone(stream)),
            Self::Tls(stream) => Closer::Tcp(stream.shared_socket()),
            Self::Udp(stream) => Closer::Udp(stream.closer()),
        }
    }

    /// Who is at the other end, where certificates say so.
    #[must_use]
    pub fn peer(&self) -> Option<&Arc<Peer>> {
        match self {
            Self::Tls(stream) => Some(stream.peer()),
            Self::Udp(stream) => stream.peer(),
            Self::Tcp(_) => None,
        }
    }

    /// The TCP connection.
    ///
    /// # Errors
    ///
    /// When it is none, or one under TLS.
    pub fn into_tcp(self) -> io::Result<TcpStream> {
        match self {
            Self::Tcp(stream) => owned(stream),
            Self::Tls(_) | Self::Udp(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The socket of a TCP connection with or without TLS, on which nothing travels any more: it shows
    /// that the other end is there.
    ///
    /// # Errors
    ///
    /// When it is none, or the process has no descriptor left.
    pub fn into_socket(self) -> io::Result<TcpStream> {
        match self {
            Self::Tcp(stream) => owned(stream),
            Self::Tls(stream) => stream.into_socket(),
            Self::Udp(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// The connection itself, or another descriptor of it while it has a closer.
fn owned(stream: Arc<TcpStream>) -> io::Result<TcpStream> {
    Arc::try_unwrap(stream).or_else(|shared| shared.try_clone())
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}
