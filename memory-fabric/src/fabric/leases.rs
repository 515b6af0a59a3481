//! The leases of a guest's start, and the RDMA connections that use them.

use crate::link::Link;
use crate::link::rdma::RdmaLink;
use crate::wire::LeaseStatus;
use std::sync::{Arc, Mutex};

#[derive(Debug, Default)]
struct Held {
    /// Dropped before the links, whose leases they use.
    rdma_links: Vec<Option<RdmaLink>>,
    links: Vec<Option<Link>>,
}

/// The leases of a guest's start, in the order of the links. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Leases(Arc<Mutex<Held>>);

impl Leases {
    pub fn new(rdma_links: Vec<Option<RdmaLink>>, links: Vec<Link>) -> Self {
        let links = links.into_iter().map(Some).collect();
        Self(Arc::new(Mutex::new(Held { rdma_links, links })))
    }

    /// Returns whether a lease is held.
    pub fn has(&self, link: usize) -> bool {
        let held = fabric_host::lock(&self.0);
        held.links.get(link).is_some_and(Option::is_some)
    }

    /// Returns the size of a lease.
    pub fn bytes(&self, link: usize) -> u64 {
        let held = fabric_host::lock(&self.0);
        let link = held.links.get(link).and_then(Option::as_ref);
        link.map_or(0, Link::bytes)
    }

    /// Ends a lease whose memory is not used any more. Returns the donor's counters; `None` when it
    /// has ended before.
    pub fn release(&self, link: usize) -> Option<LeaseStatus> {
        let (rdma_link, link) = {
            let mut held = fabric_host::lock(&self.0);
            let rdma_link = held.rdma_links.get_mut(link).and_then(Option::take);
            (rdma_link, held.links.get_mut(link)?.take()?)
        };
        // Before the lease ends.
        drop(rdma_link);
        Some(link.release())
    }

    /// Ends all RDMA connections.
    pub fn end_rdma(&self) {
        let rdma_links = std::mem::take(&mut fabric_host::lock(&self.0).rdma_links);
        drop(rdma_links);
    }

    /// Takes the links out, to be released.
    pub fn take_links(&self) -> Vec<Option<Link>> {
        std::mem::take(&mut fabric_host::lock(&self.0).links)
    }
}

/// Ends the leases when it is dropped, although clones of [`Leases`] live on.
#[derive(Debug)]
pub(super) struct LeasesHeld(pub Leases);

impl Drop for LeasesHeld {
    fn drop(&mut self) {
        self.0.end_rdma();
        let mut links = self.0.take_links();
        links.iter_mut().flatten().for_each(Link::begin_release);
    }
}
