//! Pages over a TCP connection, or over a QUIC connection, which carries the same frames; requests
//! are pipelined.
//!
//! It is non-blocking. A broken or stalled connection is returned to the donor's link through its
//! [port](LinkPort), which makes a new one; every outstanding request is then sent again.
//!
//! Pages are compressed where that pays, which each connection decides for itself (`choice`).

mod connection;
mod fence;
mod slot;

use super::choice::{Choice, Part};
use super::{
    Completion, Compression, Full, IN_FLIGHT_MAX, Interest, PAGE_BYTES, PageTransport, Ticket,
};
use crate::path::PathStats;
use crate::port::{LinkPort, Outage};
use crate::stream::Stream;
use crate::traffic::Traffic;
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_wire::packing::{Packer, Packing};
use fabric_wire::{
    ErrorMessage, Frame, FrameKind, HEADER_BYTES, PAYLOAD_BYTES_MAX, PROBE_BYTES_MAX,
    RUN_PAGES_MAX, TrafficClass, WireError, encode_count,
};
use slot::Slot;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of the receive buffer: 31 pages and their headers.
const INPUT_BYTES: usize = 128 << 10;

/// Size of the receive buffer for runs: the two longest.
const RUN_INPUT_BYTES: usize = 2 * (HEADER_BYTES + PAYLOAD_BYTES_MAX);

/// Size of the receive buffer for probes: the two longest.
const PROBE_INPUT_BYTES: usize = 2 * (HEADER_BYTES + PROBE_BYTES_MAX as usize);

/// Frames passed to the kernel in one call.
const SEND_BATCH: usize = 16;

/// Number of compressed pages after which they are sent: they travel while others are compressed.
const COMPRESSED_BATCH: usize = 8;

/// Limit of outstanding requests: [`IN_FLIGHT_MAX`], and a fence before them.
const SLOTS: usize = IN_FLIGHT_MAX + 1;

/// Requests to one donor over TCP or UDP.
#[derive(Debug)]
pub struct TcpTransport {
    port: LinkPort,
    class: TrafficClass,
    checksum: bool,
    stream: Option<Stream>,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Slots in use, in posting order.
    posted: VecDeque<u16>,
    /// Number of these that are fences, and that are drops.
    fences: usize,
    drops: usize,
    /// Number of `posted`, from the front, that are completely sent.
    sent: usize,
    /// Bytes sent of the next one.
    sent_bytes: usize,
    input: Box<[u8]>,
    /// The received part of `input` that is not decoded yet.
    filled: std::ops::Range<usize>,
    /// Time of the last received bytes, or of the first request after everything had been answered.
    received: Instant,
    /// The same, except for incomplete answers.
    measured: Instant,
    /// The oldest request that an earlier connection did not complete: until it is completed, the
    /// donor has made no progress, whatever else it answers.
    overdue: Option<u16>,
    choice: Choice,
    traffic: Arc<Traffic>,
    packer: Packer,
    /// Pages for which compression was tried since the last send.
    compressed: usize,
    /// Buffer for unpacked pages.
    unpacked: Box<[u8]>,
}

/// Payload of a request.
#[derive(Clone, Copy)]
enum Payload<'a> {
    None,
    Page(&'a PageBytes),
    /// A part of a page to store.
    Piece(&'a [u8]),
    Count(u32),
}

impl TcpTransport {
    /// Creates a transport that uses the connection in `port` and its successors, and counts their
    /// traffic.
    #[must_use]
    pub fn new(
        port: LinkPort,
        class: TrafficClass,
        checksum: bool,
        compression: Compression,
        traffic: Arc<Traffic>,
    ) -> Self {
        let (input_bytes, pages_max) = match class {
            TrafficClass::Urgent | TrafficClass::Bulk => (INPUT_BYTES, 1),
            TrafficClass::Prefetch => (RUN_INPUT_BYTES, RUN_PAGES_MAX as usize),
            TrafficClass::Probe => (PROBE_INPUT_BYTES, 0),
        };
        let choice = Choice::new(compression, class);
        traffic.set_compressing(choice.is_compressing());
        let most = u16::try_from(SLOTS).expect("a small constant");
        Self {
            port,
            class,
            checksum,
            stream: None,
            slots: (0..SLOTS).map(|_| Slot::new()).collect(),
            free: (0..most).rev().collect(),
            posted: VecDeque::with_capacity(SLOTS),
            fences: 0,
            drops: 0,
            sent: 0,
            sent_bytes: 0,
            input: vec![0; input_bytes].into_boxed_slice(),
            filled: 0..0,
            received: Instant::now(),
            measured: Instant::now(),
            overdue: None,
            choice,
            traffic,
            // Only single pages are written.
            packer: Packer::new(1),
            compressed: 0,
            unpacked: vec![0; pages_max * PAGE_SIZE].into_boxed_slice(),
        }
    }

    /// Applies the compression policy of this link.
    #[must_use]
    pub fn following(mut self, path: Arc<PathStats>) -> Self {
        self.choice.follow(path);
        self
    }

    fn post(
        &mut self,
        ticket: Ticket,
        kind: FrameKind,
        offset: u64,
        payload: Payload,
    ) -> Result<(), Full> {
        if kind != FrameKind::Fence && self.posted.len() - self.fences >= IN_FLIGHT_MAX {
            return Err(Full);
        }
        let index = self.free.pop().ok_or(Full)?;
        let now = Instant::now();
        if self.posted.is_empty() {
            self.received = now;
            self.measured = now;
        }
        let slot = &mut self.slots[usize::from(index)];
        slot.since = now;
        slot.ticket = ticket;
        slot.kind = kind;
        slot.offset = offset;
        slot.generation += 1;
        slot.in_use = true;
        if let Payload::Count(pages) = payload {
            slot.count = encode_count(pages);
        }
        (slot.packing, slot.part) = match kind {
            _ if slot.has_pages() => self.choice.next(slot.pages()),
            _ => Default::default(),
        };
        if let Payload::Page(source) = payload {
            self.compressed += usize::from(slot.packing == Packing::Lz4);
            slot.take_page(source, &mut self.packer);
        }
        if let Payload::Piece(source) = payload {
            slot.take_piece(source);
        }
        slot.encode(index, self.checksum, self.port.ends().stamp());
        self.posted.push_back(index);
        Ok(())
    }

    fn send(&mut self) -> Result<(), Outage> {
        self.compressed = 0;
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        while self.sent < self.posted.len() {
            let mut parts = [IoSlice::new(&[]); SEND_BATCH * 2];
            let mut used = 0;
            let mut skip = self.sent_bytes;
            for &index in self.posted.iter().skip(self.sent).take(SEND_BATCH) {
                let slot = &self.slots[usize::from(index)];
                for part in [slot.header.as_slice(), slot.payload()] {
                    let from = skip.min(part.len());
                    skip -= from;
                    if from < part.len() {
                        parts[used] = IoSlice::new(&part[from..]);
                        used += 1;
                    }
                }
            }
            match stream.write_vectored(&parts[..used]) {
                Ok(0) => return Err(Outage::Stream(io::ErrorKind::WriteZero.into())),
                Ok(mut count) => {
                    count += self.sent_bytes;
                    while self.sent < self.posted.len() {
                        let index = usize::from(self.posted[self.sent]);
                        let frame_bytes = self.slots[index].frame_bytes();
                        if count < frame_bytes {
                            break;
                        }
                        count -= frame_bytes;
                        self.sent += 1;
                    }
                    self.sent_bytes = count;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Outage::Stream(error)),
            }
        }
        Ok(())
    }

    fn receive(&mut self, complete: &mut dyn FnMut(Completion<'_>)) -> Result<(), Outage> {
        // While the peer fills the buffer there may be more.
        loop {
            let Some(stream) = &mut self.stream else {
                return Ok(());
            };
            if self.posted.is_empty() {
                return Ok(());
            }
            // The remaining bytes are moved to the front only when the longest frame might not fit.
            if self.filled.is_empty() {
                self.filled = 0..0;
            } else if self.filled.start > self.input.len() / 2 {
                self.input.copy_within(self.filled.clone(), 0);
                self.filled = 0..self.filled.len();
            }
            let room = &mut self.input[self.filled.end..];
            let room_bytes = room.len();
            match stream.read(room) {
                Ok(0) => return Err(Outage::Stream(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.filled.end += count;
                    self.received = Instant::now();
                    self.decode(complete)?;
                    if count < room_bytes {
                        return self.check_oldest();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return self.check_oldest();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Outage::Stream(error)),
            }
        }
    }

    /// Completes the requests of whole frames in the buffer, and measures their durations.
    fn decode(&mut self, complete: &mut dyn FnMut(Completion<'_>)) -> Result<(), Outage> {
        let mut unpacking = Duration::ZERO;
        let mut answered = false;
        loop {
            let bytes = &self.input[self.filled.clone()];
            let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
                break;
            };
            let frame = Frame::decode(header).map_err(Outage::Protocol)?;
            if HEADER_BYTES + frame.length > self.input.len() / 2 {
                // Such frames are never requested on a connection of this class.
                return Err(Outage::Protocol(WireError::Unexpected(frame.kind)));
            }
            let Some(payload) = rest.get(..frame.length) else {
                break;
            };
            frame.verify(header, payload).map_err(Outage::Protocol)?;
            if frame.kind == FrameKind::Error {
                let message = ErrorMessage::decode(payload).map_err(Outage::Protocol)?;
                return Err(Outage::Refused(message));
            }
            let (kind, request) = (frame.kind, frame.request);
            let unasked = Outage::Protocol(WireError::Unasked { kind, request });
            // The low 16 bits; see `Slot::encode`.
            let index = u16::try_from(request & 0xffff).unwrap_or(u16::MAX);
            let Some(slot) = self.slots.get_mut(usize::from(index)) else {
                return Err(unasked);
            };
            if !slot.in_use || slot.generation != request >> 16 || slot.offset != frame.offset {
                return Err(unasked);
            }
            let signed = frame.check_answer(self.port.ends().donor, slot.epoch);
            signed.map_err(Outage::Protocol)?;
            let place = self.posted.iter().position(|&posted| posted == index);
            let place = place.expect("a slot in use is posted");
            if place >= self.sent {
                // An answer to a request that was not completely sent.
                return Err(unasked);
            }
            if frame.checksummed != self.checksum {
                return Err(Outage::Protocol(WireError::Unexpected(kind)));
            }
            match (slot.kind, kind) {
                (FrameKind::ReadPage, FrameKind::PageData)
                | (FrameKind::ReadPages, FrameKind::PagesData) => {
                    let room = &mut self.unpacked;
                    let came = slot.pages_of(&frame, payload, room, &mut unpacking);
                    let (pages, compressed) = came.map_err(Outage::Protocol)?;
                    complete(match (kind, pages.try_into()) {
                        (FrameKind::PageData, Ok(page)) => Completion::Read(slot.ticket, page),
                        _ => Completion::ReadRun(slot.ticket, pages),
                    });
                    self.traffic
                        .record(slot.pages().into(), compressed, payload.len());
                }
                (FrameKind::WritePage, FrameKind::Written) => {
                    complete(Completion::Written(slot.ticket));
                    let compressed = u64::from(slot.page_bytes < PAGE_SIZE);
                    self.traffic.record(1, compressed, slot.page_bytes);
                }
                (FrameKind::WritePiece, FrameKind::Written) => {
                    complete(Completion::Written(slot.ticket));
                    self.traffic.record(1, 0, slot.page_bytes);
                }
                (FrameKind::Probe, FrameKind::ProbeData)
                | (FrameKind::ReadPiece, FrameKind::PieceData) => {
                    if payload.len() != u32::from_le_bytes(slot.count) as usize {
                        return Err(unasked);
                    }
                    if slot.kind == FrameKind::ReadPiece {
                        let pages = payload.len().div_ceil(PAGE_SIZE) as u64;
                        self.traffic.record(pages, 0, payload.len());
                    }
                    complete(Completion::ReadRun(slot.ticket, payload));
                }
                (FrameKind::DropPages, FrameKind::Dropped) => {
                    self.drops -= 1;
                    complete(Completion::Dropped(slot.pages()));
                }
                (FrameKind::Fence, FrameKind::Fenced) => self.fences -= 1,
                _ => return Err(unasked),
            }
            if slot.has_pages() {
                self.choice.answered(slot.part, slot.pages());
                answered = true;
            }
            slot.in_use = false;
            if self.overdue == Some(index) {
                self.overdue = None;
            }
            self.note_progress();
            self.posted.remove(place);
            self.sent -= 1;
            self.free.push(index);
            self.filled.start += HEADER_BYTES + frame.length;
        }
        if answered {
            let took = self.received - self.measured + unpacking;
            self.measured = self.received;
            if self.choice.measured(took, self.received) {
                self.traffic.set_compressing(self.choice.is_compressing());
            }
        }
        Ok(())
    }
}

impl PageTransport for TcpTransport {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post(ticket, FrameKind::ReadPage, offset, Payload::None)
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        assert!((1..=RUN_PAGES_MAX).contains(&pages), "a run of {pages}");
        assert!(
            self.class == TrafficClass::Prefetch,
            "no room for runs here"
        );
        self.post(ticket, FrameKind::ReadPages, offset, Payload::Count(pages))
    }

    fn probe_bytes(&self) -> RangeInclusive<u32> {
        match self.class {
            TrafficClass::Probe => 1..=PROBE_BYTES_MAX,
            _ => PAGE_BYTES..=RUN_PAGES_MAX * PAGE_BYTES,
        }
    }

    fn post_probe(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        assert!(self.probe_bytes().contains(&bytes), "a probe of {bytes}");
        if self.class != TrafficClass::Probe {
            return self.post_read_run(ticket, offset, bytes.div_ceil(PAGE_BYTES));
        }
        let payload = Payload::Count(bytes);
        self.post(ticket, FrameKind::Probe, offset, payload)
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        self.post(ticket, FrameKind::WritePage, offset, Payload::Page(page))?;
        if self.compressed >= COMPRESSED_BATCH {
            self.flush();
        }
        Ok(())
    }

    fn post_read_piece(&mut self, ticket: Ticket, offset: u64, bytes: u32) -> Result<(), Full> {
        let payload = Payload::Count(bytes);
        self.post(ticket, FrameKind::ReadPiece, offset, payload)
    }

    fn post_write_piece(&mut self, ticket: Ticket, offset: u64, piece: &[u8]) -> Result<(), Full> {
        let payload = Payload::Piece(piece);
        self.post(ticket, FrameKind::WritePiece, offset, payload)
    }

    fn post_drop(&mut self, offset: u64, pages: u32) -> Result<(), Full> {
        // The completion has the number of pages, not a ticket.
        let payload = Payload::Count(pages);
        self.post(Ticket(0), FrameKind::DropPages, offset, payload)?;
        self.drops += 1;
        Ok(())
    }

    fn flush(&mut self) {
        if let Err(why) = self.send() {
            self.disconnect(why);
        }
    }

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        if self.stream.is_none() {
            self.adopt_connection();
        }
        if self.posted.is_empty() {
            let polled = self.stream.as_mut().map_or(Ok(()), Stream::poll_io);
            // Nothing would read it, and the thread never sleep.
            let is_unasked = || self.stream.as_ref().is_some_and(Stream::is_ready);
            match polled {
                Err(error) => self.disconnect(Outage::Stream(error)),
                Ok(()) if is_unasked() => {
                    let what = "the peer sent what was not asked for";
                    let error = io::Error::new(io::ErrorKind::InvalidData, what);
                    self.disconnect(Outage::Stream(error));
                }
                Ok(()) => {}
            }
            return;
        }
        if let Err(why) = self.send().and_then(|()| self.receive(complete)) {
            tracing::debug!(class = ?self.class, %why, "page connection lost");
            self.disconnect(why);
        }
    }

    fn in_flight(&self) -> usize {
        self.posted.len()
    }

    fn arm(&mut self) -> bool {
        !self.stream.as_ref().is_some_and(Stream::is_ready)
    }

    fn wake_by(&mut self) -> Option<Instant> {
        self.stream.as_mut().and_then(Stream::wake_by)
    }

    fn interests(&self, watch: &mut dyn FnMut(Interest)) {
        if let Some(stream) = &self.stream {
            let (fd, writable, while_idle) = stream.interest(self.sent < self.posted.len());
            if while_idle || !self.posted.is_empty() {
                watch(Interest { fd, writable });
            }
        }
    }
}

#[cfg(test)]
mod tests;
