//! What a connection is made of: TCP alone, or what protects it.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A connection on which everything is encrypted and authenticated. No call waits.
pub trait SecureStream: fmt::Debug + Send {
    /// The socket, to wait for.
    fn socket(&self) -> &TcpStream;

    /// Reads what there is; 0 when the peer has ended the connection.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing now; else the connection broke, or was cut.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize>;

    /// Takes bytes, and sends them as far as the socket accepts them.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is taken now; else the connection broke.
    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Sends what was taken and the socket has not accepted yet.
    ///
    /// # Errors
    /// When the connection broke.
    fn flush(&mut self) -> io::Result<()>;

    /// Whether something was taken that the socket has not accepted yet.
    fn is_blocked(&self) -> bool;

    /// Whether something was received that was not read yet, of which the socket reports nothing.
    fn is_ready(&self) -> bool;

    /// Ends the connection in both directions.
    fn close(&mut self);
}

/// Makes connections between the compute nodes of a VM secure. Each call takes a connected socket
/// that does not block, and has a deadline of its own.
///
/// An error of the kind `PermissionDenied` or `InvalidData` with a text of its own says that one
/// end does not accept the other, which another attempt would not change.
pub trait Security: fmt::Debug + Send + Sync {
    /// Makes a connection to `peer` secure.
    ///
    /// # Errors
    /// When the other end is not that member, or the connection breaks.
    fn connect(&self, socket: TcpStream, peer: Member) -> io::Result<Box<dyn SecureStream>>;

    /// Makes an accepted connection secure, and returns whose it is.
    ///
    /// # Errors
    /// When the other end is no member, or the connection breaks.
    fn accept(&self, socket: TcpStream) -> io::Result<(Box<dyn SecureStream>, Member)>;
}

/// A connection between two compute nodes. It does not block.
#[derive(Debug)]
pub enum Channel {
    /// TCP alone.
    Plain(TcpStream),
    /// A secure one.
    Secure(Box<dyn SecureStream>),
}

impl Channel {
    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Secure(stream) => stream.socket(),
        }
    }

    /// Reads what there is; 0 when the peer has ended the connection.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing now; else the connection broke.
    pub fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(bytes),
            Self::Secure(stream) => stream.read(bytes),
        }
    }

    /// Writes what is taken now.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is; else the connection broke.
    pub fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write_vectored(parts),
            Self::Secure(stream) => stream.write_vectored(parts),
        }
    }

    /// Sends what was taken before. Returns whether the socket has accepted all of it.
    ///
    /// # Errors
    /// When the connection broke.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            Self::Secure(stream) => {
                stream.flush()?;
                Ok(!stream.is_blocked())
            }
        }
    }

    /// Whether something was received that was not read yet, of which the socket reports nothing.
    pub(super) fn is_ready(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Secure(stream) => stream.is_ready(),
        }
    }

    /// Reads as [`read`](Self::read) does, and waits until there is something.
    ///
    /// # Errors
    /// `TimedOut` after `deadline`; else the connection broke.
    pub fn read_by(&mut self, bytes: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            match self.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::IN, deadline)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }

    /// Fills `bytes`.
    ///
    /// # Errors
    /// `TimedOut` after `deadline`, `UnexpectedEof` at the end; else the connection broke.
    pub fn read_exact_by(&mut self, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.read_by(&mut bytes[filled..], deadline)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        Ok(())
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// `TimedOut` after `deadline`; else the connection broke.
    pub fn write_all_by(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.write_vectored(&[IoSlice::new(bytes)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::OUT, deadline)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        while !self.flush()? {
            self.wait(PollFlags::OUT, deadline)?;
        }
        Ok(())
    }

    /// Reads the first byte without taking it.
    ///
    /// # Errors
    /// As [`read_by`](Self::read_by), of a socket that nothing was read from.
    pub(super) fn first_byte(socket: &TcpStream, deadline: Instant) -> io::Result<u8> {
        let mut byte = [0];
        loop {
            match socket.peek(&mut byte) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => return Ok(byte[0]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(socket, PollFlags::IN, deadline)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends no more, and drops what comes until the other end has ended the connection, or
    /// `deadline`.
    pub(super) fn drain(&mut self, deadline: Instant) {
        // Fails when the other end has ended it before.
        let _ = self.socket().shutdown(Shutdown::Write);
        let mut rest = [0; 512];
        while self
            .read_by(&mut rest, deadline)
            .is_ok_and(|count| count > 0)
        {
            if Instant::now() >= deadline {
                return;
            }
        }
    }

    fn wait(&self, events: PollFlags, deadline: Instant) -> io::Result<()> {
        wait(self.socket(), events, deadline)
    }

    /// Ends the connection in both directions.
    pub fn close(&mut self) {
        match self {
            // Fails when the peer has ended it before.
            Self::Plain(stream) => drop(stream.shutdown(Shutdown::Both)),
            Self::Secure(stream) => stream.close(),
        }
    }
}

fn wait(socket: impl AsFd, events: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left == Duration::ZERO {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let timeout = Timespec::try_from(left).ok();
    match poll(&mut [PollFd::new(&socket, events)], timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
