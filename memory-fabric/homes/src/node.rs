//! Node ids: values from the configuration, whose order has no meaning.

use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;

/// Limit of donors that have joined a running VM at the same time.
pub const JOINERS_MAX: usize = 8;

/// The id of a node of a VM. It has 8 bits, because the word of a block has room for two ids.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct NodeId(pub u8);

impl NodeId {
    /// Returns the id as an index into a table of all ids.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Number of possible ids.
pub const NODE_IDS: usize = 1 << u8::BITS;

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// The ids of all nodes of a VM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeIds {
    /// The node that this process runs on.
    pub local: NodeId,
    /// The donors of the guest's start, in the order of the configuration.
    pub donors: Vec<NodeId>,
    /// Ids for donors that join at run time, which limit their number.
    pub joiners: Vec<NodeId>,
}

/// Why node ids are invalid.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NodeIdsError {
    /// Two nodes have the same id.
    #[error("{0} is named twice; every node of a VM needs an id of its own")]
    Duplicate(NodeId),
    /// There are fewer ids than donors.
    #[error("{ids} node ids are given for {donors} donors")]
    TooFew {
        /// Number of ids.
        ids: usize,
        /// Number of donors.
        donors: usize,
    },
}

impl NodeIds {
    /// Returns ids for a VM whose configuration has none: 0 for the local node, then `donors`
    /// donors, then [`JOINERS_MAX`] ids for donors that join.
    ///
    /// # Panics
    ///
    /// With more donors than there are ids; the fabric allows far fewer.
    #[must_use]
    pub fn in_order(donors: usize) -> Self {
        let mut ids = (0..=u8::MAX).map(NodeId);
        let mut next = || ids.next().expect("fewer donors than ids");
        Self {
            local: next(),
            donors: (0..donors).map(|_| next()).collect(),
            joiners: (0..JOINERS_MAX).map(|_| next()).collect(),
        }
    }

    /// Checks the ids of a VM with this many donors.
    ///
    /// # Errors
    ///
    /// See [`NodeIdsError`].
    pub fn check(&self, donors: usize) -> Result<(), NodeIdsError> {
        if self.donors.len() < donors {
            let ids = self.donors.len();
            return Err(NodeIdsError::TooFew { ids, donors });
        }
        let all = self.donors.iter().chain(&self.joiners);
        let mut seen = HashSet::from([self.local]);
        match all.copied().find(|&id| !seen.insert(id)) {
            Some(id) => Err(NodeIdsError::Duplicate(id)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_in_order_are_valid() {
        let ids = NodeIds::in_order(3);
        assert_eq!(ids.check(3), Ok(()));
        assert_eq!(ids.donors, [NodeId(1), NodeId(2), NodeId(3)]);
    }

    #[test]
    fn ids_that_are_given_twice_or_for_too_few_donors_are_refused() {
        let mut ids = NodeIds::in_order(2);
        assert_eq!(
            ids.check(3),
            Err(NodeIdsError::TooFew { ids: 2, donors: 3 })
        );
        ids.joiners[1] = NodeId(2);
        assert_eq!(ids.check(2), Err(NodeIdsError::Duplicate(NodeId(2))));
        ids.joiners.clear();
        ids.local = NodeId(1);
        assert_eq!(ids.check(2), Err(NodeIdsError::Duplicate(NodeId(1))));
    }
}
