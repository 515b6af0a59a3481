//! The progress of moves of memory: off a donor that is drained, or to donors that have less than
//! their share.

use crate::homes::NodeId;
use crate::pager::relocate::MoveProgress;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::time::Duration;

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
    /// Bytes of each of them there.
    pub block_bytes: u64,
    pub progress: Arc<MoveProgress>,
    pub state: DrainState,
}

/// Why blocks stay of which a page does not open.
pub(crate) const UNREADABLE: &str = "pages were sent with other bytes than were written back last, so \
                                     their blocks stay until the guest has used or freed them";

impl Drain {
    pub fn is_over(&self) -> bool {
        self.state.is_over()
    }

    pub fn summary(&self) -> DrainSummary {
        DrainSummary {
            node: self.node,
            bytes: u64::from(self.blocks) * self.block_bytes,
            moved_bytes: u64::from(self.progress.moved()) * self.block_bytes,
            state: self.state.clone(),
        }
    }
}

/// State of a rebalancing.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum RebalanceState {
    /// Memory moves.
    Moving,
    /// All have moved.
    Done,
    /// It was stopped; the rest stays where it was.
    Stopped,
    /// Some could not move.
    Failed(String),
}

impl RebalanceState {
    /// That of one for whose end no thread can wait.
    pub(crate) fn without_thread(error: &std::io::Error) -> Self {
        Self::Failed(format!("there was no thread for it: {error}"))
    }
}

/// The last rebalancing of a VM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RebalanceSummary {
    /// Bytes at donors that were to move.
    pub bytes: u64,
    /// Bytes that have moved.
    pub moved_bytes: u64,
    /// State.
    pub state: RebalanceState,
}

impl RebalanceSummary {
    /// Returns whether it has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state != RebalanceState::Moving
    }
}

/// A rebalancing, as the state has it.
#[derive(Clone, Debug)]
pub(crate) struct Rebalance {
    pub copies: u32,
    /// Bytes of a copy of a block, or of a piece of it.
    pub copy_bytes: u64,
    pub progress: Arc<MoveProgress>,
    pub state: RebalanceState,
    /// Whether it was asked to end.
    pub is_stopped: bool,
}

impl Rebalance {
    pub fn is_over(&self) -> bool {
        self.state != RebalanceState::Moving
    }

    pub fn summary(&self) -> RebalanceSummary {
        RebalanceSummary {
            bytes: u64::from(self.copies) * self.copy_bytes,
            moved_bytes: u64::from(self.progress.moved()) * self.copy_bytes,
            state: self.state.clone(),
        }
    }
}

/// The last moves of each kind, if any.
#[derive(Debug, Default)]
pub(crate) struct LastMoves {
    pub drain: RwLock<Option<Drain>>,
    pub rebalance: RwLock<Option<Rebalance>>,
    pub heat: HeatMoves,
}

/// Blocks that move because of their heat.
#[derive(Debug, Default)]
pub(crate) struct HeatMoves {
    /// Those that move now.
    current: Mutex<Option<Arc<MoveProgress>>>,
    ended: Condvar,
    /// Number of those that moved before.
    moved: AtomicU64,
    /// Others that are to move blocks now.
    others: AtomicUsize,
}

/// While this lives, no blocks begin to move because of their heat.
#[derive(Debug)]
pub(crate) struct Instead<'a>(&'a HeatMoves);

impl Drop for Instead<'_> {
    fn drop(&mut self) {
        // Relaxed: see `may_begin`.
        self.0.others.fetch_sub(1, Ordering::Relaxed);
    }
}

impl HeatMoves {
    /// Lets none begin for now.
    pub fn instead(&self) -> Instead<'_> {
        // Relaxed: see `may_begin`.
        self.others.fetch_add(1, Ordering::Relaxed);
        Instead(self)
    }

    /// Returns whether moves may begin, under the lock of the fabric's state.
    pub fn may_begin(&self) -> bool {
        self.others.load(Ordering::Relaxed) == 0
    }

    pub fn begin(&self, progress: &Arc<MoveProgress>) {
        *fabric_host::lock(&self.current) = Some(Arc::clone(progress));
    }

    /// They have ended, and so many have moved.
    pub fn end(&self, moved: u32) {
        let mut current = fabric_host::lock(&self.current);
        *current = None;
        self.ended.notify_all();
        // Relaxed: a number for reports.
        self.moved.fetch_add(moved.into(), Ordering::Relaxed);
    }

    pub fn are_moving(&self) -> bool {
        fabric_host::lock(&self.current).is_some()
    }

    /// Has them end after the block that is moving, and waits for that, at most for so long.
    pub fn stop(&self, wait_max: Duration) {
        let current = fabric_host::lock(&self.current);
        if let Some(progress) = &*current {
            progress.stop();
        }
        // Who waited too long finds out that they still move.
        let _ = self
            .ended
            .wait_timeout_while(current, wait_max, |current| current.is_some());
    }

    /// Returns how many have moved so far.
    pub fn moved(&self) -> u64 {
        let current = fabric_host::lock(&self.current);
        let now = current.as_ref().map_or(0, |progress| progress.moved());
        self.moved.load(Ordering::Relaxed) + u64::from(now)
    }
}
