//! Reading from a connection.

use std::io;
use std::ops::Range;
use std::time::Instant;

use fabric_coherence::lanes::{Arrival, Header};
use fabric_pages::page::PAGE_SIZE;

use super::{Connection, Fault, Link, State};
use crate::Receiver;
use crate::codec::{Kind, PAYLOAD_BYTES_MAX, decode};
use crate::message::PeerLane;
use crate::tcp::frame::{
    FrameHeader, HEADER_BYTES, KIND_CONFIRM, KIND_RESUME, RESUME_BYTES, decode_resume,
};

/// Size of the receive buffer: 31 pages and their headers.
const INPUT_BYTES: usize = 128 << 10;

/// Reads from one connection before others get their turn.
const READS_MAX: usize = 4;

/// The longest frame.
const FRAME_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX + PAGE_SIZE;

const _: () = assert!(FRAME_BYTES_MAX <= INPUT_BYTES / 2);

/// What has arrived and is not decoded.
#[derive(Debug)]
pub(super) struct Input {
    bytes: Box<[u8]>,
    filled: Range<usize>,
}

impl Input {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; INPUT_BYTES].into_boxed_slice(),
            filled: 0..0,
        }
    }

    pub(super) fn clear(&mut self) {
        self.filled = 0..0;
    }

    /// The room behind what has arrived; what is left is moved only when a frame might not fit.
    fn room(&mut self) -> &mut [u8] {
        if self.filled.is_empty() {
            self.filled = 0..0;
        } else if self.filled.start > INPUT_BYTES / 2 {
            self.bytes.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        &mut self.bytes[self.filled.end..]
    }
}

impl Link {
    /// Passes on what has arrived. Returns whether anything had.
    pub(in crate::tcp) fn receive(
        &mut self,
        receiver: &mut Receiver<'_>,
        now: Instant,
    ) -> Result<bool, Fault> {
        let mut has_arrived = false;
        for _ in 0..READS_MAX {
            let Some(connection) = &mut self.connection else {
                break;
            };
            let room = self.input.room();
            let room_bytes = room.len();
            match connection.stream.read(room) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(count) => {
                    connection.last_received = now;
                    self.input.filled.end += count;
                    has_arrived |= self.decode(receiver, now)?;
                    if count < room_bytes {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(has_arrived)
    }

    /// Passes on the messages of whole frames.
    fn decode(&mut self, receiver: &mut Receiver<'_>, now: Instant) -> Result<bool, Fault> {
        let mut has_arrived = false;
        loop {
            let bytes = &self.input.bytes[self.input.filled.clone()];
            let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
                return Ok(has_arrived);
            };
            let header = FrameHeader::decode(header);
            let shape = Shape::of(&header, self.epoch).map_err(Fault::Broken)?;
            let Some(behind) = rest.get(..shape.bytes()) else {
                return Ok(has_arrived);
            };
            let (payload, page) = behind.split_at(shape.length);
            let Some(connection) = &mut self.connection else {
                return Ok(has_arrived);
            };
            match (connection.state, shape.kind) {
                (State::Resuming, FrameKind::Resume) => {
                    let expected = decode_resume(payload).unwrap_or_default();
                    self.resume(expected, now)?;
                }
                (State::Up, FrameKind::Confirm) => self.confirm(&header, now)?,
                (State::Up, FrameKind::Message(kind)) => {
                    let lane = kind.lane();
                    let sequence = header.sequence;
                    let epoch = header.epoch;
                    let accepted = self.inbox.accept(lane, Header { epoch, sequence });
                    let arrival = accepted.map_err(|error| Fault::Broken(error.to_string()))?;
                    connection.unconfirmed_since.get_or_insert(now);
                    connection.unconfirmed += if kind.has_page() { 4 } else { 1 };
                    if arrival == Arrival::Fresh {
                        let message = decode(kind, payload, self.bounds);
                        let message = message.map_err(|error| Fault::Broken(error.to_string()))?;
                        receiver(self.peer, message, page.try_into().ok());
                        has_arrived = true;
                    }
                    self.confirm(&header, now)?;
                }
                (state, kind) => {
                    let text = format!("sent {kind:?} while the connection is {state:?}");
                    return Err(Fault::Broken(text));
                }
            }
            self.input.filled.start += HEADER_BYTES + shape.bytes();
        }
    }

    /// The peer continues with these sequence numbers.
    fn resume(&mut self, expected: super::Sequences, now: Instant) -> Result<(), Fault> {
        let resumed = self.outbox.resume(expected);
        let is_news = resumed.map_err(|(lane, found, [first, last])| {
            Fault::Broken(format!(
                "continues lane {lane:?} with message {found}, and can do so with {first} to {last}"
            ))
        })?;
        if let Some(connection) = &mut self.connection {
            connection.state = State::Up;
            connection.unconfirmed_since = Some(now);
        }
        if is_news || self.outbox.is_empty() {
            self.note_progress();
        }
        Ok(())
    }

    /// The peer has these messages.
    fn confirm(&mut self, header: &FrameHeader, now: Instant) -> Result<(), Fault> {
        let Some(is_news) = self.outbox.confirm(header.confirmed) else {
            let confirmed = header.confirmed;
            let text = format!("confirms messages that were not sent: {confirmed:?}");
            return Err(Fault::Broken(text));
        };
        let is_empty = self.outbox.is_empty();
        if is_news || is_empty {
            self.note_progress();
        }
        if let Some(Connection { waiting_since, .. }) = &mut self.connection {
            match is_empty {
                true => *waiting_since = None,
                false if is_news => *waiting_since = Some(now),
                false => {}
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
enum FrameKind {
    Resume,
    Confirm,
    Message(Kind),
}

/// What follows a header.
struct Shape {
    kind: FrameKind,
    /// Bytes of the payload.
    length: usize,
    /// Bytes of the page behind it.
    page: usize,
}

impl Shape {
    fn bytes(&self) -> usize {
        self.length + self.page
    }

    /// Checks all of a header that can be checked without its lane: nothing waits for a frame that
    /// will be refused.
    fn of(header: &FrameHeader, epoch: u32) -> Result<Self, String> {
        let length = usize::from(header.length);
        if header.epoch != epoch {
            return Err(format!(
                "uses epoch {}, this is epoch {epoch}",
                header.epoch
            ));
        }
        let (kind, lane, page) = match header.kind {
            KIND_RESUME | KIND_CONFIRM => {
                let (kind, expected) = match header.kind {
                    KIND_RESUME => (FrameKind::Resume, RESUME_BYTES),
                    _ => (FrameKind::Confirm, 0),
                };
                if length != expected {
                    return Err(format!("sent {kind:?} with {length} bytes, not {expected}"));
                }
                (kind, PeerLane::Responses, 0)
            }
            kind => {
                let kind = Kind::new(kind).map_err(|error| error.to_string())?;
                let checked = kind.check_length(length);
                checked.map_err(|error| error.to_string())?;
                let page = if kind.has_page() { PAGE_SIZE } else { 0 };
                (FrameKind::Message(kind), kind.lane(), page)
            }
        };
        if usize::from(header.lane) != usize::from(lane) {
            return Err(format!("sent {kind:?} on lane {}", header.lane));
        }
        Ok(Self { kind, length, page })
    }
}
