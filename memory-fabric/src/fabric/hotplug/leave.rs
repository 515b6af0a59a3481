//! A donor leaves, when nothing of it is needed any more or it is lost.

use super::super::FabricEvent;
use super::super::adapt::Change;
use super::{Inner, node_of};
use crate::link::rdma::RdmaLink;
use crate::link::{Link, LinkEvent};
use std::sync::{Arc, PoisonError};

impl Inner {
    /// Sees off donors of which nothing is needed any more.
    pub(super) fn see_off_idle(self: &Arc<Self>) {
        let idle = {
            let state = self.lock();
            if state.joining {
                Vec::new()
            } else {
                state.pools.idle()
            }
        };
        for donor in idle {
            self.see_off(donor);
        }
    }

    /// A donor of which nothing is plugged leaves, on a thread that takes the time for it.
    pub(super) fn see_off(self: &Arc<Self>, donor: usize) {
        let mut state = self.lock();
        if !state.pools.leave(donor) {
            return;
        }
        let Some(links) = state.joiners[donor - self.fixed].links.take() else {
            return;
        };
        state.leaving.retain(|thread| !thread.is_finished());
        let inner = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name(format!("leave-{}", donor + 1))
            .spawn(move || inner.end(donor, links));
        match thread {
            Ok(thread) => state.leaving.push(thread),
            // The lease ends with the links, which were dropped with the closure.
            Err(error) => tracing::warn!(%error, "no thread to see a donor off"),
        }
    }

    fn end(&self, donor: usize, (link, rdma_links): (Link, Vec<RdmaLink>)) {
        let node = node_of(donor);
        self.vacate(donor);
        self.shared.policies.join(donor, None);
        let _ = self.adapter.try_send(Change::Forget(node));
        // Before the lease ends.
        drop(rdma_links);
        let address = link.address();
        self.note_end(donor, link);
        let told = {
            let mut state = self.lock();
            let joiner = &mut state.joiners[donor - self.fixed];
            joiner.taken = false;
            std::mem::take(&mut joiner.told)
        };
        if told {
            (self.observer)(FabricEvent::Link(LinkEvent::Up { node }));
        }
        tracing::info!("donor {address} ({node}) has left: nothing of it is plugged any more");
    }

    /// Ends a lease, and keeps what the donor counted.
    pub(super) fn note_end(&self, donor: usize, link: Link) {
        let own_count = link.release();
        let mut lenders = self.lenders.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(lent_by) = lenders.get_mut(donor) {
            lent_by.link = None;
            lent_by.own_count = Some(own_count);
        }
    }

    /// A donor that is lost for good, and of which nothing is plugged, leaves.
    pub(super) fn see_off_lost(self: &Arc<Self>, donor: usize) {
        let lost = self.lock().joiners[donor - self.fixed].lost;
        if lost {
            self.see_off(donor);
        }
    }
}
