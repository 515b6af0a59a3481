//! QUIC in a build without it: no connection exists, and constructors fail with the reason.

pub use fabric_identity::{Fingerprint, FingerprintError};

use crate::tls::Peer;
use fabric_identity::{ExpectedNode, SharedCredentials};
use fabric_wire::TrafficClass;
use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

fn left_out() -> io::Error {
    let text = "this build of ssi-hv has no UDP; build it with the cargo feature `udp`";
    io::Error::new(io::ErrorKind::Unsupported, text)
}

/// Bytes that a connection occupies.
pub const WAITING_BYTES: usize = 0;

/// Returns how many bytes more it occupies later.
#[must_use]
pub const fn lifted_bytes(_: TrafficClass) -> usize {
    0
}

/// Who has to answer at the other end of a connection.
#[derive(Clone, Debug)]
pub enum Expected {
    /// The donor with this fingerprint, or any.
    Fingerprint(Option<Fingerprint>),
    /// This node of the cluster.
    Node(ExpectedNode),
}

/// Closes a connection from another thread.
#[derive(Debug)]
pub struct UdpCloser(Infallible);

impl UdpCloser {
    /// Closes the connection.
    pub fn close(&self) {
        match self.0 {}
    }
}

/// A UDP port for connections of VMs.
#[derive(Debug)]
pub struct Listener(Infallible);

/// A VM that requests a connection.
#[derive(Debug)]
pub struct Arrival {
    /// Address of the VM.
    pub peer: SocketAddr,
    never: Infallible,
}

impl Arrival {
    /// Returns a handle that closes the resulting connection.
    #[must_use]
    pub fn closer(&self) -> UdpCloser {
        match self.never {}
    }

    /// Establishes the connection.
    ///
    /// # Errors
    ///
    /// None: no VM can request one.
    pub fn accept(self, _: Instant) -> io::Result<UdpStream> {
        match self.never {}
    }
}

impl Listener {
    /// Listens.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn bind(_: SocketAddr, _: Option<&Arc<SharedCredentials>>) -> io::Result<Self> {
        Err(left_out())
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        match self.0 {}
    }

    /// Returns the fingerprint of its own certificate.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match self.0 {}
    }

    /// Passes new connections to the caller.
    pub fn run(&self, _: &AtomicBool, _: &mut dyn FnMut(Arrival) -> bool) {
        match self.0 {}
    }
}

/// A connection.
#[derive(Debug)]
pub struct UdpStream(Infallible);

impl UdpStream {
    /// Connects to a donor.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn connect(_: SocketAddr, _: &Expected, _: Instant) -> io::Result<Self> {
        Err(left_out())
    }

    /// Returns who is at the other end.
    #[must_use]
    pub const fn peer(&self) -> Option<&Arc<Peer>> {
        match self.0 {}
    }

    /// Returns the descriptor of its socket.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        match self.0 {}
    }

    /// Returns whether the socket did not accept all output.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        match self.0 {}
    }

    /// Returns whether received data was not read yet.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self.0 {}
    }

    /// Returns the latest time of the next [`poll_io`](Self::poll_io).
    pub fn wake_by(&mut self) -> Option<Instant> {
        match self.0 {}
    }

    /// Returns the local address.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn local(&self) -> io::Result<SocketAddr> {
        match self.0 {}
    }

    /// Returns a handle that closes the connection from another thread.
    #[must_use]
    pub fn closer(&self) -> UdpCloser {
        match self.0 {}
    }

    /// Receives and sends what is due.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn poll_io(&mut self) -> io::Result<()> {
        match self.0 {}
    }

    /// Accepts as much as from a VM that has shown its lease.
    pub fn lift_limits(&mut self, _: TrafficClass) {
        match self.0 {}
    }

    /// Acknowledges all received data.
    pub fn acknowledge(&mut self) {
        match self.0 {}
    }

    /// Asks a silent peer for an acknowledgement.
    pub fn ask_if_silent(&mut self, _: Instant) {
        match self.0 {}
    }

    /// Waits until all that was sent is acknowledged.
    pub fn settle(&mut self, _: Instant) {
        match self.0 {}
    }

    /// Reads received data.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }

    /// Writes frames.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn write_vectored(&mut self, _: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.0 {}
    }

    /// Waits for data.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn wait(&mut self, _: Option<Instant>) -> io::Result<()> {
        match self.0 {}
    }
}
