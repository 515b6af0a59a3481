//! What goes over a TCP connection between a VM and a donor.
//!
//! Every frame is a 32-byte little-endian header and, for some kinds, a payload. The first
//! frame on a connection decides what the connection is for:
//!
//! | first frame | connection | then |
//! |---|---|---|
//! | `Lease` | control | `Renew`..., `Release` |
//! | `Resume` | control, after a break | as above |
//! | `Attach` | pages, of one class | `ReadPage`, `ReadPages`, `WritePage`, `DropPages`, `Fence`, pipelined; `Probe` on one for measuring |
//! | `Connect` | sets up RDMA for a class | nothing: its end is the end of the RDMA connection |
//!
//! Requests carry an id that the answer repeats. Answers on one connection come in the order
//! of the requests from our donor, but a client must not rely on it. A peer that breaks a rule
//! gets an `Error` frame, if it can still be told, and is disconnected.
//!
//! Pages may be [packed](crate::packing). The VM decides: each of its requests for pages says
//! how the answer may be packed at the most, and each page that it writes how it is.

mod messages;
pub mod packing;

pub use messages::{
    AttachRequest, ErrorMessage, GrantError, LeaseGrant, LeaseRequest, LeaseStatus, Refusal, Token,
    TrafficClass, decode_message, encode_message,
};

use crate::packing::{LENGTH_BYTES, Packing, UnpackError, packed_bytes_max};
use fabric_pages::page::PAGE_SIZE;
use std::time::Duration;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// "SV", the first two bytes of every frame.
pub const MAGIC: [u8; 2] = *b"SV";

/// The protocol's version. Peers of different versions do not talk.
pub const VERSION: u8 = 7;

/// Bytes of a header.
pub const HEADER_BYTES: usize = size_of::<Header>();

/// Longest payload of a control frame, bytes: room for every message with its longest strings.
pub const CONTROL_BYTES_MAX: usize = 1024;

/// Payload of a frame that names several pages, bytes: their little-endian number.
pub const COUNT_BYTES: usize = size_of::<U32>();

/// Most pages of one [`FrameKind::DropPages`] frame: what comes behind it on its connection
/// does not wait long. 32 MiB.
pub const DROP_PAGES_MAX: u32 = 8192;

/// Most pages that one [`FrameKind::ReadPages`] asks for. More make no frame cheaper, and the
/// first page of a run can only be used when the last has come.
pub const RUN_PAGES_MAX: u32 = 64;

/// Longest payload of any frame but [`FrameKind::ProbeData`], bytes: the longest run of pages.
pub const PAYLOAD_BYTES_MAX: usize = RUN_PAGES_MAX as usize * PAGE_SIZE;

/// Most bytes that one [`FrameKind::Probe`] asks for: longer ones tell nothing more of a link. Only
/// connections for measuring have room for so much.
pub const PROBE_BYTES_MAX: u32 = 1 << 20;

/// How long a lease goes on when its control connection was closed by the VM's side without a
/// release, as the end of a killed process does. A living VM renews several times in it, finds
/// the connection closed, and resumes the lease on another.
pub const ORPHAN_TIME: Duration = Duration::from_secs(10);

/// Longest time between two renewals by a VM, however long its lease.
pub const RENEWAL_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// Longest name of a VM, bytes.
pub const VM_NAME_BYTES_MAX: usize = 64;

/// Set in a header whose checksum field is valid; an answer then has one too.
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
    reserved: U16,
    length: U32,
    checksum: U32,
    request: U64,
    offset: U64,
}

const _: () = assert!(size_of::<Header>() == 32);

/// What a frame is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum FrameKind {
    /// [`LeaseRequest`]: lend me memory.
    Lease = 1,
    /// [`LeaseGrant`]: the answer to `Lease`.
    Granted = 2,
    /// [`Token`]: go on with a lease on a new control connection.
    Resume = 3,
    /// [`Token`]: keep a lease.
    Renew = 4,
    /// [`LeaseStatus`]: the answer to `Resume`, `Renew` and `Release`.
    Status = 5,
    /// [`Token`]: end a lease.
    Release = 6,
    /// [`AttachRequest`]: use this connection for pages of a lease.
    Attach = 7,
    /// No payload: the answer to `Attach`.
    Attached = 8,
    /// A message of the RDMA transport: let me read pages of a lease by RDMA.
    Connect = 9,
    /// A message of the RDMA transport: the answer to `Connect`.
    Connected = 10,
    /// No payload: send the page at `offset` (bytes into the lease).
    ReadPage = 16,
    /// One page: the answer to `ReadPage`.
    PageData = 17,
    /// One page: store it at `offset`.
    WritePage = 18,
    /// No payload: the answer to `WritePage`.
    Written = 19,
    /// A number of pages, 4 bytes, from 1 to [`DROP_PAGES_MAX`]: forget those from `offset` on.
    /// The VM does not read them before it has written them again.
    DropPages = 20,
    /// No payload: the answer to `DropPages`.
    Dropped = 21,
    /// A number of pages, 4 bytes, from 1 to [`RUN_PAGES_MAX`]: send so many from `offset` on.
    ReadPages = 22,
    /// The pages one after the other: the answer to `ReadPages`.
    PagesData = 23,
    /// A number of bytes, 4 bytes, from 1 to [`PROBE_BYTES_MAX`]: send so many from `offset` on.
    /// Only on connections of [`TrafficClass::Probe`].
    Probe = 24,
    /// The bytes: the answer to `Probe`.
    ProbeData = 25,
    /// No payload: end the RDMA connection for write-backs, if there is one. What comes behind
    /// this on its connection is carried out when no WRITE can change the lease any more.
    Fence = 26,
    /// No payload: the answer to `Fence`.
    Fenced = 27,
    /// [`ErrorMessage`]: the request was refused; the connection ends.
    Error = 31,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::*;
        let all = [
            Lease, Granted, Resume, Renew, Status, Release, Attach, Attached, Connect, Connected,
            ReadPage, PageData, WritePage, Written, DropPages, Dropped, ReadPages, PagesData,
            Probe, ProbeData, Fence, Fenced, Error,
        ];
        all.into_iter().find(|&kind| kind as u8 == byte)
    }

    /// Whether frames of this kind say how pages are packed, or may be.
    const fn has_packing(self) -> bool {
        matches!(
            self,
            Self::ReadPage | Self::ReadPages | Self::PageData | Self::PagesData | Self::WritePage
        )
    }

    /// Payload lengths that this kind may have, bytes, with its pages packed or not.
    #[must_use]
    pub const fn payload_bytes(self, packing: Packing) -> (usize, usize) {
        match (self, packing) {
            (Self::PageData | Self::WritePage, Packing::Zeroes | Packing::Lz4) => {
                return (LENGTH_BYTES, packed_bytes_max(1));
            }
            (Self::PagesData, Packing::Zeroes | Packing::Lz4) => {
                return (LENGTH_BYTES, packed_bytes_max(RUN_PAGES_MAX as usize));
            }
            _ => {}
        }
        match self {
            Self::PageData | Self::WritePage => (PAGE_SIZE, PAGE_SIZE),
            Self::Attached
            | Self::ReadPage
            | Self::Written
            | Self::Dropped
            | Self::Fence
            | Self::Fenced => (0, 0),
            Self::DropPages | Self::ReadPages | Self::Probe => (COUNT_BYTES, COUNT_BYTES),
            Self::ProbeData => (1, PROBE_BYTES_MAX as usize),
            Self::PagesData => (PAGE_SIZE, PAYLOAD_BYTES_MAX),
            _ => (0, CONTROL_BYTES_MAX),
        }
    }
}

/// A frame that breaks the protocol.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum WireError {
    /// Not this protocol.
    #[error("frame starts with {0:02x?}, not with \"SV\": the peer is not an ssi-hv node")]
    Magic([u8; 2]),
    /// Another version of it.
    #[error(
        "peer speaks version {theirs} of the protocol, this one {VERSION}; use the same release of ssi-hv on both hosts"
    )]
    Version {
        /// What the peer speaks.
        theirs: u8,
    },
    /// A kind that does not exist.
    #[error("frame of unknown kind {0}")]
    Kind(u8),
    /// A length that the kind cannot have.
    #[error("{kind:?} frame with {length} bytes, {least} to {most} are allowed")]
    Length {
        /// The frame's kind.
        kind: FrameKind,
        /// Its length.
        length: u32,
        /// Smallest length allowed.
        least: usize,
        /// Largest length allowed.
        most: usize,
    },
    /// A run of pages that nobody may ask for.
    #[error("a run of {0} pages is asked, 1 to {RUN_PAGES_MAX} are allowed")]
    Run(u32),
    /// A probe that nobody may ask for.
    #[error("a probe of {0} bytes is asked, 1 to {PROBE_BYTES_MAX} are allowed")]
    Probe(u32),
    /// Flags that say nothing, or on a kind that has nothing to pack.
    #[error("{kind:?} frame with flags {flags:#06x}, whose packing is not allowed")]
    Packing {
        /// The frame's kind.
        kind: FrameKind,
        /// Its flags.
        flags: u16,
    },
    /// Packed pages that are not what they should be.
    #[error("{kind:?} frame whose packed pages are wrong: {cause}")]
    Unpack {
        /// The frame's kind.
        kind: FrameKind,
        /// What is wrong.
        cause: UnpackError,
    },
    /// Damaged on the way.
    #[error(
        "{kind:?} frame {request:#x} has checksum {found:#010x}, its bytes give {computed:#010x}"
    )]
    Checksum {
        /// The frame's kind.
        kind: FrameKind,
        /// Its request id.
        request: u64,
        /// The checksum it carries.
        found: u32,
        /// The checksum of its bytes.
        computed: u32,
    },
    /// A control payload that is not what its kind says.
    #[error("{kind:?} frame whose payload cannot be decoded")]
    Payload {
        /// The frame's kind.
        kind: FrameKind,
    },
    /// A kind that is not allowed at this point.
    #[error("unexpected {0:?} frame")]
    Unexpected(FrameKind),
    /// An answer to no request.
    #[error("{kind:?} frame answers request {request:#x}, which is not outstanding")]
    Unasked {
        /// The frame's kind.
        kind: FrameKind,
        /// The id it repeats.
        request: u64,
    },
}

/// A checked header in host byte order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Frame {
    /// What it is.
    pub kind: FrameKind,
    /// Whether it carries, and wants, a checksum.
    pub checksummed: bool,
    /// How its pages are packed; of a request for pages, how they may be at the most.
    pub packing: Packing,
    /// The request's id.
    pub request: u64,
    /// Bytes into the lease, for page frames.
    pub offset: u64,
    /// Bytes of payload.
    pub length: usize,
    checksum: u32,
}

impl Frame {
    /// A frame to be sent.
    #[must_use]
    pub const fn new(kind: FrameKind, request: u64, offset: u64, checksummed: bool) -> Self {
        Self {
            kind,
            checksummed,
            packing: Packing::Plain,
            request,
            offset,
            length: 0,
            checksum: 0,
        }
    }

    /// The same with its pages packed, or allowed to be.
    #[must_use]
    pub const fn with_packing(mut self, packing: Packing) -> Self {
        self.packing = packing;
        self
    }

    /// The header that precedes `payload`.
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
            reserved: U16::ZERO,
            length: U32::new(length),
            checksum: U32::ZERO,
            request: U64::new(self.request),
            offset: U64::new(self.offset),
        };
        if self.checksummed {
            header.checksum = U32::new(checksum_of(&header, payload));
        }
        zerocopy::transmute!(header)
    }

    /// Checks a header.
    ///
    /// # Errors
    ///
    /// When it breaks the protocol; its payload must then not be read.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let header: Header = zerocopy::transmute!(*bytes);
        if header.magic != MAGIC {
            return Err(WireError::Magic(header.magic));
        }
        if header.version != VERSION {
            return Err(WireError::Version {
                theirs: header.version,
            });
        }
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

    /// Checks header and payload against the checksum, where there is one.
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

/// The payload of `ReadPages`, `DropPages` and `Probe`.
#[must_use]
pub fn encode_count(pages: u32) -> [u8; COUNT_BYTES] {
    pages.to_le_bytes()
}

/// Decodes the payload of `ReadPages`.
///
/// # Errors
///
/// When it asks for no page, or for more than [`RUN_PAGES_MAX`].
pub fn decode_run(payload: &[u8]) -> Result<u32, WireError> {
    let bytes = payload.try_into().map_err(|_| WireError::Payload {
        kind: FrameKind::ReadPages,
    })?;
    match u32::from_le_bytes(bytes) {
        pages @ 1..=RUN_PAGES_MAX => Ok(pages),
        pages => Err(WireError::Run(pages)),
    }
}

/// Decodes the payload of `Probe`.
///
/// # Errors
///
/// When it asks for no byte, or for more than [`PROBE_BYTES_MAX`].
pub fn decode_probe(payload: &[u8]) -> Result<u32, WireError> {
    let bytes = payload.try_into().map_err(|_| WireError::Payload {
        kind: FrameKind::Probe,
    })?;
    match u32::from_le_bytes(bytes) {
        bytes @ 1..=PROBE_BYTES_MAX => Ok(bytes),
        bytes => Err(WireError::Probe(bytes)),
    }
}

/// CRC-32C (RFC 3720, appendix B.4) of header, its checksum field zero, and payload.
fn checksum_of(header: &Header, payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(header.as_bytes()), payload)
}

#[cfg(test)]
mod tests;
