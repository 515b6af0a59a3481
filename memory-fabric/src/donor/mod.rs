//! The side that lends memory.

mod export;
pub mod pool;
pub mod rdma;
pub mod server;
mod session;
