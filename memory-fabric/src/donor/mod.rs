//! The side that lends memory.

mod connection;
mod export;
pub mod loopback;
pub mod pool;
pub mod rdma;
pub mod server;
mod session;
