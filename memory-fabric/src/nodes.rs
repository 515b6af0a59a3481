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
}

impl Nodes {
    /// Creates the list from the donors of the guest's start and the ids for donors that join,
    /// which are all different.
    pub fn new(donors: &[NodeId], joiners: &[NodeId]) -> Self {
        Self {
            all: [donors, joiners].concat().into(),
            fixed: donors.len(),
        }
    }

    /// Returns the node of each link, in order.
    pub fn all(&self) -> &[NodeId] {
        &self.all
    }

    /// Returns the number of links, including those for donors that can join.
    pub fn links(&self) -> usize {
        self.all.len()
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
