//! What is wrong with a frame.

use crate::packing::UnpackError;
use crate::{FrameKind, PROBE_BYTES_MAX, RUN_PAGES_MAX, VERSION};
use fabric_homes::NodeId;

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
    /// A frame of another node than the one at the other end of the connection.
    #[error("{kind:?} frame of {found}, the connection is that of {expected}")]
    Sender {
        /// The frame's kind.
        kind: FrameKind,
        /// The node that it names.
        found: NodeId,
        /// The node at the other end.
        expected: NodeId,
    },
    /// A request from before the epoch in which its connection was made.
    #[error("{kind:?} frame of epoch {found}, which is older than {current}, its connection's")]
    StaleEpoch {
        /// The frame's kind.
        kind: FrameKind,
        /// The epoch that it names.
        found: u64,
        /// That of the connection.
        current: u64,
    },
    /// An answer that names another epoch than its request.
    #[error("{kind:?} frame of epoch {found} answers a request of epoch {asked}")]
    AnswerEpoch {
        /// The frame's kind.
        kind: FrameKind,
        /// The epoch that it names.
        found: u64,
        /// That of the request.
        asked: u64,
    },
    /// An answer to no request.
    #[error("{kind:?} frame answers request {request:#x}, which is not outstanding")]
    Unasked {
        /// The frame's kind.
        kind: FrameKind,
        /// The id it repeats.
        request: u64,
    },
}
