//! The home of each page of a VM: one table for the initial memory of the guest and for memory that
//! is added at run time. Pure data: no transport, no thread, no clock.
//!
//! The unit is a block of 2 MiB. [`table`] has a word for each block, which any thread reads
//! without a lock or an allocation. [`plan`] assigns the initial blocks to the nodes, and [`pools`]
//! finds homes for blocks that are added. [`node`] has the ids of the nodes, and [`LocalNode`] the
//! epoch of the table.

mod local;
pub mod node;
pub mod plan;
pub mod pools;
pub mod table;

pub use local::{FIRST_EPOCH, LocalNode};
pub use node::{JOINERS_MAX, NodeId, NodeIds, NodeIdsError};
pub use plan::{CACHE_PAGES_MIN, Loan, LocalUse, Plan, PlanError};
pub use table::{BLOCK_BYTES, BLOCK_PAGES, Eviction, Extent, Home, HomeTable};
