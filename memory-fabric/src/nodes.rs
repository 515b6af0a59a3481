//! The other nodes of a VM that lend, and their links: one link for each.
//!
//! Links are indexed: first those of the donors of the guest's start in the order of the
//! configuration, then those for donors that join. Everything that exists once for each link is
//! kept in that order. The home table has the link to each home.

use crate::homes::NodeId;
use std::ops::Range;

/// The node of each link.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    all: Box<[NodeId]>,
    /// Number of links of the guest's start.
    fixed: usize,
    /// Whether one more link leads to the replicated memory of all donors.
    is_replicated: bool,
}

impl Nodes {
    /// Creates the list from the donors of the guest's start and the ids for donors that join,
    /// which are all different.
    pub fn new(donors: &[NodeId], joiners: &[NodeId]) -> Self {
        Self {
            all: [donors, joiners].concat().into(),
            fixed: donors.len(),
            is_replicated: false,
        }
    }

    /// The same for donors that hold replicated memory: as many can join as it can have besides.
    pub fn replicated(donors: &[NodeId], joiners: &[NodeId]) -> Self {
        let room = fabric_replicas::DONORS_MAX.saturating_sub(donors.len());
        Self {
            is_replicated: true,
            ..Self::new(donors, &joiners[..joiners.len().min(room)])
        }
    }

    /// Returns the node of each link to one, in order.
    pub fn all(&self) -> &[NodeId] {
        &self.all
    }

    /// Returns the number of links, including those for donors that can join, and to replicated
    /// memory, which is the last one.
    pub fn links(&self) -> usize {
        self.all.len() + usize::from(self.is_replicated)
    }

    /// Returns the number of donors that can join.
    pub fn joiners(&self) -> usize {
        self.all.len() - self.fixed
    }

    /// Returns the links to donors that can join.
    pub fn joiner_links(&self) -> Range<usize> {
        self.fixed..self.all.len()
    }

    /// Returns the link to a node.
    pub fn link_to(&self, node: NodeId) -> Option<usize> {
        self.all.iter().position(|&other| other == node)
    }

    /// Returns the number of links of the guest's start.
    pub fn fixed(&self) -> usize {
        self.fixed
    }

    /// Returns the node of a link.
    pub fn node_at(&self, link: usize) -> NodeId {
        self.all[link]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicated_memory_has_the_last_link_and_no_more_donors_than_it_can_have() {
        let ids: Vec<NodeId> = (0..80).map(NodeId).collect();
        let nodes = Nodes::replicated(&ids[..2], &ids[2..10]);
        assert_eq!((nodes.joiner_links(), nodes.links()), (2..10, 11));
        let most = fabric_replicas::DONORS_MAX;
        let nodes = Nodes::replicated(&ids[..most - 3], &ids[most - 3..most + 5]);
        assert_eq!((nodes.all().len(), nodes.joiners()), (most, 3));
    }
}
