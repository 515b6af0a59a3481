//! QUIC in a build without it: no connection exists, and what would make one fails and says why.

pub use fabric_identity::{Fingerprint, FingerprintError};

use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

fn left_out() -> io::Error {
    let text = "this build of ssi-hv has no UDP; build it with the cargo feature `udp`";
    io::Error::new(io::ErrorKind::Unsupported, text)
}

/// Ends a connection from another thread.
#[derive(Debug)]
pub struct UdpCloser(Infallible);

impl UdpCloser {
    /// Ends the connection.
    pub fn close(&self) {
        match self.0 {}
    }
}

/// A UDP port that VMs connect to.
#[derive(Debug)]
pub struct Listener(Infallible);

/// A VM that wants to connect.
#[derive(Debug)]
pub struct Arrival {
    /// Where it is.
    pub peer: SocketAddr,
    never: Infallible,
}

impl Arrival {
    /// Ends what becomes of it.
    #[must_use]
    pub fn closer(&self) -> UdpCloser {
        match self.never {}
    }

    /// Connects.
    ///
    /// # Errors
    ///
    /// None: nobody arrives.
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
    pub fn bind(_: SocketAddr) -> io::Result<Self> {
        Err(left_out())
    }

    /// The fingerprint of its certificate.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        match self.0 {}
    }

    /// Gives those who arrive to the caller.
    pub fn run(&self, _: &AtomicBool, _: &mut dyn FnMut(Arrival)) {
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
    pub fn connect(_: SocketAddr, _: Option<Fingerprint>, _: Instant) -> io::Result<Self> {
        Err(left_out())
    }

    /// The descriptor of its socket.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        match self.0 {}
    }

    /// Whether the socket took less than was to be sent.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        match self.0 {}
    }

    /// Whether something was received that was not read yet.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self.0 {}
    }

    /// When it has to be tended at the latest.
    pub fn wake_by(&mut self) -> Option<Instant> {
        match self.0 {}
    }

    /// This end's address.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn local(&self) -> io::Result<SocketAddr> {
        match self.0 {}
    }

    /// What ends the connection from another thread.
    #[must_use]
    pub fn closer(&self) -> UdpCloser {
        match self.0 {}
    }

    /// Does what is due.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn tend(&mut self) -> io::Result<()> {
        match self.0 {}
    }

    /// Acknowledges all that has come.
    pub fn acknowledge(&mut self) {
        match self.0 {}
    }

    /// Reads what there is.
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

    /// Waits for something to read.
    ///
    /// # Errors
    ///
    /// None: there is no connection.
    pub fn wait(&mut self, _: Option<Instant>) -> io::Result<()> {
        match self.0 {}
    }
}
