//! Errors of frames.

use crate::packing::UnpackError;
use crate::{FrameKind, PIECE_BYTES, PIECES_BYTES_MAX, PROBE_BYTES_MAX, RUN_PAGES_MAX, VERSION};
use fabric_homes::NodeId;

/// A frame that breaks the protocol.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum WireError {
    /// It is not this protocol.
    #[error("frame starts with {0:02x?}, not with \"SV\": the peer is not an ssi-hv node")]
    Magic([u8; 2]),
    /// It is another version of the protocol.
    #[error(
        "peer speaks version {theirs} of the protocol, this one {VERSION}; use the same release of ssi-hv on both hosts"
    )]
    Version {
        /// The peer's version.
        theirs: u8,
    },
    /// The kind is unknown.
    #[error("frame of unknown kind {0}")]
    Kind(u8),
    /// The length is invalid for the kind.
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
    /// The run of pages has an invalid length.
    #[error("a run of {0} pages is asked, 1 to {RUN_PAGES_MAX} are allowed")]
    Run(u32),
    /// The piece has an invalid length.
    #[error(
        "a piece of {0} bytes is asked, multiples of {PIECE_BYTES} up to {PIECES_BYTES_MAX} are allowed"
    )]
    Pieces(u32),
    /// The probe has an invalid length.
    #[error("a probe of {0} bytes is asked, 1 to {PROBE_BYTES_MAX} are allowed")]
    Probe(u32),
    /// The packing flags are invalid, or the kind has no pages.
    #[error("{kind:?} frame with flags {flags:#06x}, whose packing is not allowed")]
    Packing {
        /// The frame's kind.
        kind: FrameKind,
        /// Its flags.
        flags: u16,
    },
    /// Packed pages are invalid.
    #[error("{kind:?} frame whose packed pages are wrong: {cause}")]
    Unpack {
        /// The frame's kind.
        kind: FrameKind,
        /// The cause.
        cause: UnpackError,
    },
    /// The frame is damaged.
    #[error(
        "{kind:?} frame {request:#x} has checksum {found:#010x}, its bytes give {computed:#010x}"
    )]
    Checksum {
        /// The frame's kind.
        kind: FrameKind,
        /// Its request id.
        request: u64,
        /// The checksum in the frame.
        found: u32,
        /// The computed checksum.
        computed: u32,
    },
    /// The payload of a control frame does not match its kind.
    #[error("{kind:?} frame whose payload cannot be decoded")]
    Payload {
        /// The frame's kind.
        kind: FrameKind,
    },
    /// The kind is not allowed at this point.
    #[error("unexpected {0:?} frame")]
    Unexpected(FrameKind),
    /// The frame names another node than the peer.
    #[error("{kind:?} frame of {found}, the connection is that of {expected}")]
    Sender {
        /// The frame's kind.
        kind: FrameKind,
        /// The node in the frame.
        found: NodeId,
        /// The peer.
        expected: NodeId,
    },
    /// A request is older than the epoch in which its connection was made.
    #[error("{kind:?} frame of epoch {found}, which is older than {current}, its connection's")]
    StaleEpoch {
        /// The frame's kind.
        kind: FrameKind,
        /// The epoch in the frame.
        found: u64,
        /// The epoch of the connection.
        current: u64,
    },
    /// An answer has another epoch than its request.
    #[error("{kind:?} frame of epoch {found} answers a request of epoch {asked}")]
    AnswerEpoch {
        /// The frame's kind.
        kind: FrameKind,
        /// The epoch in the answer.
        found: u64,
        /// The epoch of the request.
        asked: u64,
    },
    /// An answer matches no request.
    #[error("{kind:?} frame answers request {request:#x}, which is not outstanding")]
    Unasked {
        /// The frame's kind.
        kind: FrameKind,
        /// The request id in the answer.
        request: u64,
    },
}
