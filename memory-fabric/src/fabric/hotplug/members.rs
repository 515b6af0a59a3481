//! Donors that join replicated memory, for the copies of one that is drained, or for their share.
//!
//! Such a donor has a lease, a link and connections as one of the start. Its connections go to the
//! transports over all copies, and its link reports to the set of donors.

use super::super::replicas;
use super::{HotplugError, Inner};
use crate::fabric::{DonorAddress, FabricError};
use crate::link::Leased;
use fabric_replicas::{Newcomer, ReplicaSet};
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How long the pager's threads may take to use the connections to a donor that joins, or to close
/// those to one that leaves. They are woken for it.
pub(super) const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

impl Inner {
    /// Returns the link of the donor with this address that holds copies, or may get them.
    pub(super) fn member_at(&self, set: &ReplicaSet, address: SocketAddr) -> Option<usize> {
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let at_address = |link: &usize| lenders[*link].address == Some(address);
        let mut links = (0..lenders.len()).filter(at_address);
        links.find(|&link| {
            let id = u8::try_from(link).expect("at most 64 donors");
            set.copies().is_member(id) && !set.copies().is_lost(id)
        })
    }

    /// Returns a donor in a zone, unless it has left.
    fn member_in(&self, set: &ReplicaSet, zone: Option<&str>) -> Option<usize> {
        let zone = zone?;
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let is_there = |link: &usize| lenders[*link].zone.as_deref() == Some(zone);
        let mut links = (0..lenders.len()).filter(is_there);
        links.find(|&link| {
            let id = u8::try_from(link).expect("at most 64 donors");
            set.copies().is_member(id)
        })
    }

    /// Connects to a donor that has lent, and makes it one of those that hold copies.
    pub(super) fn join_member(
        &self,
        set: &Arc<ReplicaSet>,
        place: usize,
        leased: Leased,
        donor: &DonorAddress,
    ) -> Result<(), HotplugError> {
        let node = self.node_of(place);
        let at = self.joiner_of(place);
        self.lock().take_place(at);
        self.keep_distrusted(set, place);
        set.prepare(place);
        let slots = leased.grant().bytes / replicas::copy_bytes(set);
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        let observer = replicas::link_observer(set, &self.shared.nodes, &self.observer);
        let made = self.make_connections(place, leased, &observer);
        let mut made = made.inspect_err(|_| self.lock().joiners[at].taken = false)?;
        made.lent_by.zone.clone_from(&donor.zone);
        let transports = std::mem::take(&mut made.transports).into_iter();
        let newcomer = Newcomer {
            slots,
            beside: self.member_in(set, donor.zone.as_deref()),
            transports: transports.map(|(_, transport)| transport).collect(),
            path: made.lent_by.path.clone(),
        };
        if !set.join(place, newcomer, Instant::now() + CONNECT_TIME_MAX) {
            let was_closed = set.retire(place, Instant::now() + CONNECT_TIME_MAX);
            // With connections that are not closed its place is not used again.
            self.lock().joiners[at].taken = !was_closed;
            let what = "use a donor that joined: it was lost, or the pager did not take its \
                        connections in time";
            let error = io::Error::from(io::ErrorKind::TimedOut);
            return Err(FabricError::System(what, error).into());
        }
        let links = self.note_connected(place, made);
        self.lock().joiners[at].links = Some(links);
        tracing::info!("donor {} has joined as {node}, for copies", donor.address);
        Ok(())
    }

    /// Remembers the last donor of a place, if it sent too many wrong pieces, before another one joins
    /// there.
    fn keep_distrusted(&self, set: &ReplicaSet, place: usize) {
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let address = lenders.get(place).and_then(|lent| lent.address);
        if let Some(address) = address.filter(|_| set.is_distrusted(place)) {
            fabric_host::lock(&self.distrusted).insert(address);
        }
    }

    /// Returns the addresses of all donors that sent too many wrong pieces so far.
    pub(super) fn distrusted(&self, set: &ReplicaSet) -> BTreeSet<SocketAddr> {
        // A link that gets another donor meanwhile is in one of both.
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let links = lenders.iter().enumerate();
        let now = links.filter(|(link, _)| set.is_distrusted(*link));
        let mut all: BTreeSet<_> = now.filter_map(|(_, lent)| lent.address).collect();
        drop(lenders);
        all.extend(fabric_host::lock(&self.distrusted).iter());
        all
    }

    /// Ends the use of donors that joined and hold no copy, where that is possible.
    pub(super) fn part_members(&self, set: &ReplicaSet, places: impl IntoIterator<Item = usize>) {
        for place in places {
            if set.retire(place, Instant::now() + CONNECT_TIME_MAX) {
                self.end_member(place);
            }
        }
    }

    /// Ends the leases of donors that joined, are lost, and hold no copy any more.
    pub(super) fn part_lost_members(&self, set: &ReplicaSet) {
        let is_lost = |place: &usize| {
            let id = u8::try_from(*place).expect("at most 64 donors");
            set.copies().is_lost(id) && set.copies().is_member(id)
        };
        let places = self.shared.nodes.joiner_links();
        self.part_members(set, places.filter(is_lost));
    }

    /// Ends the lease of a donor to which no thread has a connection.
    pub(super) fn end_member(&self, link: usize) {
        if link < self.shared.nodes.fixed() {
            self.end_lease(link);
            return;
        }
        let links = self.lock().joiners[self.joiner_of(link)].links.take();
        if let Some(links) = links {
            self.end(link, links);
        }
    }
}
