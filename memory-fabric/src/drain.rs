//! The progress of a drain: a donor whose memory moves to others.

use crate::homes::{BLOCK_BYTES, NodeId};
use crate::pager::relocate::MoveProgress;
use std::sync::Arc;

/// State of a drain.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DrainState {
    /// Blocks move.
    Moving,
    /// All have moved; requests to the donor are being answered, and its lease ends.
    Leaving,
    /// The donor has left: it holds nothing.
    Done,
    /// Some blocks stayed, and the donor with them.
    Failed(String),
}

impl DrainState {
    /// Returns whether nothing changes any more.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self, Self::Done | Self::Failed(_))
    }
}

/// The last drain of a VM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DrainSummary {
    /// The donor.
    pub node: NodeId,
    /// Bytes of guest memory that it held.
    pub bytes: u64,
    /// Bytes that have moved.
    pub moved_bytes: u64,
    /// State.
    pub state: DrainState,
}

impl DrainSummary {
    /// Returns whether it has ended.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.state.is_over()
    }
}

/// A drain, as the state has it.
#[derive(Clone, Debug)]
pub(crate) struct Drain {
    pub node: NodeId,
    pub blocks: u32,
    pub progress: Arc<MoveProgress>,
    pub state: DrainState,
}

impl Drain {
    pub fn is_over(&self) -> bool {
        self.state.is_over()
    }

    pub fn summary(&self) -> DrainSummary {
        DrainSummary {
            node: self.node,
            bytes: u64::from(self.blocks) * BLOCK_BYTES,
            moved_bytes: u64::from(self.progress.moved()) * BLOCK_BYTES,
            state: self.state.clone(),
        }
    }
}
