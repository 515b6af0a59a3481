//! TCP connections under mutual TLS 1.3 (RFC 8446).
//!
//! The thread that uses a connection also encrypts and decrypts: no other thread, lock or queue is
//! between a fault and its socket. rustls does the protocol without I/O; this module moves bytes
//! between it and the socket. The kernel's TLS took more instructions for a page, and takes keys once
//! (docs/bench.md).
//!
//! Records are received into one buffer and decrypted there, and encrypted into another: the buffers
//! of a connection are allocated when it is made. rustls itself allocates one buffer for each record
//! that it encrypts or decrypts (at most 16 KiB, so one for a page).

mod handshake;
mod rest;
mod session;
#[cfg(test)]
pub(crate) mod tests;

pub use handshake::{HANDSHAKE_TIMEOUT, TlsError};
pub(crate) use rest::{REST_INPUT_BYTES, Received, Room};
pub use rustls::pki_types::CertificateDer;

use fabric_host::poll::sleep_on;
use fabric_identity::Subject;
use session::{Session, Step, Then};
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of the largest record (RFC 8446, section 5.2), with its header.
const RECORD_BYTES_MAX: usize = 5 + (16 << 10) + 256;

/// Size of the receive buffer: 14 pages and more, so that one call receives the answers of a batch.
const INPUT_BYTES: usize = 64 << 10;

/// Bytes of records without contents that one call decrypts. Ours are a new key now and then, of 27
/// bytes; nodes send no tickets.
const BARREN_BYTES_MAX: usize = 512;

/// Bytes that are encrypted in one call.
const BATCH_BYTES: usize = 64 << 10;

/// Size of the buffer for records to send: a batch, and what the protocol itself sends.
const OUTPUT_BYTES: usize = BATCH_BYTES + 2 * RECORD_BYTES_MAX;

/// Bytes that a connection occupies: both buffers, and records that were received while it sent, or
/// in the handshake its messages.
pub const BUFFER_BYTES: usize = 2 * INPUT_BYTES + OUTPUT_BYTES;

/// Who is at the other end.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Whom its certificate names.
    pub subject: Subject,
    /// Its certificate, and those between it and the authority.
    pub chain: Vec<CertificateDer<'static>>,
}

/// A connection under TLS. It never blocks, except where a deadline is given.
pub struct TlsStream {
    socket: Arc<TcpStream>,
    session: Session,
    peer: Arc<Peer>,
    /// Received records.
    input: Box<[u8]>,
    /// The part of `input` that is not decrypted yet.
    received: Range<usize>,
    /// The rest of a record that was longer than the caller's buffer.
    rest: Vec<u8>,
    /// How much of `rest` was read.
    rest_read: usize,
    /// Records to send.
    output: Box<[u8]>,
    /// The part of `output` that the socket did not accept yet.
    unsent: Range<usize>,
    /// Room for the parts of a vectored write.
    gathered: Vec<u8>,
    /// Whether the last read filled the caller's buffer, so that there may be more in ours.
    is_ready: bool,
    /// Whether the peer has closed its end.
    closed: bool,
    /// Whether rustls has nothing to do before more is received or sent.
    is_settled: bool,
    /// Whether the protocol was violated: rustls must not be called after that.
    failed: bool,
    /// Whether only the socket is used from now on.
    detached: bool,
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsStream")
            .field("peer", &self.peer.subject)
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl TlsStream {
    /// Returns who is at the other end.
    #[must_use]
    pub const fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Returns the socket.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Returns the socket, for what closes it from another thread.
    pub(crate) fn shared_socket(&self) -> Arc<TcpStream> {
        Arc::clone(&self.socket)
    }

    /// Returns the socket, on which nothing is sent any more, to keep the connection open.
    ///
    /// # Errors
    ///
    /// Fails when the process has no descriptor left.
    pub fn into_socket(mut self) -> io::Result<TcpStream> {
        self.detached = true;
        // As without TLS: who keeps it waits for its end in a read.
        self.socket.set_nonblocking(false)?;
        self.socket.try_clone()
    }

    /// Returns whether something was received that was not read yet.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Returns whether there is something to send as soon as the socket accepts it.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Does what is due while nothing is asked for.
    ///
    /// # Errors
    ///
    /// Fails when the connection broke, or the peer sent what nobody asked for.
    pub fn poll_io(&mut self) -> io::Result<()> {
        self.is_ready = false;
        if self.rest_read < self.rest.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer sent more than was asked for",
            ));
        }
        self.flush()
    }

    /// Reads what there is; 0 when the peer has closed the connection.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is nothing now, and `UnexpectedEof` when the connection ended without
    /// a `close_notify`, which is how a third party would truncate it. Also when the peer sends records
    /// without contents one after the other, which would hold the thread for as long as it likes.
    pub fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        // What was received before the connection broke is read all the same.
        let flushed = self.flush();
        let mut filled = self.take_rest(target);
        let mut is_more = false;
        let mut barren = 0;
        loop {
            let held = self.received.len();
            filled += self.decrypt(&mut target[filled..])?;
            if filled == 0 {
                barren += held - self.received.len();
                self.check_barren(barren)?;
            }
            self.is_ready = filled == target.len();
            // A call that did not fill the buffer has received all there was, so that another one
            // would only delay what is there.
            if self.is_ready || self.closed || (filled > 0 && !is_more) {
                return Ok(filled);
            }
            match self.receive() {
                Ok(is_full) => is_more = is_full,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if filled > 0 => return Ok(filled),
                Err(error) => return Err(flushed.err().unwrap_or(error)),
            }
        }
    }

    /// Encrypts the parts, one after the other, and sends the records as far as possible. Returns how
    /// many bytes were taken.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when earlier records wait for the socket; else the connection broke.
    pub fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush()?;
        if self.is_blocked() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut filled = parts.iter().filter(|part| !part.is_empty());
        let taken = match (filled.next(), filled.next()) {
            (None, _) => return Ok(0),
            (Some(only), None) => {
                let taken = only.len().min(BATCH_BYTES);
                self.encrypt(Then::Send(&only[..taken]))?;
                taken
            }
            _ => {
                let mut gathered = std::mem::take(&mut self.gathered);
                gathered.clear();
                for part in parts {
                    let room = BATCH_BYTES - gathered.len();
                    gathered.extend_from_slice(&part[..part.len().min(room)]);
                }
                let encrypted = self.encrypt(Then::Send(&gathered));
                let taken = gathered.len();
                self.gathered = gathered;
                encrypted?;
                taken
            }
        };
        self.flush()?;
        Ok(taken)
    }

    /// Sleeps until there is something to read, or room for what is to be sent; may return early.
    ///
    /// # Errors
    ///
    /// Fails when the system call does.
    pub fn wait(&mut self, writable: bool, deadline: Option<Instant>) -> io::Result<()> {
        let events = match (writable, self.is_blocked()) {
            (true, true) => libc::POLLOUT,
            // A caller that has more to write than one call takes need not wait.
            (true, false) => return Ok(()),
            (false, true) => libc::POLLIN | libc::POLLOUT,
            (false, false) => libc::POLLIN,
        };
        if events == libc::POLLIN && self.is_ready {
            return Ok(());
        }
        sleep_on(self.socket.as_raw_fd(), events, deadline)
    }

    /// Sends what the socket accepts now of what was taken before.
    ///
    /// # Errors
    ///
    /// Fails when the connection broke.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match (&*self.socket).write(&self.output[self.unsent.clone()]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.unsent.start += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.unsent = 0..0;
        Ok(())
    }

    /// Ends the connection in both directions. The peer reads what the socket has accepted before.
    pub fn close(&mut self) {
        self.say_goodbye();
        self.detached = true;
        // Fails when the peer has ended it before.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Lets the peer know that the end of the connection is meant.
    fn say_goodbye(&mut self) {
        if self.detached || self.is_blocked() {
            return;
        }
        if self.output.is_empty() {
            // It rests.
            self.output = vec![0; rest::GOODBYE_BYTES].into_boxed_slice();
        }
        // Best effort: without it the peer takes the end for a broken connection.
        let _ = self.encrypt(Then::Close).and_then(|()| self.flush());
    }

    /// Receives once; returns whether that filled the buffer.
    fn receive(&mut self) -> io::Result<bool> {
        if self.received.is_empty() {
            self.received = 0..0;
        } else if self.input.len() - self.received.start < RECORD_BYTES_MAX {
            self.input.copy_within(self.received.clone(), 0);
            self.received = 0..self.received.len();
        }
        let room = &mut self.input[self.received.end..];
        let bytes = room.len();
        match (&*self.socket).read(room)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.received.end += count;
                Ok(count == bytes)
            }
        }
    }

    fn take_rest(&mut self, target: &mut [u8]) -> usize {
        let rest = &self.rest[self.rest_read..];
        let count = rest.len().min(target.len());
        target[..count].copy_from_slice(&rest[..count]);
        self.rest_read += count;
        count
    }

    /// Decrypts whole records until `target` is full; the rest of the last one is kept.
    fn decrypt(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        // As in most calls of a thread that polls.
        if self.is_settled && self.received.is_empty() {
            return Ok(0);
        }
        let mut filled = 0;
        while self.rest_read == self.rest.len() && filled < target.len() {
            self.rest.clear();
            self.rest_read = 0;
            let rest = &mut self.rest;
            let mut take = |bytes: &[u8]| {
                let count = bytes.len().min(target.len() - filled);
                target[filled..filled + count].copy_from_slice(&bytes[..count]);
                filled += count;
                rest.extend_from_slice(&bytes[count..]);
            };
            let input = &mut self.input[self.received.clone()];
            let output = (&mut *self.output, &mut self.unsent);
            let advanced = self
                .session
                .advance(input, output, Then::Nothing, &mut take);
            if self.after(advanced)? != Step::Advanced {
                break;
            }
        }
        Ok(filled)
    }

    /// Encrypts at most [`BATCH_BYTES`] while nothing is unsent. Records that have been received
    /// meanwhile are decrypted first, since rustls does one after the other.
    fn encrypt(&mut self, then: Then<'_>) -> io::Result<()> {
        self.check()?;
        loop {
            let rest = &mut self.rest;
            let mut take = |bytes: &[u8]| rest.extend_from_slice(bytes);
            let input = &mut self.input[self.received.clone()];
            let output = (&mut *self.output, &mut self.unsent);
            let advanced = self.session.advance(input, output, then, &mut take);
            match self.after(advanced)? {
                Step::Advanced => {}
                Step::Idle => return Ok(()),
                Step::Closed => return Err(io::ErrorKind::BrokenPipe.into()),
            }
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.failed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    fn check_barren(&mut self, bytes: usize) -> io::Result<()> {
        if bytes <= BARREN_BYTES_MAX {
            return Ok(());
        }
        self.failed = true;
        let text = format!(
            "the peer sent {bytes} bytes of TLS records without contents, {BARREN_BYTES_MAX} is the limit"
        );
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    /// Notes what came of a step.
    fn after(&mut self, advanced: session::Advanced) -> io::Result<Step> {
        self.received.start += advanced.discard;
        match advanced.step {
            Ok(step) => {
                self.closed |= step == Step::Closed;
                self.is_settled = step == Step::Idle;
                self.is_ready |= self.rest_read < self.rest.len();
                Ok(step)
            }
            Err(error) => {
                self.send_alert();
                self.failed = true;
                Err(TlsError::from(error).into())
            }
        }
    }

    /// Sends the peer the reason for a failure, as far as the socket accepts it now.
    fn send_alert(&mut self) {
        let output = (&mut *self.output, &mut self.unsent);
        self.session.take_output(output);
        // Best effort: the connection is over.
        let _ = self.flush();
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        self.say_goodbye();
    }
}
