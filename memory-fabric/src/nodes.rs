//! The other nodes of a VM that lend, and their links: one link for each.
//!
//! Links are indexed: first those of the donors of the guest's start in the order of the
//! configuration, then those for donors that join. Everything that exists once for each link is
//! kept in that order. The home table has the link to each home.

use crate::homes::NodeId;

/// The node of each link.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    all: Box<[NodeId]>,
    /// Number of links of the guest's start.
    fixed: usize,
    /// Whether one more link leads to the replicated memory of all donors of the start.
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

    /// The same for donors that hold replicated memory, which no donor joins.
    pub fn replicated(donors: &[NodeId]) -> Self {
        Self {
            is_replicated: true,
            ..Self::new(donors, &[])
        }
    }

    /// Returns the node of each link to one, in order.
    pub fn all(&self) -> &[NodeId] {
        &self.all
    }

    /// Returns the number of links, including those for donors that can join.
    pub fn links(&self) -> usize {
        self.all.len() + usize::from(self.is_replicated)
    }

    /// Returns the number of donors that can join.
    pub fn joiners(&self) -> usize {
        self.all.len() - self.fixed
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
