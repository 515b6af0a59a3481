//! Where each page of a VM is at home: one table for the memory that the guest starts with and for
//! the memory that is added while it runs. Pure data: no transport, no thread, no clock.
//!
//! The unit is a block of 2 MiB. [`table`] has a word for each block, which any thread reads
//! without a lock or an allocation. [`plan`] assigns the blocks of a guest's start to the nodes,
//! and [`pools`] finds places for blocks that are added. [`node`] has the ids of the nodes, and
//! [`LocalNode`] the epoch of the table.

mod local;
pub mod node;
pub mod plan;
pub mod pools;
pub mod table;

pub use local::{FIRST_EPOCH, LocalNode};
pub use node::{JOINERS_MAX, NodeId, NodeIds, NodeIdsError};
pub use plan::{CACHE_PAGES_MIN, GuestPages, Loan, LocalUse, Plan, PlanError};
pub use table::{BLOCK_BYTES, BLOCK_PAGES, Eviction, Extent, Home, HomeTable};
