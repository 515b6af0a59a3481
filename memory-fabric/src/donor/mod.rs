//! The side that lends memory.

mod buffers;
mod compute;
mod connection;
mod export;
pub mod loopback;
mod places;
pub mod policy;
pub mod pool;
pub mod rdma;
mod refuse;
pub mod server;
mod session;

pub use compute::{CpuLender, Ending};
pub use places::{CONTROL_SPARE, RESTING_MAX, WAITING_MAX, WAITING_OF_ADDRESS_MAX};

use std::time::Duration;

/// Limit of connections of leases that have a thread each. Control connections that only renew
/// rest, and do not count: see [`RESTING_MAX`].
pub const CONNECTIONS_MAX: usize = 3072;

/// Timeout for the end of a page connection that a new one replaces.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(2);
