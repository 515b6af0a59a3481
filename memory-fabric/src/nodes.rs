//! The nodes of a VM and their links: one link for each other node that lends.
//!
//! Links are indexed: first those of the donors of the guest's start in the order of the
//! configuration, then those for donors that join. Everything that exists once for each link is
//! kept in that order.

use crate::homes::{Home, NodeId};

/// The value of [`Nodes::places`] for ids without a link.
const NO_LINK: u8 = u8::MAX;

/// The local node, and the index of the link to each other node.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    local: NodeId,
    /// The node of each link.
    links: Box<[NodeId]>,
    /// Number of links of the guest's start.
    fixed: usize,
    /// The index of the link to each id.
    places: Box<[u8]>,
}

impl Nodes {
    /// Creates the table from the local node, the donors of the guest's start, and the ids for
    /// donors that join, which are all different.
    pub fn new(local: NodeId, donors: &[NodeId], joiners: &[NodeId]) -> Self {
        let links = [donors, joiners].concat();
        let mut places = vec![NO_LINK; usize::from(u8::MAX) + 1].into_boxed_slice();
        for (place, node) in (0..NO_LINK).zip(&links) {
            places[node.index()] = place;
        }
        Self {
            local,
            links: links.into(),
            fixed: donors.len(),
            places,
        }
    }

    /// Returns the node that this process runs on.
    pub fn local(&self) -> NodeId {
        self.local
    }

    /// Returns the number of links, including those for donors that can join.
    pub fn links(&self) -> usize {
        self.links.len()
    }

    /// Returns the number of links of the guest's start.
    pub fn fixed(&self) -> usize {
        self.fixed
    }

    /// Returns the node of a link.
    pub fn node_at(&self, link: usize) -> NodeId {
        self.links[link]
    }

    /// Returns the index of the link to a node; `None` without a link, as for the local node.
    pub fn link_to(&self, node: NodeId) -> Option<usize> {
        let place = self.places[node.index()];
        (place != NO_LINK).then_some(place.into())
    }

    /// The place of the link to a home on another node.
    pub fn link_to_home(&self, home: Home) -> usize {
        let link = self.link_to(home.node);
        link.expect("every node that is a home is the local one, or has a link")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_by_the_ids_that_the_configuration_gives() {
        let nodes = Nodes::new(NodeId(5), &[NodeId(200), NodeId(0)], &[NodeId(3)]);
        assert_eq!((nodes.links(), nodes.fixed()), (3, 2));
        for (place, id) in [200, 0, 3].into_iter().enumerate() {
            assert_eq!(nodes.link_to(NodeId(id)), Some(place));
            assert_eq!(nodes.node_at(place), NodeId(id));
        }
        assert_eq!(nodes.link_to(nodes.local()), None);
        assert_eq!(nodes.link_to(NodeId(255)), None);
    }
}
