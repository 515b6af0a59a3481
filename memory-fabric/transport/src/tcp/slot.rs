//! An outstanding request, with the data to send.

use super::super::Ticket;
use super::super::choice::Part;
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_wire::packing::{Packer, Packing, unpack};
use fabric_wire::{COUNT_BYTES, Frame, FrameKind, HEADER_BYTES, Stamp, WireError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) ticket: Ticket,
    pub(super) kind: FrameKind,
    pub(super) offset: u64,
    /// Distinguishes the uses of a slot, so that a late answer is not mistaken for another's.
    pub(super) generation: u64,
    pub(super) in_use: bool,
    /// The epoch of the request.
    pub(super) epoch: u64,
    pub(super) header: [u8; HEADER_BYTES],
    /// Number of pages of a request that names several.
    pub(super) count: [u8; COUNT_BYTES],
    /// The page of a write; reads have none. Allocated at the first write and kept.
    pub(super) page: Option<Box<PageBytes>>,
    /// Number of its bytes to send: less than a page if it is packed.
    pub(super) page_bytes: usize,
    /// The packing of the pages, or the most compact one allowed.
    pub(super) packing: Packing,
    pub(super) part: Part,
    /// When it was posted, or sent again on a new connection.
    pub(super) since: Instant,
}

impl Slot {
    /// Creates an unused slot.
    pub(super) fn new() -> Self {
        Self {
            ticket: Ticket(0),
            kind: FrameKind::ReadPage,
            offset: 0,
            generation: 0,
            in_use: false,
            epoch: 0,
            header: [0; HEADER_BYTES],
            count: [0; COUNT_BYTES],
            page: None,
            page_bytes: 0,
            packing: Packing::Plain,
            part: Part::default(),
            since: Instant::now(),
        }
    }

    /// Encodes the header for the connection on which the request is sent next.
    pub(super) fn encode(&mut self, index: u16, checksum: bool, stamp: Stamp) {
        let request = (self.generation << 16) | u64::from(index);
        let frame = Frame::new(self.kind, request, self.offset, checksum);
        let frame = frame.with_packing(self.packing).with_stamp(stamp);
        self.header = frame.encode(self.payload());
        self.epoch = stamp.epoch;
    }

    /// Returns the payload.
    pub(super) fn payload(&self) -> &[u8] {
        match (self.kind, &self.page) {
            (FrameKind::WritePage | FrameKind::WritePiece, Some(page)) => &page[..self.page_bytes],
            (
                FrameKind::ReadPages
                | FrameKind::ReadPiece
                | FrameKind::DropPages
                | FrameKind::Probe,
                _,
            ) => &self.count,
            _ => &[],
        }
    }

    pub(super) fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.payload().len()
    }

    /// Returns its number of pages.
    pub(super) fn pages(&self) -> u32 {
        match self.kind {
            FrameKind::ReadPages | FrameKind::DropPages => u32::from_le_bytes(self.count),
            _ => 1,
        }
    }

    /// Returns whether the trials of compression count it: it has pages.
    pub(super) fn has_pages(&self) -> bool {
        matches!(
            self.kind,
            FrameKind::ReadPage | FrameKind::ReadPages | FrameKind::WritePage
        )
    }

    /// Returns the pages of the answer, and how many of them took less than a page. Packed pages
    /// are unpacked into `room`, and the duration is added to `unpacking`.
    pub(super) fn pages_of<'a>(
        &self,
        frame: &Frame,
        payload: &'a [u8],
        room: &'a mut [u8],
        unpacking: &mut Duration,
    ) -> Result<(&'a [u8], u64), WireError> {
        let (kind, request) = (frame.kind, frame.request);
        if frame.packing > self.packing {
            return Err(WireError::Unexpected(kind));
        }
        let bytes = self.pages() as usize * PAGE_SIZE;
        if frame.packing == Packing::Plain {
            let asked = payload.len() == bytes;
            return asked
                .then_some((payload, 0))
                .ok_or(WireError::Unasked { kind, request });
        }
        let started = Instant::now();
        let pages = &mut room[..bytes];
        let compressed =
            unpack(payload, pages).map_err(|cause| WireError::Unpack { kind, cause })?;
        *unpacking += started.elapsed();
        Ok((pages, compressed))
    }

    /// Copies the piece of a write.
    pub(super) fn take_piece(&mut self, source: &[u8]) {
        let page = self.page.get_or_insert_with(|| Box::new([0; PAGE_SIZE]));
        page[..source.len()].copy_from_slice(source);
        self.page_bytes = source.len();
    }

    /// Copies the page of a write, packed if requested and possible.
    pub(super) fn take_page(&mut self, source: &PageBytes, packer: &mut Packer) {
        let page = self.page.get_or_insert_with(|| Box::new([0; PAGE_SIZE]));
        page.copy_from_slice(source);
        self.page_bytes = PAGE_SIZE;
        if let Some(packed) = packer.pack(page.as_slice(), self.packing) {
            self.page_bytes = packed.len();
            page[..packed.len()].copy_from_slice(packed);
        } else {
            self.packing = Packing::Plain;
        }
    }
}
