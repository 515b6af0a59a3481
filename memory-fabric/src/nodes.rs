//! The nodes of a VM as the local one reaches them: a link leads to each other node that lends.
//!
//! Links have places: those of the donors of the guest's start in the order of the
//! configuration, then those for donors that join. Whatever exists once for each link is kept
//! in that order.

use crate::homes::NodeId;

/// The value of [`Nodes::places`] for ids without a link.
const NO_LINK: u8 = u8::MAX;

/// Which node is the local one, and which place the link to each other node has.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    local: NodeId,
    /// The node that each link leads to.
    links: Box<[NodeId]>,
    /// Links of the guest's start.
    fixed: usize,
    /// The place of the link to each id.
    places: Box<[u8]>,
}

impl Nodes {
    /// The local node, donors of the guest's start, and ids for donors that join. No two are the
    /// same.
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

    /// The node that this process runs on.
    pub fn local(&self) -> NodeId {
        self.local
    }

    /// Places of links, those for donors that can join included.
    pub fn links(&self) -> usize {
        self.links.len()
    }

    /// Links of the guest's start.
    pub fn fixed(&self) -> usize {
        self.fixed
    }

    /// The node that a link leads to.
    pub fn node_at(&self, link: usize) -> NodeId {
        self.links[link]
    }

    /// The place of the link to a node; `None` where there is none, as for the local node.
    pub fn link_to(&self, node: NodeId) -> Option<usize> {
        let place = self.places[node.index()];
        (place != NO_LINK).then_some(place.into())
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
