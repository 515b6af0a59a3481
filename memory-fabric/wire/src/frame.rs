//! A frame's header.

use crate::packing::Packing;
use crate::{FrameKind, Stamp, VERSION, WireError};
use fabric_homes::NodeId;
use std::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// "SV", the first two bytes of every frame.
pub const MAGIC: [u8; 2] = *b"SV";

/// Bytes of a header.
pub const HEADER_BYTES: usize = size_of::<Header>();

/// Bytes of a header up to its kind, which are the same in all versions.
pub const PREFIX_BYTES: usize = 4;

/// Set in a header with a valid checksum field; the answer then has one too.
pub const FLAG_CHECKSUM: u16 = 1;

/// The bits of the flags that have the [`Packing`]: 0 to 2.
pub const FLAGS_PACKING: u16 = 0b110;

/// A frame's header.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    magic: [u8; 2],
    version: u8,
    kind: u8,
    flags: U16,
    sender: u8,
    reserved: u8,
    length: U32,
    checksum: U32,
    request: U64,
    offset: U64,
    epoch: U64,
}

// The layout since version 8.
const _: () = assert!(size_of::<Header>() == 40);
const _: () = assert!(align_of::<Header>() == 1);
const _: () = assert!(offset_of!(Header, kind) + 1 == PREFIX_BYTES);
const _: () = assert!(offset_of!(Header, sender) == 6);
const _: () = assert!(offset_of!(Header, length) == 8);
const _: () = assert!(offset_of!(Header, request) == 16);
const _: () = assert!(offset_of!(Header, epoch) == 32);

/// A validated header in host byte order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Frame {
    /// Its kind.
    pub kind: FrameKind,
    /// Whether it has, and requests, a checksum.
    pub checksummed: bool,
    /// Packing of its pages; for a request for pages, the most compact one allowed.
    pub packing: Packing,
    /// Its sender and epoch.
    pub stamp: Stamp,
    /// Id of the request.
    pub request: u64,
    /// Offset in the lease in bytes, for page frames.
    pub offset: u64,
    /// Bytes of payload.
    pub length: usize,
    checksum: u32,
}

impl Frame {
    /// Creates a frame to send.
    #[must_use]
    pub const fn new(kind: FrameKind, request: u64, offset: u64, checksummed: bool) -> Self {
        Self {
            kind,
            checksummed,
            packing: Packing::Plain,
            stamp: Stamp::NONE,
            request,
            offset,
            length: 0,
            checksum: 0,
        }
    }

    /// Sets the packing of its pages, or the one allowed.
    #[must_use]
    pub const fn with_packing(mut self, packing: Packing) -> Self {
        self.packing = packing;
        self
    }

    /// Sets its sender and epoch.
    #[must_use]
    pub const fn with_stamp(mut self, stamp: Stamp) -> Self {
        self.stamp = stamp;
        self
    }

    /// Returns the header that precedes `payload`.
    #[must_use]
    pub fn encode(&self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let length = u32::try_from(payload.len()).expect("payloads are at most a run of pages");
        let checksum = if self.checksummed { FLAG_CHECKSUM } else { 0 };
        let packing = (self.packing as u16) << FLAGS_PACKING.trailing_zeros();
        let mut header = Header {
            magic: MAGIC,
            version: VERSION,
            kind: self.kind as u8,
            flags: U16::new(checksum | packing),
            sender: self.stamp.node.0,
            reserved: 0,
            length: U32::new(length),
            checksum: U32::ZERO,
            request: U64::new(self.request),
            offset: U64::new(self.offset),
            epoch: U64::new(self.stamp.epoch),
        };
        if self.checksummed {
            header.checksum = U32::new(checksum_of(&header, payload));
        }
        zerocopy::transmute!(header)
    }

    /// Checks the first bytes of a header, which are the same in all versions.
    ///
    /// # Errors
    ///
    /// Fails when they are of another protocol, or another version of this one.
    pub fn check_prefix(prefix: [u8; PREFIX_BYTES]) -> Result<(), WireError> {
        let [first, second, version, _kind] = prefix;
        check_peer([first, second], version)
    }

    /// Decodes and validates a header.
    ///
    /// # Errors
    ///
    /// Fails when it violates the protocol; its payload must then not be read.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let header: Header = zerocopy::transmute!(*bytes);
        check_peer(header.magic, header.version)?;
        let kind = FrameKind::from_byte(header.kind).ok_or(WireError::Kind(header.kind))?;
        let flags = header.flags.get();
        let packing =
            Packing::from_number((flags & FLAGS_PACKING) >> FLAGS_PACKING.trailing_zeros())
                .filter(|&packing| packing == Packing::Plain || kind.has_packing())
                .ok_or(WireError::Packing { kind, flags })?;
        let (least, most) = kind.payload_bytes(packing);
        let length = header.length.get();
        match usize::try_from(length) {
            Ok(bytes) if (least..=most).contains(&bytes) => Ok(Self {
                kind,
                checksummed: flags & FLAG_CHECKSUM != 0,
                packing,
                stamp: Stamp {
                    node: NodeId(header.sender),
                    epoch: header.epoch.get(),
                },
                request: header.request.get(),
                offset: header.offset.get(),
                length: bytes,
                checksum: header.checksum.get(),
            }),
            _ => Err(WireError::Length {
                kind,
                length,
                least,
                most,
            }),
        }
    }

    /// Checks the sender of an answer to a request of epoch `asked`, and its epoch.
    ///
    /// # Errors
    ///
    /// [`WireError::Sender`] and [`WireError::AnswerEpoch`].
    #[inline]
    pub fn check_answer(&self, expected: NodeId, asked: u64) -> Result<(), WireError> {
        let kind = self.kind;
        let Stamp { node, epoch } = self.stamp;
        if node != expected {
            let found = node;
            return Err(WireError::Sender {
                kind,
                found,
                expected,
            });
        }
        if epoch != asked {
            let found = epoch;
            return Err(WireError::AnswerEpoch { kind, found, asked });
        }
        Ok(())
    }

    /// Verifies the checksum of header and payload, if there is one.
    ///
    /// # Errors
    ///
    /// [`WireError::Checksum`].
    pub fn verify(&self, header: &[u8; HEADER_BYTES], payload: &[u8]) -> Result<(), WireError> {
        if !self.checksummed {
            return Ok(());
        }
        let mut header: Header = zerocopy::transmute!(*header);
        header.checksum = U32::ZERO;
        let computed = checksum_of(&header, payload);
        if computed == self.checksum {
            return Ok(());
        }
        let (kind, request, found) = (self.kind, self.request, self.checksum);
        Err(WireError::Checksum {
            kind,
            request,
            found,
            computed,
        })
    }
}

fn check_peer(magic: [u8; 2], version: u8) -> Result<(), WireError> {
    if magic != MAGIC {
        return Err(WireError::Magic(magic));
    }
    if version != VERSION {
        return Err(WireError::Version { theirs: version });
    }
    Ok(())
}

/// Computes the CRC-32C (RFC 3720, appendix B.4) of the header, with a zero checksum field, and the
/// payload.
fn checksum_of(header: &Header, payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(header.as_bytes()), payload)
}
