//! Reliable RDMA connections: libibverbs, loaded at run time, behind types that own what they
//! use. Knows neither pages nor the protocol between VMs and donors.
//!
//! Layers, each with its file:
//!
//! - `abi`: structures and numbers of libibverbs, from rdma-sys; `library`: its functions, loaded at run time;
//! - [`device`]: the adapters of this host, their ports and addresses, and which one leads to a peer;
//! - [`resources`]: quotas of what a device, or this process, has a limited number of;
//! - [`memory`]: protection domains, and memory that adapters may reach; [`staging`]: the buffers of
//!   connections in it; `on_demand`: whether memory need not be pinned for that;
//! - [`queue`]: completion queues, and sleeping until something completes;
//! - [`pair`]: queue pairs of reliable connections, and their states;
//! - [`endpoint`]: what each end has to know of the other;
//! - [`batch`]: requests that are posted together.
//!
//! libibverbs is loaded when it is first used, if the host has it. Without it that ends with
//! [`RdmaError::NoLibrary`]. Without the feature `libibverbs` the types remain, none of their values
//! can exist, and what would make one ends with [`RdmaError::LeftOut`]. Children keep their parents alive: a queue pair its domain and
//! queues, a domain its device.

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
pub mod resources;
pub mod room;
#[cfg(feature = "libibverbs")]
pub mod staging;

#[cfg(not(feature = "libibverbs"))]
pub use absent::{batch, device, memory, pair, queue, staging};
pub use error::RdmaError;
#[cfg(feature = "libibverbs")]
pub(crate) use error::{check, failed};
