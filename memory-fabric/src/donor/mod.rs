//! The side that lends memory.

mod export;
pub mod pool;
mod rdma;
pub mod server;
mod session;
