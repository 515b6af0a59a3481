//! The local node, and the epoch of its home table.

use super::node::NodeId;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The first epoch of a table. Epoch 0 means that there is no table.
pub const FIRST_EPOCH: u64 = 1;

/// The id of this node, and the epoch of its home table, which grows with each change of a home.
/// Clones share the epoch.
#[derive(Clone, Debug)]
pub struct LocalNode {
    id: NodeId,
    epoch: Arc<AtomicU64>,
}

impl LocalNode {
    /// Creates a node whose table is in its first epoch.
    #[must_use]
    pub fn new(id: NodeId) -> Self {
        Self {
            id,
            epoch: Arc::new(AtomicU64::new(FIRST_EPOCH)),
        }
    }

    /// Returns the id.
    #[must_use]
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Returns the current epoch. It is at least that of every home that the caller has read from
    /// the table.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        // Acquire: pairs with the Release of `advance`.
        self.epoch.load(Ordering::Acquire)
    }

    /// Starts the next epoch.
    pub(crate) fn advance(&self) {
        // Release: pairs with the Acquire of `epoch`.
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

impl From<NodeId> for LocalNode {
    fn from(id: NodeId) -> Self {
        Self::new(id)
    }
}
