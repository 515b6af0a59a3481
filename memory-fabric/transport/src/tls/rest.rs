//! Connections that rest: without buffers of their own, served by a thread that serves many.
//!
//! The thread has one [`Room`], which each connection uses in turn. One call receives once and at
//! most [`REST_INPUT_BYTES`], so that a peer gets a limited amount of decryption for it, whatever
//! its records are: empty, many or of the handshake.

use super::session::Then;
use super::{BATCH_BYTES, INPUT_BYTES, OUTPUT_BYTES, TlsStream};
use std::io::{self, Read as _};
use std::mem;

/// Bytes that are received in one call: a renewal is a record of 78 bytes.
pub const REST_INPUT_BYTES: usize = 1024;

/// Bytes of a record beside its contents: header, type and tag (RFC 8446, section 5.2).
const RECORD_BESIDE: usize = 5 + 1 + 16;

/// Size of the buffer for records to send: an answer, and what the protocol itself sends.
const REST_OUTPUT_BYTES: usize = 4096;

/// Size of the buffer for the last record of a connection.
pub(super) const GOODBYE_BYTES: usize = 256;

/// Buffers that resting connections use in turn.
#[derive(Debug)]
pub struct Room {
    input: Box<[u8]>,
    output: Box<[u8]>,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            input: vec![0; REST_INPUT_BYTES].into_boxed_slice(),
            output: vec![0; REST_OUTPUT_BYTES].into_boxed_slice(),
        }
    }
}

/// What was received in one call.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Received {
    /// Bytes from the socket.
    pub raw: usize,
    /// Bytes of contents.
    pub contents: usize,
    /// Bytes of records that were decrypted in vain: all, when they had no contents, and otherwise
    /// those beyond the contents and one record around them.
    pub barren: usize,
    /// Whether the peer has closed its end.
    pub is_end: bool,
}

impl TlsStream {
    /// Whether whatever was received or encrypted has been read or sent.
    #[must_use]
    pub(crate) fn is_quiet(&self) -> bool {
        !self.failed
            && !self.closed
            && self.received.is_empty()
            && self.rest_read == self.rest.len()
            && !self.is_blocked()
    }

    /// Frees the buffers of a quiet connection.
    pub(crate) fn begin_rest(&mut self) {
        debug_assert!(self.is_quiet(), "what was received would be lost");
        self.input = Box::default();
        self.received = 0..0;
        self.output = Box::default();
        self.gathered = Vec::new();
        self.rest = Vec::new();
        self.rest_read = 0;
    }

    /// Allocates the buffers again.
    pub(crate) fn end_rest(&mut self) {
        let kept = self.received.len();
        let mut input = vec![0; INPUT_BYTES].into_boxed_slice();
        input[..kept].copy_from_slice(&self.input[self.received.clone()]);
        self.input = input;
        self.received = 0..kept;
        self.output = vec![0; OUTPUT_BYTES].into_boxed_slice();
        self.gathered = Vec::with_capacity(BATCH_BYTES);
    }

    /// Returns the bytes of its buffers.
    #[cfg(test)]
    pub(crate) fn kept_bytes(&self) -> usize {
        let (rest, gathered) = (self.rest.capacity(), self.gathered.capacity());
        self.input.len() + self.output.len() + rest + gathered
    }

    /// Whether a part of a record was received.
    pub(crate) fn has_part(&self) -> bool {
        !self.received.is_empty()
    }

    /// Whether the part of a record leaves no room to receive the rest while the connection rests.
    pub(crate) fn is_crowded(&self) -> bool {
        self.received.len() >= REST_INPUT_BYTES
    }

    /// Receives once, and decrypts that into `target`, which has at least [`REST_INPUT_BYTES`].
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is nothing now; else the connection is over.
    pub(crate) fn receive_resting(
        &mut self,
        target: &mut [u8],
        room: &mut Room,
    ) -> io::Result<Received> {
        self.in_room(room, |stream| {
            let raw = match (&*stream.socket).read(&mut stream.input[stream.received.end..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                raw => raw,
            };
            stream.received.end += raw;
            let held = stream.received.len();
            let contents = stream.decrypt(target)?;
            let decrypted = held - stream.received.len();
            let barren = match contents {
                0 => decrypted,
                contents => decrypted.saturating_sub(contents + RECORD_BESIDE),
            };
            // What the protocol itself sends.
            stream.send_whole()?;
            let is_end = stream.closed;
            Ok(Received {
                raw,
                contents,
                barren,
                is_end,
            })
        })
    }

    /// Sends a short message at once.
    ///
    /// # Errors
    ///
    /// `WriteZero` when the socket does not accept all of it; the connection is over then.
    pub(crate) fn send_resting(&mut self, message: &[u8], room: &mut Room) -> io::Result<()> {
        self.in_room(room, |stream| {
            stream.encrypt(Then::Send(message))?;
            stream.send_whole()
        })
    }

    fn send_whole(&mut self) -> io::Result<()> {
        self.flush()?;
        if self.is_blocked() {
            // Nothing can follow half a record.
            self.detached = true;
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(())
    }

    fn in_room<T>(
        &mut self,
        room: &mut Room,
        run: impl FnOnce(&mut Self) -> io::Result<T>,
    ) -> io::Result<T> {
        let kept = self.received.len();
        room.input[..kept].copy_from_slice(&self.input[self.received.clone()]);
        mem::swap(&mut self.input, &mut room.input);
        mem::swap(&mut self.output, &mut room.output);
        self.received = 0..kept;
        self.unsent = 0..0;
        let result = run(self);
        let part = self.input[self.received.clone()].into();
        room.input = mem::replace(&mut self.input, part);
        self.received = 0..self.input.len();
        room.output = mem::take(&mut self.output);
        self.unsent = 0..0;
        result
    }
}
