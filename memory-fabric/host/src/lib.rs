//! What the memory fabric asks of the host's kernel: memory mappings, waiting, scheduling. Knows
//! neither guests nor networks.

mod mapping;
mod spin;
pub mod turns;

pub use mapping::Mapping;
pub use spin::Spin;

/// Bytes in a page of the host, and of its guests: the base page of x86-64.
pub const PAGE_SIZE: usize = 4096;
