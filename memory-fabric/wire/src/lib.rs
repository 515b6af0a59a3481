//! What goes over a TCP connection between a VM and a donor.
//!
//! Every frame is a 40-byte little-endian header and, for some kinds, a payload. The first
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
//! Frames of page connections carry the id of the node that sent them and the [epoch](stamp) of the
//! VM's home table. Those of control connections, which name no page, carry zeroes there.
//!
//! Pages may be [packed](crate::packing). The VM decides: each of its requests for pages says
//! how the answer may be packed at the most, and each page that it writes how it is.

mod error;
mod frame;
mod kind;
mod messages;
pub mod packing;
pub mod stamp;

pub use error::WireError;
pub use frame::{FLAG_CHECKSUM, FLAGS_PACKING, Frame, HEADER_BYTES, MAGIC, PREFIX_BYTES};
pub use kind::FrameKind;
pub use messages::{
    AttachRequest, ErrorMessage, GrantError, LeaseGrant, LeaseRequest, LeaseStatus, Refusal, Token,
    TrafficClass, decode_message, encode_message,
};
pub use stamp::{Attached, Ends, Stamp};

use fabric_pages::page::PAGE_SIZE;
use std::time::Duration;
use zerocopy::little_endian::U32;

/// The protocol's version. Peers of different versions do not talk.
pub const VERSION: u8 = 8;

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

#[cfg(test)]
mod tests;
