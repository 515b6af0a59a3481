//! A donor leaves when its memory is no longer needed, or it is lost.

use super::super::FabricEvent;
use super::super::adapt::Change;
use super::{Inner, State};
use crate::link::rdma::RdmaLink;
use crate::link::{Link, LinkEvent};
use crate::wire::LeaseStatus;
use crossbeam_channel::bounded;
use std::io;
use std::sync::{Arc, PoisonError};
use std::thread::{Builder, JoinHandle};

impl Inner {
    /// Removes donors whose memory is no longer needed, and lost ones.
    pub(super) fn disconnect_idle(self: &Arc<Self>) {
        let idle = {
            let state = self.lock();
            if state.joining {
                Vec::new()
            } else {
                let nodes = &self.shared.nodes;
                let lost = state.joiners.iter().zip(nodes.fixed()..);
                let lost = lost.filter_map(|(joiner, donor)| joiner.lost.then_some(donor));
                let idle = state.pools.idle().into_iter();
                let idle = idle.filter_map(|node| self.shared.homes.link_to(node));
                idle.chain(lost).collect()
            }
        };
        for donor in idle {
            self.disconnect(donor);
        }
    }

    /// Returns whether memory of a donor that joined is used.
    pub(super) fn is_used(&self, state: &State, donor: usize) -> bool {
        let node = self.node_of(donor);
        state.pools.used_of(node).unwrap_or(0) > 0 || self.shared.homes.pages_at(node) > 0
    }

    /// Removes a donor without used memory, on a separate thread, since it takes time. If no
    /// thread can be started, the donor keeps its slot and its lease until the next attempt.
    pub(super) fn disconnect(self: &Arc<Self>, donor: usize) {
        self.disconnect_by(donor, |thread, work| thread.spawn(work));
    }

    fn disconnect_by(
        self: &Arc<Self>,
        donor: usize,
        start: impl FnOnce(Builder, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) {
        let node = self.node_of(donor);
        let mut guard = self.lock();
        let state = &mut *guard;
        let is_used = self.is_used(state, donor);
        let joiner = &mut state.joiners[self.joiner_of(donor)];
        if joiner.links.is_none() || is_used || state.choosing {
            drop(guard);
            return self.report_late(donor);
        }
        state.leaving.retain(|thread| !thread.is_finished());
        let inner = Arc::clone(self);
        let (hand_over, links) = bounded(1);
        let work = move || {
            if let Ok(links) = links.recv() {
                inner.end(donor, links);
            }
        };
        let thread = Builder::new().name(format!("leave-{}", node.0));
        match start(thread, Box::new(work)) {
            Ok(thread) => {
                state.leaving.push(thread);
                state.pools.leave(node);
                if let Some(links) = joiner.links.take() {
                    // There is room for one, and the thread waits for it.
                    let _ = hand_over.send(links);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "no thread to end the lease of {node}; it stays for now");
            }
        }
    }

    /// Reports the loss of a donor of which nothing was used at that time, if a block has moved there
    /// until the pager noticed.
    fn report_late(&self, donor: usize) {
        let lost = {
            let mut state = self.lock();
            let is_used = self.is_used(&state, donor);
            let joiner = &mut state.joiners[self.joiner_of(donor)];
            joiner.unreported_loss.take_if(|_| is_used)
        };
        if let Some(reason) = lost {
            let node = self.node_of(donor);
            (self.observer)(FabricEvent::Link(LinkEvent::Lost { node, reason }));
        }
    }

    pub(super) fn end(&self, donor: usize, (link, rdma_links): (Link, Vec<RdmaLink>)) {
        let node = self.node_of(donor);
        self.vacate(donor);
        // Now moves to it were given up.
        self.report_late(donor);
        self.shared.policies.join(donor, None);
        let _ = self.adapter.try_send(Change::Forget(node));
        // Before the lease ends.
        drop(rdma_links);
        let address = link.address();
        let own_count = link.release();
        let was_reported_down = {
            // One critical section: a reader of the donor's last counters finds its number free.
            let mut state = self.lock();
            self.note_end(donor, own_count);
            let joiner = &mut state.joiners[self.joiner_of(donor)];
            joiner.taken = false;
            std::mem::take(&mut joiner.reported_down)
        };
        if was_reported_down {
            (self.observer)(FabricEvent::Link(LinkEvent::Up { node }));
        }
        tracing::info!("donor {address} ({node}) has left: nothing of it is used any more");
    }

    /// Records the donor's counters after the end of its lease.
    pub(super) fn note_end(&self, donor: usize, own_count: LeaseStatus) {
        let mut lenders = self.lenders.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(lent_by) = lenders.get_mut(donor) {
            lent_by.link = None;
            lent_by.own_count = Some(own_count);
        }
    }

    /// Removes a permanently lost donor without used memory.
    pub(super) fn disconnect_lost(self: &Arc<Self>, donor: usize) {
        let lost = self.lock().joiners[self.joiner_of(donor)].lost;
        if lost {
            self.disconnect(donor);
        }
    }
}

#[cfg(test)]
mod tests;
