//! The directory protocol of coherent memory: `(state, message) -> (state, actions)`.
//!
//! Several compute nodes share the memory of one VM. Each page has one writer or many readers. This
//! crate decides who; it has no socket, clock or thread, so that small worlds of it can be explored
//! state by state and large ones simulated. `docs/coherence.md` has the principles, the tables and
//! what is proven.
//!
//! - [`members`]: the compute nodes, at most 16, and sets of them;
//! - [`message`]: what nodes send each other, and on which lane;
//! - [`lanes`]: what arrives from a peer: once, in order, of this epoch;
//! - [`directory`]: who has which block and page;
//! - [`cache`]: what one node has of them;
//! - [`merge`]: tables that several nodes may write at once;
//! - [`token`]: the starvation token;
//! - [`progress`]: whether the accesses of a node progress, and how long it holds what they need;
//! - [`action`]: what the caller has to do, in which order;
//! - [`offence`]: what a peer did that a correct peer never does.
//!
//! The caller passes messages and events to [`directory::Directory`] and [`cache::Cache`], which push
//! actions to a [`action::Sink`] of the caller. No call allocates, except when a block is granted,
//! split or merged.

pub mod action;
pub mod cache;
pub mod directory;
pub mod lanes;
pub mod members;
pub mod merge;
pub mod message;
#[cfg(test)]
mod model;
mod mutation;
pub mod offence;
pub mod progress;
pub mod token;

pub use action::{Bytes, CacheAction, DirectoryAction, LocalPage, Sink};
pub use cache::{Cache, Evict, Touch, Written};
pub use directory::{Directory, Loss};
pub use members::{Member, MemberSet, Members, MembersError};
pub use message::{BlockIndex, Lane, Message, Number, Role};
pub use offence::{Offence, Violation};
pub use progress::{GATHERING_MEMBERS_MAX, Need, Over, Progress};
