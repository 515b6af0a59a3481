//! The end of a drain: the donor leaves.

use super::super::{Inner, State};
use crate::drain::{Drain, DrainState, UNREADABLE};
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

    /// Returns the number of a loan, if its donor joined.
    pub(super) fn loan_of(&self, state: &State, link: usize) -> Option<u64> {
        let joiner = link.checked_sub(self.shared.nodes.fixed())?;
        Some(state.joiners[joiner].loan)
    }

    /// Ends the lease of a donor that was drained, unless blocks stayed there. One that was lost when
    /// it held nothing has left already, and another one may have its place: that is another `loan`.
    pub(super) fn end_drain(self: &Arc<Self>, link: usize, loan: Option<u64>) {
        let is_there = loan == self.loan_of(&self.lock(), link);
        let node = self.node_of(link);
        let stayed = match is_there {
            true => self.shared.homes.ram_blocks_at(node).count() as u64,
            false => 0,
        };
        if stayed > 0 {
            let mib = (stayed * BLOCK_BYTES) >> 20;
            if self.shared.lifecycle.is_stopping() {
                self.set_drain_state(DrainState::Failed("the VM ended first".to_owned()));
                return;
            }
            let why = match self
                .last_drain()
                .is_some_and(|drain| drain.progress.was_unreadable())
            {
                true => UNREADABLE,
                false => "a donor to which they were to move was lost",
            };
            let why = format!("{why}; {mib} MiB stay on {node}");
            self.set_drain_state(DrainState::Failed(why));
            self.announce_end();
            return;
        }
        self.set_drain_state(DrainState::Leaving);
        if link >= self.shared.nodes.fixed() {
            let links = {
                let mut state = self.lock();
                let is_there = loan == self.loan_of(&state, link);
                let links = &mut state.joiners[self.joiner_of(link)].links;
                links.take_if(|_| is_there)
            };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::{DonorAddress, FabricConfig};
    use crate::homes::{BLOCK_PAGES, NodeId};
    use crate::link::LinkEvent;
    use crate::page::{PageIndex, PageRange};
    use crate::support::{MIB, config, donor, start, wait_until};

    const GUEST: u64 = 16 * MIB;

    /// A donor that holds nothing is drained, and lost before that ends.
    #[test]
    fn the_end_of_a_drain_does_not_concern_a_donor_that_has_the_place_since_then() {
        let lender = donor(64 * MIB);
        let added = PageRange::new(PageIndex::new(64 * BLOCK_PAGES), 32 * BLOCK_PAGES);
        let running = start(&FabricConfig {
            hotplug: Some(added),
            ..config(GUEST, GUEST, &[])
        });
        let hotplug = running.fabric.hotplug().expect("it was asked for");
        let inner = &hotplug.0;
        let at = DonorAddress {
            name: None,
            zone: None,
            address: lender.address(),
            fingerprint: None,
            bytes: None,
        };
        let (leases, _) = inner
            .lease_for_share(std::slice::from_ref(&at))
            .expect("it lends");
        let joined = inner.connect_all(leases).expect("it joins");
        let (link, _) = joined[0];
        let loan = inner.loan_of(&inner.lock(), link);
        let (node, reason) = (inner.node_of(link), "killed".to_owned());
        inner.observer_of(link)(FabricEvent::Link(LinkEvent::Lost { node, reason }));
        let is_taken = || inner.lock().joiners[inner.joiner_of(link)].taken;
        wait_until("it has left", || !is_taken());
        hotplug
            .request(4 * BLOCK_BYTES, Some(at))
            .expect("it joins again");
        assert!(is_taken(), "at its place");
        inner.end_drain(link, loan);
        assert_eq!(lender.pool().leases(), 1);
        hotplug.plug(0..4).expect("memory");
        let plugged: NodeId = inner.node_of(link);
        assert_eq!(hotplug.homes().added_blocks_at(plugged), 4);
        // Its own drain ends it, as before.
        hotplug.unplug(0..4).expect("unplugged");
        let loan = inner.loan_of(&inner.lock(), link);
        inner.end_drain(link, loan);
        assert_eq!(lender.pool().leases(), 0);
    }
}
