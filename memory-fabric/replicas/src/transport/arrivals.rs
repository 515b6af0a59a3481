//! Connections to donors that join while the transport is in use.

use super::ReplicatedTransport;
use crate::member::Member;
use crate::set::Arrival;
use fabric_transport::IN_FLIGHT_MAX;
use std::sync::Arc;

impl ReplicatedTransport {
    /// Takes the connections to donors that join.
    pub(super) fn take_arrivals(&mut self) {
        let inbox = Arc::clone(&self.inbox);
        // Held until they are counted: one that is neither here nor counted would outlive its donor.
        let mut arrivals = fabric_host::lock(&inbox);
        for Arrival {
            donor,
            transport,
            path,
        } in arrivals.drain(..)
        {
            let donor = usize::from(donor);
            if self.members.len() <= donor {
                let added = (donor + 1 - self.members.len()) * IN_FLIGHT_MAX;
                let (first, all) = (self.operations.len(), self.operations.len() + added);
                self.operations.resize(all, None);
                let number = |at: usize| u32::try_from(at).expect("a few donors");
                self.free.extend((first..all).map(number));
                self.unposted.reserve(all - self.unposted.len());
                self.members.resize_with(donor + 1, Member::left);
            }
            debug_assert!(self.members[donor].has_left, "a place without a donor");
            self.members[donor] = Member::joining(transport, path);
            self.repairs.forget(donor);
            self.set.note_connected(donor);
        }
    }
}
