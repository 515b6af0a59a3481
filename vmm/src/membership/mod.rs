//! Membership by etcd: what a node registers, and how a VM chooses among those that did.

pub mod choose;
pub mod listing;
pub mod members;
pub mod record;
mod rests;
mod spares;

pub use members::{Members, MembersError};
pub use ssi_hv_membership::Target;
