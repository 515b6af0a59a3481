//! Reliable RDMA connections: libibverbs, loaded at run time, behind types that own their
//! resources. Has no knowledge of pages or of the protocol between VMs and donors.
//!
//! Layers, each with its file:
//!
//! - `abi`: structures and constants of libibverbs, from rdma-sys; `library`: its functions, loaded
//!   at run time;
//! - [`device`]: the adapters of this host, their ports and addresses, and the selection of one for
//!   a peer;
//! - [`resources`]: quotas of limited resources of a device or of this process;
//! - [`memory`]: protection domains and registered memory; [`staging`]: registered buffers of
//!   connections; `on_demand`: detection of on-demand paging, which avoids pinning;
//! - [`queue`]: completion queues, and sleeping until a request completes;
//! - [`pair`]: queue pairs of reliable connections, and their states;
//! - `removal`: objects of a device that was removed before them;
//! - [`settings`]: what users may set of connections;
//! - [`endpoint`]: the parameters that two ends exchange;
//! - [`batch`]: requests that are posted together.
//!
//! libibverbs is loaded at its first use, if the host has it. Otherwise that use fails with
//! [`RdmaError::NoLibrary`]. Without the feature `libibverbs` the types remain but have no values,
//! and their constructors fail with [`RdmaError::LeftOut`]. Children keep their parents alive: a
//! queue pair its domain and queues, a domain its device.

#[cfg(feature = "libibverbs")]
mod abi;
#[cfg(not(feature = "libibverbs"))]
mod absent;
#[cfg(feature = "libibverbs")]
pub mod batch;
#[cfg(feature = "libibverbs")]
pub mod device;
pub mod endpoint;
mod error;
#[cfg(feature = "libibverbs")]
mod library;
#[cfg(feature = "libibverbs")]
pub mod memory;
#[cfg(feature = "libibverbs")]
mod on_demand;
#[cfg(feature = "libibverbs")]
pub mod pair;
#[cfg(feature = "libibverbs")]
pub mod queue;
#[cfg(feature = "libibverbs")]
mod removal;
pub mod resources;
pub mod room;
pub mod settings;
#[cfg(feature = "libibverbs")]
pub mod staging;

#[cfg(not(feature = "libibverbs"))]
pub use absent::{batch, device, library_file, memory, pair, queue, staging};
pub use error::RdmaError;
#[cfg(feature = "libibverbs")]
pub(crate) use error::{check, failed};
#[cfg(feature = "libibverbs")]
pub use library::library_file;
