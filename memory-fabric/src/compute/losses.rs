//! What is lost with a node, as parts of the guest's memory.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fabric_coherence::Member;
use fabric_sharing::{Failure, FailureObserver, Losses, PageRanges, SharedMemory};

use super::SharingError;
use crate::extents::Extents;

/// What is lost with a node, as the node that noticed it knows. No page is in two of the lists.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeLosses {
    /// Its directory: the only up-to-date copy was on the lost node, or could have been.
    pub only_copy: Extents,
    /// Of these, whole blocks that the lost node owned, of which it may have used a part.
    pub blocks: u64,
    /// Its directory: on the way between nodes.
    pub in_transit: Extents,
    /// The home of these pages was the lost node, and there is no copy on the node that noticed it.
    pub at_home: Extents,
}

impl NodeLosses {
    fn new(losses: &Losses, memory: &[Range<u64>]) -> Self {
        let extents = |pages: &PageRanges| Extents::new(pages.iter(), memory);
        Self {
            only_copy: extents(&losses.only_copy),
            blocks: losses.blocks.into(),
            in_transit: extents(&losses.in_transit),
            at_home: extents(&losses.at_home),
        }
    }
}

/// What was lost when the memory failed.
#[derive(Debug)]
pub(super) struct Fenced {
    losses: Mutex<Receiver<Losses>>,
    is_asked: Arc<AtomicBool>,
    memory: Vec<Range<u64>>,
}

impl Fenced {
    /// For a guest with memory in these ranges, and what the engine reports its failure to. `failed`
    /// is not called for an end that [`lost_with`](Self::lost_with) asked for.
    pub(super) fn new(
        memory: Vec<Range<u64>>,
        failed: impl FnOnce(SharingError) + Send + 'static,
    ) -> (Self, FailureObserver) {
        // The engine fails once.
        let (sender, losses): (SyncSender<Losses>, _) = sync_channel(1);
        let is_asked = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&is_asked);
        let observer = Box::new(move |failure: Failure, losses: Losses| {
            tracing::debug!(?losses, "the memory that nodes share is lost");
            // Nobody may want to know.
            let _ = sender.send(losses);
            // Acquire: pairs with the Release of who asks.
            if !asked.load(Ordering::Acquire) {
                failed(failure.into());
            }
        });
        let fenced = Self {
            losses: Mutex::new(losses),
            is_asked,
            memory,
        };
        (fenced, observer)
    }

    /// What was lost with a node, if the engine says so within `time`, which it does once.
    pub(super) fn lost_with(
        &self,
        lost: Member,
        shared: &SharedMemory,
        time: Duration,
    ) -> Option<NodeLosses> {
        let losses = self.losses.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_asked.store(true, Ordering::Release);
        shared.fence(lost);
        let losses = losses.recv_timeout(time).ok()?;
        (losses.node == Some(lost)).then(|| NodeLosses::new(&losses, &self.memory))
    }
}
