//! The side that lends memory.

pub mod pool;
pub mod server;
mod session;
