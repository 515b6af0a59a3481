//! One page connection of a VM: reads requests in batches, answers in order.

use super::TAKE_OVER_TIMEOUT;
use super::pool::{DropRefused, Lease, OutOfRange};
use crate::packing::{Packer, Packing, packed_bytes_max, unpack};
use crate::page::{PAGE_SIZE, PageBytes};
use crate::slices::request_short_slices;
use crate::spin::Spin;
use crate::stream::Stream;
use crate::wire::{
    Attached, ErrorMessage, Frame, FrameKind, HEADER_BYTES, PAYLOAD_BYTES_MAX, PIECE_BYTES,
    PROBE_BYTES_MAX, RUN_PAGES_MAX, Refusal, TrafficClass, WireError, decode_pieces, decode_probe,
    decode_run, encode_message,
};
use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

/// Size of the receive buffer: 31 pages and their headers.
const INPUT_BYTES: usize = 128 << 10;

/// Size of collected answers after which they are sent.
const OUTPUT_BYTES: usize = 32 * (HEADER_BYTES + PAGE_SIZE);

/// Size of the buffer for answers: what is collected, and the longest answer after that.
const fn output_bytes(class: TrafficClass) -> usize {
    let longest = match class {
        TrafficClass::Probe => PROBE_BYTES_MAX as usize,
        TrafficClass::Urgent | TrafficClass::Prefetch | TrafficClass::Bulk => PAYLOAD_BYTES_MAX,
    };
    OUTPUT_BYTES + HEADER_BYTES + longest
}

/// Returns the bytes of all buffers of a session.
pub(super) const fn buffer_bytes(class: TrafficClass) -> usize {
    /// What a packer has besides its result: a table, and room for a page that turns out too long.
    const PACKER_BYTES: usize = 32 << 10;
    let packed = packed_bytes_max(RUN_PAGES_MAX as usize);
    INPUT_BYTES + output_bytes(class) + packed + PACKER_BYTES + PAGE_SIZE
}

/// Number of compressed pages after which answers are sent: they travel while others are
/// compressed.
const COMPRESSED_PAGES: u32 = 8;

/// A VM that accepts no data for this long is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a session ended, except by the VM.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("connection broke")]
    Stream(#[from] io::Error),
    #[error(transparent)]
    Protocol(#[from] WireError),
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    #[error(transparent)]
    Drop(#[from] DropRefused),
    #[error("the RDMA connection for write-backs does not end")]
    Fence(#[source] io::Error),
}

/// Serves pages of `lease` until the VM closes the connection. `spin` is the longest polling time
/// before a sleep.
pub(super) fn serve(
    lease: &Lease,
    stream: &mut Stream,
    class: TrafficClass,
    attached: &mut Attached,
    spin: Duration,
) -> Result<(), SessionError> {
    request_short_slices();
    stream.set_nonblocking()?;
    let mut session = Session {
        lease,
        stream,
        class,
        attached,
        spin: Spin::new(spin),
        input: vec![0; INPUT_BYTES].into_boxed_slice(),
        filled: 0..0,
        output: Vec::with_capacity(output_bytes(class)),
        packer: Packer::new(RUN_PAGES_MAX as usize),
        compressed: 0,
        unpacked: Box::new([0; PAGE_SIZE]),
    };
    let result = session.run();
    // It was charged for no more.
    debug_assert!(session.output.capacity() <= output_bytes(class));
    let refusal = match &result {
        Ok(()) | Err(SessionError::Stream(_)) => return result,
        Err(SessionError::Protocol(WireError::StaleEpoch { .. })) => Refusal::StaleEpoch,
        Err(SessionError::Protocol(_)) => Refusal::Malformed,
        Err(SessionError::OutOfRange(_) | SessionError::Drop(_)) => Refusal::OutOfRange,
        Err(SessionError::Fence(_)) => Refusal::Busy,
    };
    let text = result
        .as_ref()
        .map_or_else(ToString::to_string, |()| String::new());
    let message = encode_message(&ErrorMessage { refusal, text });
    session
        .output
        .extend(Frame::new(FrameKind::Error, 0, 0, true).encode(&message));
    session.output.extend(message);
    // Best effort: sends the reason to the VM.
    let _ = session.send();
    result
}

struct Session<'a> {
    lease: &'a Lease,
    stream: &'a mut Stream,
    class: TrafficClass,
    attached: &'a mut Attached,
    spin: Spin,
    input: Box<[u8]>,
    /// The received part of `input` that is not decoded yet.
    filled: std::ops::Range<usize>,
    output: Vec<u8>,
    packer: Packer,
    /// Pages in `output` for which compression was tried.
    compressed: u32,
    /// Buffer for an unpacked page.
    unpacked: Box<PageBytes>,
}

impl Session<'_> {
    fn run(&mut self) -> Result<(), SessionError> {
        while self.receive()? {
            self.answer()?;
            self.send()?;
        }
        Ok(())
    }

    /// Waits for more requests; returns false when the VM closed the connection.
    fn receive(&mut self) -> io::Result<bool> {
        if self.filled.start > 0 {
            self.input.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        let mut idle_since = None;
        loop {
            match self.stream.read(&mut self.input[self.filled.end..]) {
                Ok(0) if self.filled.is_empty() => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.filled.end += count;
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let now = Instant::now();
                    let since = *idle_since.get_or_insert(now);
                    if !self.spin.keeps_polling(now - since) {
                        // No deadline: the end of the lease shuts the connection down.
                        self.stream.wait(false, None)?;
                        self.spin.slept(since.elapsed());
                        idle_since = None;
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns whether a VM may send frames of this kind on this connection.
    fn takes(&self, kind: FrameKind) -> bool {
        match kind {
            FrameKind::ReadPage
            | FrameKind::ReadPages
            | FrameKind::ReadPiece
            | FrameKind::WritePage
            | FrameKind::WritePiece
            | FrameKind::DropPages
            | FrameKind::Fence => true,
            FrameKind::Probe => self.class == TrafficClass::Probe,
            _ => false,
        }
    }

    /// Executes the complete requests in the buffer.
    fn answer(&mut self) -> Result<(), SessionError> {
        loop {
            let bytes = &self.input[self.filled.clone()];
            let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
                return Ok(());
            };
            let frame = Frame::decode(header)?;
            if !self.takes(frame.kind) {
                // Before its payload arrives, which may be longer than the buffer.
                return Err(WireError::Unexpected(frame.kind).into());
            }
            let Some(payload) = rest.get(..frame.length) else {
                return Ok(());
            };
            frame.verify(header, payload)?;
            let stamp = self.attached.check(&frame)?;
            let reply = |kind| {
                Frame::new(kind, frame.request, frame.offset, frame.checksummed).with_stamp(stamp)
            };
            match frame.kind {
                FrameKind::ReadPage => self.read(&frame, reply(FrameKind::PageData), 1)?,
                FrameKind::ReadPages => {
                    let pages = decode_run(payload)?;
                    self.read(&frame, reply(FrameKind::PagesData), pages)?;
                }
                FrameKind::WritePage => {
                    let page = if frame.packing == Packing::Plain {
                        payload.try_into().expect("length was checked")
                    } else {
                        let kind = frame.kind;
                        unpack(payload, self.unpacked.as_mut_slice())
                            .map_err(|cause| WireError::Unpack { kind, cause })?;
                        &*self.unpacked
                    };
                    self.lease.write(frame.offset, page)?;
                    self.output.extend(reply(FrameKind::Written).encode(&[]));
                }
                FrameKind::ReadPiece => {
                    let bytes = decode_pieces(payload)?;
                    let reply = reply(FrameKind::PieceData);
                    self.read_bytes(reply, |lease, output| {
                        lease.read_pieces(frame.offset, bytes, output)
                    })?;
                }
                FrameKind::WritePiece => {
                    if !payload.len().is_multiple_of(PIECE_BYTES) {
                        return Err(WireError::Pieces(
                            u32::try_from(frame.length).unwrap_or(u32::MAX),
                        )
                        .into());
                    }
                    self.lease.write_piece(frame.offset, payload)?;
                    self.output.extend(reply(FrameKind::Written).encode(&[]));
                }
                FrameKind::DropPages => {
                    let count = payload.try_into().expect("length was checked");
                    let pages = u32::from_le_bytes(count);
                    self.lease.drop_pages(frame.offset, pages)?;
                    self.output.extend(reply(FrameKind::Dropped).encode(&[]));
                }
                FrameKind::Probe => {
                    let bytes = decode_probe(payload)?;
                    let reply = reply(FrameKind::ProbeData);
                    self.read_bytes(reply, |lease, output| {
                        lease.read_bytes(frame.offset, bytes, output)
                    })?;
                }
                FrameKind::Fence => {
                    let fenced = self.lease.fence_writes(TAKE_OVER_TIMEOUT);
                    fenced.map_err(SessionError::Fence)?;
                    self.output.extend(reply(FrameKind::Fenced).encode(&[]));
                }
                other => return Err(WireError::Unexpected(other).into()),
            }
            self.filled.start += HEADER_BYTES + frame.length;
            if self.output.len() + HEADER_BYTES + PAGE_SIZE > OUTPUT_BYTES
                || self.compressed >= COMPRESSED_PAGES
            {
                self.send()?;
            }
        }
    }

    /// Answers a request for pages, packed if it is allowed and saves enough.
    fn read(&mut self, asked: &Frame, mut reply: Frame, pages: u32) -> Result<(), OutOfRange> {
        let start = self.output.len();
        let payload = start + HEADER_BYTES;
        self.output.extend([0; HEADER_BYTES]);
        // Packs a copy, since the slab may be written concurrently.
        let read = self.lease.read_run(asked.offset, pages, &mut self.output);
        if let Err(error) = read {
            self.output.truncate(start);
            return Err(error);
        }
        if let Some(packed) = self.packer.pack(&self.output[payload..], asked.packing) {
            self.output.truncate(payload);
            self.output.extend_from_slice(packed);
            reply = reply.with_packing(asked.packing);
        }
        if asked.packing == Packing::Lz4 {
            self.compressed += pages;
        }
        let (header, payload) = self.output[start..].split_at_mut(HEADER_BYTES);
        header.copy_from_slice(&reply.encode(payload));
        Ok(())
    }

    /// Answers a request for bytes, which `read` appends.
    fn read_bytes(
        &mut self,
        reply: Frame,
        read: impl FnOnce(&Lease, &mut Vec<u8>) -> Result<(), OutOfRange>,
    ) -> Result<(), OutOfRange> {
        let start = self.output.len();
        self.output.extend([0; HEADER_BYTES]);
        if let Err(error) = read(self.lease, &mut self.output) {
            self.output.truncate(start);
            return Err(error);
        }
        let (header, payload) = self.output[start..].split_at_mut(HEADER_BYTES);
        header.copy_from_slice(&reply.encode(payload));
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + SEND_TIMEOUT;
        let mut rest = self.output.as_slice();
        while !rest.is_empty() {
            match self.stream.write_vectored(&[IoSlice::new(rest)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stream.wait(true, Some(deadline))?;
                }
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.compressed = 0;
        Ok(())
    }
}
