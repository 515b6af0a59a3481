//! Pages by one-sided RDMA READ and WRITE: the donor's adapter serves them without its CPU.
//!
//! The layers over [`fabric_verbs`], each with its file:
//!
//! - [`messages`]: the exchange of connection parameters;
//! - `connection`: a [`Lane`], a connection for READs and WRITEs of one lease;
//! - [`port`]: the interface of lanes for the transport, and the interface to the link that makes
//!   lanes;
//! - `transport`: the [`PageTransport`](super::PageTransport) over a lane and TCP;
//! - `probe`: a transport over a lane alone, for measurements.

mod connection;
pub mod messages;
pub mod port;
pub mod probe;
mod transport;
mod write_times;

pub use connection::{Lane, LaneConfig, NewLane};
pub use fabric_verbs::device::Device;
pub use fabric_verbs::device::{DeviceChoice, LinkLayer, Mtu, PortSummary, summaries, usage};
pub use fabric_verbs::endpoint::RemoteMemory;
pub use fabric_verbs::memory::{Access, MemoryRegion, Paging, ProtectionDomain};
pub use fabric_verbs::pair::QueuePair;
pub use fabric_verbs::queue::CompletionQueue;
pub use fabric_verbs::settings::{self, Settings, Waiting};
pub use fabric_verbs::{RdmaError, device, endpoint, library_file, pair, resources};
pub use messages::{ConnectAnswer, ConnectRequest};
pub use port::{LaneEnds, PageLane};
pub use transport::RdmaTransport;

use std::time::Duration;

/// Silence after which a lane is closed, regardless of the state of its queue pair: the adapter's
/// own retries end well before (see [`pair`]).
pub const LANE_STALL_TIMEOUT: Duration = Duration::from_secs(4);
