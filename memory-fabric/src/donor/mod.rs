//! The side that lends memory.

mod compute;
mod connection;
mod export;
pub mod loopback;
pub mod policy;
pub mod pool;
pub mod rdma;
mod refuse;
pub mod server;
mod session;

pub use compute::CpuLender;

use std::time::Duration;

/// Limit of connections; each has a thread.
pub const CONNECTIONS_MAX: usize = 1024;

/// Timeout for the end of a page connection that a new one replaces.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(2);
