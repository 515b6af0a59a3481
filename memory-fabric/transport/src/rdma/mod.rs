//! Pages by one-sided RDMA READ and WRITE: the adapter of the donor does it, and its processor has
//! no part.
//!
//! The layers over [`fabric_verbs`], each with its file:
//!
//! - [`messages`]: how the two ends agree on a connection;
//! - `connection`: a [`Lane`], a connection ready for READs and WRITEs of one lease;
//! - [`port`]: what a lane is for the transport, and the seam to the link that makes lanes;
//! - `transport`: the [`PageTransport`](super::PageTransport) over a lane, with TCP beside it;
//! - `probe`: the same over a lane alone, for measuring.

mod connection;
pub mod messages;
pub mod port;
pub mod probe;
mod transport;

pub use connection::{Lane, LaneConfig, NewLane};
pub use fabric_verbs::device::Device;
pub use fabric_verbs::device::{DeviceChoice, LinkLayer, PortSummary, summaries, usage};
pub use fabric_verbs::endpoint::RemoteMemory;
pub use fabric_verbs::memory::{Access, MemoryRegion, Paging, ProtectionDomain};
pub use fabric_verbs::pair::QueuePair;
pub use fabric_verbs::queue::CompletionQueue;
pub use fabric_verbs::{RdmaError, device, endpoint, pair, resources};
pub use messages::{ConnectAnswer, ConnectRequest};
pub use port::PageLane;
pub use transport::RdmaTransport;

use std::time::Duration;

/// A lane on which nothing completed for so long is given up, whatever its queue pair says: the
/// adapter's own retries end well before (see [`pair`]).
pub const LANE_STALL_TIMEOUT: Duration = Duration::from_secs(4);
