//! The end of a drain: the donor leaves.

use super::super::Inner;
use crate::drain::{Drain, DrainState};
use crate::fabric::FabricEvent;
use crate::fabric::adapt::Change;
use crate::homes::BLOCK_BYTES;
use std::sync::{Arc, PoisonError};

impl Inner {
    /// Returns the last drain.
    pub(super) fn last_drain(&self) -> Option<Drain> {
        let drain = self.moves.drain.read();
        drain.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_drain(&self, drain: Drain) {
        let mut last = self
            .moves
            .drain
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *last = Some(drain);
    }

    pub(super) fn set_drain_state(&self, state: DrainState) {
        let mut last = self
            .moves
            .drain
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(drain) = &mut *last {
            drain.state = state;
        }
    }

    /// Removes donors that were lost before anything had its home there, and with them the moves to
    /// them.
    pub(super) fn leave_lost_targets(self: &Arc<Self>) {
        let lost: Vec<usize> = {
            let state = self.lock();
            let joiners = state.joiners.iter().zip(self.shared.nodes.fixed()..);
            let lost = joiners.filter(|(joiner, _)| joiner.lost && joiner.links.is_some());
            lost.map(|(_, link)| link).collect()
        };
        for link in lost {
            self.disconnect(link);
        }
    }

    /// Ends the lease of a donor that was drained, unless blocks stayed there.
    pub(super) fn end_drain(self: &Arc<Self>, link: usize) {
        let node = self.node_of(link);
        let stayed = self.shared.homes.ram_blocks_at(node).count() as u64;
        if stayed > 0 {
            let mib = (stayed * BLOCK_BYTES) >> 20;
            if self.shared.lifecycle.is_stopping() {
                self.set_drain_state(DrainState::Failed("the VM ended first".to_owned()));
                return;
            }
            let why =
                format!("a donor to which they were to move was lost; {mib} MiB stay on {node}");
            self.set_drain_state(DrainState::Failed(why));
            self.announce_end();
            return;
        }
        self.set_drain_state(DrainState::Leaving);
        if link >= self.shared.nodes.fixed() {
            let links = self.lock().joiners[self.joiner_of(link)].links.take();
            if let Some(links) = links {
                self.end(link, links);
            }
        } else {
            self.boot_events.ignore(node);
            self.vacate(link);
            self.end_lease(link);
        }
        self.set_drain_state(DrainState::Done);
        self.announce_end();
    }

    /// Ends a lease of the guest's start to which no thread has a connection.
    pub(in crate::fabric::hotplug) fn end_lease(&self, link: usize) {
        self.shared.policies.leave(link);
        let _ = self.adapter.try_send(Change::Forget(self.node_of(link)));
        if let Some(own_count) = self.leases.release(link) {
            self.note_end(link, own_count);
        }
    }

    /// Notifies the monitor of the end of the last drain.
    pub(super) fn announce_end(&self) {
        if let Some(drain) = self.last_drain() {
            (self.observer)(FabricEvent::Drained(drain.summary()));
        }
    }
}
