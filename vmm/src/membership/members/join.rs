//! Nodes that may join a running VM, and those that may not.

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fabric_host::lock;
use fabric_identity::Name;
use memory_fabric::fabric::DonorAddress;
use ssi_hv_membership::Found;

use super::{FIND_TIME_MAX, Members, State};
use crate::instance::donor_address;
use crate::membership::spares::{Known, in_turn};

impl Members {
    /// Excludes the donors at these addresses, which sent wrong pieces of pages, for the life of the VM:
    /// neither they join again, nor others with their names. `named` has the donors of the VM as they
    /// were named. A donor that was named by a user has the name by which etcd knows it at the moment,
    /// or that in its certificate.
    pub fn distrust(&self, addresses: &BTreeSet<SocketAddr>, named: &[DonorAddress]) {
        let now = self.now();
        let mut state = lock(&self.state);
        let State {
            distrusted,
            known,
            found,
            ..
        } = &mut *state;
        let listed = now.as_ref().map_or(&*found, |now| &now.found);
        for address in addresses {
            let donor = named.iter().rfind(|donor| donor.address == *address);
            let known = known.get(address).map(|known| known.name.clone());
            let certified = donor.and_then(|donor| donor.name.clone());
            let names = known.into_iter().chain(certified);
            if distrusted.add(*address, names.chain(listed_names(listed, *address, donor))) {
                tracing::warn!(
                    "the node at {address} is not used by this VM again: it sent wrong pieces of \
                     pages"
                );
            }
        }
    }

    /// Returns whether a donor, as it was named, is none that sent wrong pieces of pages, neither by
    /// its address nor by its name.
    #[must_use]
    pub fn trusts(&self, donor: &DonorAddress) -> bool {
        let state = lock(&self.state);
        !state.distrusted.is_one(donor.name.as_ref(), donor.address)
    }

    /// Notes that the donor at an address was lost while the VM runs. If that was so before, its node is
    /// not asked to join for a while.
    pub fn note_lost(&self, address: SocketAddr) {
        let now = self.now();
        let mut state = lock(&self.state);
        let State {
            rests,
            known,
            found,
            ..
        } = &mut *state;
        let listed = now.as_ref().map_or(&*found, |now| &now.found);
        let name = known.get(&address).map(|known| known.name.clone());
        let name = name.or_else(|| listed_names(listed, address, None).next());
        let (losses, rest) = rests.note_lost(name, address, Instant::now());
        if rest > Duration::ZERO {
            let rest = rest.as_secs();
            tracing::warn!(
                "donor {address} was lost {losses} times within 2 hours: its node is not asked to join \
                 this VM for {rest} s"
            );
        }
    }

    /// Returns the nodes that could join the VM now, of which it uses these, in the order in which they
    /// are to be asked. Each has at least so much room.
    #[must_use]
    pub fn spares(&self, used: &[DonorAddress], least_bytes: u64) -> Vec<DonorAddress> {
        let watched = self.now();
        watched.map_or_else(Vec::new, |now| {
            self.spares_of(&now.found, used, least_bytes)
        })
    }

    pub(super) fn spares_of(
        &self,
        found: &Found,
        used: &[DonorAddress],
        least_bytes: u64,
    ) -> Vec<DonorAddress> {
        let now = Instant::now();
        let until = now + FIND_TIME_MAX;
        let mut taken = HashSet::new();
        let mut usable = Vec::new();
        for (name, member) in &found.members {
            // Of nodes with one address the first counts, as at the start.
            if let Ok((candidate, address)) = self.candidate(name, member, until)
                && taken.insert(address)
            {
                usable.push((candidate, address));
            }
        }
        let mut state = lock(&self.state);
        let is_used = |address| used.iter().any(|donor| donor.address == address);
        state.known.retain(|address, _| is_used(*address));
        usable.retain(|(one, address)| {
            !state.distrusted.has(&one.name, *address) && !state.rests.has(&one.name, *address, now)
        });
        let spares = in_turn(usable, used, &state.known, least_bytes);
        for (candidate, address) in &spares {
            state.known.insert(*address, Known::from(candidate));
        }
        drop(state);
        // Each has an address that was resolved.
        let resolved = spares.iter();
        let resolved = resolved.filter_map(|(one, _)| self.resolved(&one.donor).ok());
        resolved.map(|donor| donor_address(&donor)).collect()
    }
}

/// Returns the names under which a donor is listed: by its address, or by what it shows over UDP.
fn listed_names<'a>(
    listed: &'a Found,
    address: SocketAddr,
    donor: Option<&'a DonorAddress>,
) -> impl Iterator<Item = Name> + 'a {
    let shown = donor.and_then(|donor| donor.fingerprint);
    let is_it = move |text: &str| text.parse::<SocketAddr>() == Ok(address);
    let all = listed.members.iter();
    let all = all.filter(move |(_, member)| {
        is_it(&member.address) || shown.is_some() && member.fingerprint() == shown
    });
    all.map(|(name, _)| name.clone())
}
