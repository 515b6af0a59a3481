//! The protocol between a VM and a donor over a TCP connection.
//!
//! Every frame is a 40-byte little-endian header and, for some kinds, a payload. The first frame on
//! a connection determines its purpose:
//!
//! | first frame | connection | then |
//! |---|---|---|
//! | `Lease` | control | `Renew`..., `Release` |
//! | `Resume` | control, after a break | as above |
//! | `Attach` | pages, of one class | `ReadPage`, `ReadPages`, `ReadPiece`, `WritePage`, `WritePiece`, `DropPages`, `Fence`, pipelined; `Probe` on one for measuring |
//! | `Compute` | vCPUs of a VM on the node, as long as the VM runs | `ComputeLease`, `ComputeTable` |
//! | `ReadClock` | compares the clocks of two hosts before a VM starts on them | `ReadClock`... |
//! | `Connect` | sets up RDMA for a class | nothing: its end is the end of the RDMA connection |
//!
//! Requests have an id, which the answer repeats. Our donor answers in the order of the requests on
//! a connection, but a client must not rely on it. A peer that violates the protocol gets an
//! `Error` frame, if possible, and is disconnected.
//!
//! Frames of page connections carry the id of the sending node and the [epoch](stamp) of the VM's
//! home table. Those of control connections, which name no page, carry zeroes there.
//!
//! Pages may be [packed](crate::packing). The VM decides: each request for pages has the most
//! compact packing allowed in the answer, and each written page has its own packing.

mod compute;
mod error;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod kind;
mod messages;
pub mod packing;
pub mod stamp;

pub use compute::{
    AUTHORITIES_BYTES_MAX, AUTHORITIES_MAX, AUTHORITY_BYTES_MAX, COMPUTE_NODES_MAX,
    COMPUTE_REASON_BYTES_MAX, ClockRate, ComputeAuthority, ComputeEnd, ComputeLease,
    ComputeLeaseError, ComputeMember, ComputePorts, ComputeRequest, ComputeRequestError,
    ComputeTable, NodeClock, VmSecret,
};
pub use error::WireError;
pub use frame::{FLAG_CHECKSUM, FLAGS_PACKING, Frame, HEADER_BYTES, MAGIC, PREFIX_BYTES};
pub use kind::FrameKind;
pub use messages::{
    AttachRequest, DelegateRequest, ErrorMessage, GrantError, LeaseGrant, LeaseRequest,
    LeaseStatus, Refusal, Token, TrafficClass, decode_message, encode_message,
};
pub use stamp::{Attached, Ends, Stamp};

use fabric_pages::page::PAGE_SIZE;
use std::time::Duration;
use zerocopy::little_endian::U32;

/// The protocol's version. Peers of different versions cannot communicate.
pub const VERSION: u8 = 14;

/// Longest payload of a control frame, bytes: fits every message with its longest strings.
pub const CONTROL_BYTES_MAX: usize = 2048;

/// Payload of a frame that names several pages, bytes: their little-endian number.
pub const COUNT_BYTES: usize = size_of::<U32>();

/// Limit of pages of one [`FrameKind::DropPages`] frame, which bounds the delay of requests behind
/// it. 32 MiB.
pub const DROP_PAGES_MAX: u32 = 8192;

/// Limit of pages of one [`FrameKind::ReadPages`]. Longer runs save no overhead, and the first page
/// of a run can be used only when the last has arrived.
pub const RUN_PAGES_MAX: u32 = 64;

/// Longest payload of any frame except [`FrameKind::ProbeData`], bytes: the longest run of pages.
pub const PAYLOAD_BYTES_MAX: usize = RUN_PAGES_MAX as usize * PAGE_SIZE;

/// Pieces are multiples of this many bytes: an eighth of a page.
pub const PIECE_BYTES: usize = PAGE_SIZE / 8;

/// Limit of bytes of one [`FrameKind::WritePiece`]: half a page.
pub const PIECE_BYTES_MAX: usize = PAGE_SIZE / 2;

/// Limit of bytes of one [`FrameKind::ReadPiece`]: pieces of the longest run of pages.
pub const PIECES_BYTES_MAX: usize = RUN_PAGES_MAX as usize * PIECE_BYTES_MAX;

/// Limit of bytes of one [`FrameKind::Probe`]: longer ones reveal nothing further about a link.
/// Only measuring connections have buffers of this size.
pub const PROBE_BYTES_MAX: u32 = 1 << 20;

/// How long a lease continues at least after the VM's side closed its control connection without a
/// release, as the end of a killed process does. A running VM renews several times in that period,
/// detects the closed connection, and resumes the lease on another. From then on the memory is for
/// whoever needs it, and else kept for [`orphan_time`].
pub const ORPHAN_TIME: Duration = Duration::from_secs(10);

/// What a lease lasts longer than twice the time for which its VM waits for the node.
const LEASE_MARGIN: Duration = Duration::from_secs(10);

/// Returns the duration of the lease of a VM that waits for `grace` for the node: long enough that a
/// node which is only cut off still has the memory when the VM has waited for all of that.
#[must_use]
pub fn lease_duration(grace: Duration) -> Duration {
    grace * 2 + LEASE_MARGIN
}

/// Returns how long a lease of this duration continues after the VM's side closed its control
/// connection: a VM that lives waits so long for the node, whoever has closed it.
#[must_use]
pub fn orphan_time(duration: Duration) -> Duration {
    let grace = duration.saturating_sub(LEASE_MARGIN) / 2;
    grace.max(ORPHAN_TIME).min(duration)
}

/// Shortest lease, milliseconds: with less, one lost packet would end it.
pub const LEASE_DURATION_MS_MIN: u32 = 1000;

/// Longest interval of a VM's renewals, for leases of any duration.
pub const RENEWAL_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// Longest name of a VM, bytes.
pub const VM_NAME_BYTES_MAX: usize = 64;

/// Longest name of a cluster or of a member in it, bytes.
pub const MEMBER_NAME_BYTES_MAX: usize = 63;

/// Encodes the payload of `ReadPages`, `ReadPiece`, `DropPages` and `Probe`.
#[must_use]
pub fn encode_count(pages: u32) -> [u8; COUNT_BYTES] {
    pages.to_le_bytes()
}

/// Decodes the payload of `ReadPages`.
///
/// # Errors
///
/// Fails on zero pages, or more than [`RUN_PAGES_MAX`].
pub fn decode_run(payload: &[u8]) -> Result<u32, WireError> {
    let bytes = payload.try_into().map_err(|_| WireError::Payload {
        kind: FrameKind::ReadPages,
    })?;
    match u32::from_le_bytes(bytes) {
        pages @ 1..=RUN_PAGES_MAX => Ok(pages),
        pages => Err(WireError::Run(pages)),
    }
}

/// Decodes the payload of `ReadPiece`.
///
/// # Errors
///
/// Fails on what is not a multiple of [`PIECE_BYTES`], zero bytes, or more than
/// [`PIECES_BYTES_MAX`].
pub fn decode_pieces(payload: &[u8]) -> Result<u32, WireError> {
    let bytes = payload.try_into().map_err(|_| WireError::Payload {
        kind: FrameKind::ReadPiece,
    })?;
    let bytes = u32::from_le_bytes(bytes);
    match usize::try_from(bytes) {
        Ok(length @ PIECE_BYTES..=PIECES_BYTES_MAX) if length.is_multiple_of(PIECE_BYTES) => {
            Ok(bytes)
        }
        _ => Err(WireError::Pieces(bytes)),
    }
}

/// Decodes the payload of `Probe`.
///
/// # Errors
///
/// Fails on zero bytes, or more than [`PROBE_BYTES_MAX`].
pub fn decode_probe(payload: &[u8]) -> Result<u32, WireError> {
    let bytes = payload.try_into().map_err(|_| WireError::Payload {
        kind: FrameKind::Probe,
    })?;
    match u32::from_le_bytes(bytes) {
        bytes @ 1..=PROBE_BYTES_MAX => Ok(bytes),
        bytes => Err(WireError::Probe(bytes)),
    }
}

#[cfg(test)]
mod tests;
