//! The side that lends memory.

mod connection;
mod export;
pub mod loopback;
pub mod pool;
pub mod rdma;
mod refuse;
pub mod server;
mod session;

use std::time::Duration;

/// Most connections at once; each has a thread.
pub const CONNECTIONS_MAX: usize = 1024;

/// How long a new page connection waits for the one it replaces to end.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(2);
