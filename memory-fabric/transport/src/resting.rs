//! Control connections that only renew their leases: they rest, and one thread serves many.
//!
//! A resting connection has no buffers but for the parts of one record and one frame. Each call
//! receives once, decodes at most one frame and sends at most one answer. A peer that sends
//! anything else than one renewal after the other needs a thread of its own again.

use crate::control::{ControlError, ControlStream};
use crate::stream::Stream;
use crate::tls::{self, REST_INPUT_BYTES, Room};
use fabric_wire::{
    Frame, FrameKind, HEADER_BYTES, PREFIX_BYTES, Token, decode_message, encode_message,
};
use serde::Serialize;
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes of the frame of a renewal.
const RENEWAL_BYTES: usize = HEADER_BYTES + size_of::<Token>();

/// Bytes that a resting connection occupies beside what it is: parts of a record and of a frame.
pub const RESTING_BYTES: usize = REST_INPUT_BYTES + REST_INPUT_BYTES;

/// Buffers that resting connections use in turn.
#[derive(Debug, Default)]
pub struct Buffers {
    room: Room,
    contents: Vec<u8>,
}

/// A connection that rests. Its socket is non-blocking.
#[derive(Debug)]
pub struct Resting {
    stream: Stream,
    peer: SocketAddr,
    /// The part of a frame.
    unread: Vec<u8>,
}

/// What one call of [`Resting::receive`] came to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Received {
    /// Bytes that came.
    pub bytes: usize,
    /// Those of records that were decrypted in vain: a renewal has none.
    pub barren: usize,
    /// What they are.
    pub heard: Heard,
}

/// What was received.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Heard {
    /// There was nothing to read.
    Nothing,
    /// No whole frame yet, or no contents at all.
    Part,
    /// One renewal, of the lease of the connection.
    Renewal,
    /// Anything else: it is kept for a thread of its own.
    Other,
    /// The peer has closed the connection.
    End,
}

impl Resting {
    /// Frees the buffers of a [quiet](ControlStream::is_quiet) connection, for the time in which a
    /// thread serves many.
    ///
    /// # Errors
    ///
    /// When the connection is not quiet, or over.
    pub fn of(control: ControlStream) -> Result<Self, ControlError> {
        let peer = control.peer();
        let resting = if control.is_quiet() {
            Self::new(control.into_stream(), peer)
        } else {
            Err(io::Error::other("a connection that is in use cannot rest"))
        };
        resting.map_err(|error| ControlError::Stream(peer, error))
    }

    fn new(mut stream: Stream, peer: SocketAddr) -> io::Result<Self> {
        match &mut stream {
            Stream::Tcp(socket) => socket.set_nonblocking(true)?,
            Stream::Tls(stream) => stream.begin_rest(),
            Stream::Udp(_) => return Err(io::ErrorKind::Unsupported.into()),
        }
        Ok(Self {
            stream,
            peer,
            unread: Vec::new(),
        })
    }

    /// Returns the peer's address.
    #[must_use]
    pub const fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the socket, which is readable when there is something to do.
    #[must_use]
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        match &self.stream {
            Stream::Tcp(socket) => Some(socket.as_fd()),
            Stream::Tls(stream) => Some(stream.socket().as_fd()),
            Stream::Udp(_) => None,
        }
    }

    /// Returns whether a part of a frame, or of a record, was received.
    #[must_use]
    pub fn has_part(&self) -> bool {
        !self.unread.is_empty() || matches!(&self.stream, Stream::Tls(stream) if stream.has_part())
    }

    /// Receives once. `token` is that of the lease of the connection.
    ///
    /// # Errors
    ///
    /// The connection is over.
    pub fn receive(&mut self, token: &Token, buffers: &mut Buffers) -> io::Result<Received> {
        buffers.contents.resize(REST_INPUT_BYTES, 0);
        let target = &mut buffers.contents[..];
        let received = match &mut self.stream {
            Stream::Tcp(socket) => (&**socket).read(target).map(|raw| tls::Received {
                raw,
                contents: raw,
                barren: 0,
                is_end: raw == 0,
            }),
            Stream::Tls(stream) => stream.receive_resting(target, &mut buffers.room),
            Stream::Udp(_) => return Err(io::ErrorKind::Unsupported.into()),
        };
        let received = match received {
            Ok(received) => received,
            Err(error) if is_pause(&error) => {
                return Ok(Received {
                    bytes: 0,
                    barren: 0,
                    heard: Heard::Nothing,
                });
            }
            Err(error) => return Err(error),
        };
        let contents = &buffers.contents[..received.contents];
        self.unread.extend_from_slice(contents);
        let heard = match self.decode(token) {
            // A thread of its own serves what came before the end.
            Heard::Part | Heard::Renewal if received.is_end => Heard::End,
            heard => heard,
        };
        Ok(Received {
            bytes: received.raw,
            barren: received.barren,
            heard,
        })
    }

    /// Decodes what was received so far. A renewal is done with, anything else stays.
    fn decode(&mut self, token: &Token) -> Heard {
        let Some(prefix) = self.unread.first_chunk::<PREFIX_BYTES>() else {
            return self.part();
        };
        if Frame::check_prefix(*prefix).is_err() {
            return Heard::Other;
        }
        let Some((header, payload)) = self.unread.split_first_chunk::<HEADER_BYTES>() else {
            return self.part();
        };
        let length = RENEWAL_BYTES - HEADER_BYTES;
        let frame = match Frame::decode(header) {
            Ok(frame) if frame.kind == FrameKind::Renew && frame.length == length => frame,
            // Its own thread says why it is refused.
            _ => return Heard::Other,
        };
        if payload.len() < length {
            return self.part();
        }
        // A VM awaits the answer before the next request.
        let is_only = payload.len() == length;
        let verified = is_only && frame.verify(header, payload).is_ok();
        match verified.then(|| decode_message::<Token>(frame.kind, payload)) {
            Some(Ok(shown)) if shown == *token => {
                self.unread = Vec::new();
                Heard::Renewal
            }
            _ => Heard::Other,
        }
    }

    /// Whether the request that was received last releases the lease with this token.
    #[must_use]
    pub fn has_release(&self, token: &Token) -> bool {
        let Some((header, payload)) = self.unread.split_first_chunk::<HEADER_BYTES>() else {
            return false;
        };
        let frame = Frame::decode(header)
            .ok()
            .filter(|frame| frame.kind == FrameKind::Release && frame.length == payload.len());
        frame.is_some_and(|frame| {
            let verified = frame.verify(header, payload).is_ok();
            let shown = decode_message::<Token>(frame.kind, payload);
            verified && shown.is_ok_and(|shown| shown == *token)
        })
    }

    fn part(&self) -> Heard {
        match &self.stream {
            Stream::Tls(stream) if stream.is_crowded() => Heard::Other,
            _ => Heard::Part,
        }
    }

    /// Sends one message at once.
    ///
    /// # Errors
    ///
    /// `WouldBlock` or `WriteZero` when the socket does not accept all of it, since the peer does
    /// not read its answers. The connection is over then, as after any other error.
    pub fn send<M: Serialize>(
        &mut self,
        kind: FrameKind,
        message: &M,
        buffers: &mut Buffers,
    ) -> io::Result<()> {
        let payload = encode_message(message);
        let header = Frame::new(kind, 0, 0, true).encode(&payload);
        let frame = [header.as_slice(), &payload].concat();
        match &mut self.stream {
            Stream::Tcp(socket) => {
                let sent = (&**socket).write(&frame)?;
                if sent < frame.len() {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                Ok(())
            }
            Stream::Tls(stream) => stream.send_resting(&frame, &mut buffers.room),
            Stream::Udp(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Returns the connection for a thread of its own, which reads first what was received here.
    ///
    /// # Errors
    ///
    /// The connection is over.
    pub fn wake(self) -> io::Result<ControlStream> {
        let mut stream = self.stream;
        match &mut stream {
            Stream::Tcp(socket) => socket.set_nonblocking(false)?,
            Stream::Tls(stream) => stream.end_rest(),
            Stream::Udp(_) => {}
        }
        Ok(ControlStream::woken(stream, self.peer, self.unread))
    }
}

fn is_pause(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests;
