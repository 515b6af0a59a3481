//! Room for the blocks of a donor that is drained.

use super::super::{Inner, State};
use super::DrainError;
use crate::fabric::DonorAddress;
use crate::homes::{BLOCK_BYTES, Home};
use crate::link::{Leased, describe};
use std::cmp::Reverse;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

const MIB: u64 = 1 << 20;

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub blocks: u32,
    /// For an error: what each donor has, or why it has nothing.
    pub texts: Vec<String>,
}

impl Found {
    pub fn add(&mut self, who: &str, blocks: u32) {
        self.blocks += blocks;
        let mib = u64::from(blocks) * BLOCK_BYTES / MIB;
        self.texts.push(format!("{who}: {mib} MiB"));
    }
}

impl Inner {
    /// Returns whether the donor of a link lends.
    pub(super) fn is_lender(&self, state: &State, link: usize) -> bool {
        match link.checked_sub(self.shared.nodes.fixed()) {
            Some(joiner) => state.joiners[joiner].links.is_some() && !state.joiners[joiner].lost,
            None => {
                let is_lost = state.lost.contains(&link) || self.shared.losses.is_lost(link);
                self.leases.has(link) && !is_lost
            }
        }
    }

    /// Returns the homes for the blocks of a donor that is drained, after connecting to the donors
    /// that lend more for them.
    pub(super) fn obtain_room(
        self: &Arc<Self>,
        drained: usize,
        blocks: u32,
        to: &[DonorAddress],
    ) -> Result<Vec<Home>, DrainError> {
        let mut found = Found::default();
        let mut places = Vec::new();
        if to.is_empty() {
            self.reclaim_slots();
            self.take_left(drained, blocks, &mut places, &mut found);
        }
        let leases = self.lease_rest(drained, blocks, to, &mut found);
        if found.blocks < blocks {
            // The leases are released.
            return Err(self.too_little(drained, blocks, found));
        }
        for (place, slots) in self.connect_all(leases)? {
            let wanted = blocks - u32::try_from(places.len()).expect("23 bits");
            let node = self.node_of(place);
            places.extend((0..slots.min(wanted)).map(|slot| Home { node, slot }));
        }
        Ok(places)
    }

    /// Returns the homes that were obtained if all their donors are still there.
    pub(super) fn checked_room(
        &self,
        state: &State,
        drained: usize,
        blocks: u32,
        places: Vec<Home>,
    ) -> Result<Vec<Home>, DrainError> {
        let nodes = &self.shared.nodes;
        let is_there = |home: &&Home| {
            let link = nodes.link_to(home.node);
            link.is_some_and(|link| self.is_lender(state, link))
        };
        let there = places.iter().filter(is_there).count();
        if there == places.len() {
            return Ok(places);
        }
        let found = Found {
            blocks: u32::try_from(there).expect("23 bits"),
            texts: vec!["a donor with room was lost meanwhile".to_owned()],
        };
        Err(self.too_little(drained, blocks, found))
    }

    /// Returns the error for blocks of a donor for which less was found.
    pub(super) fn too_little(&self, drained: usize, blocks: u32, mut found: Found) -> DrainError {
        let mib = |blocks: u32| u64::from(blocks) * BLOCK_BYTES / MIB;
        if found.texts.is_empty() {
            found.texts.push("there is no other donor".into());
        }
        DrainError::TooLittle {
            node: self.node_of(drained),
            needed_mib: mib(blocks),
            room_mib: mib(found.blocks),
            found: found.texts.join("; "),
            missing_mib: mib(blocks - found.blocks),
        }
    }

    /// Leases what is missing from the donors in `to`, or those of the guest's start.
    fn lease_rest(
        &self,
        drained: usize,
        blocks: u32,
        to: &[DonorAddress],
        found: &mut Found,
    ) -> Vec<(usize, Leased)> {
        let address = self.address_of(drained);
        let others = self.config.donors.iter();
        let others = others.filter(|other| Some(other.address) != address);
        let asked: Vec<&DonorAddress> = match to {
            [] => others.collect(),
            named => named.iter().collect(),
        };
        let mut leases: Vec<(usize, Leased)> = Vec::new();
        for donor in asked {
            let missing = blocks - found.blocks;
            if missing == 0 {
                break;
            }
            self.lease_more(donor, missing, &mut leases, found);
        }
        leases
    }

    /// Leases up to so many blocks from a donor, in a place for one that joins.
    pub(super) fn lease_more(
        &self,
        donor: &DonorAddress,
        blocks: u32,
        leases: &mut Vec<(usize, Leased)>,
        found: &mut Found,
    ) {
        self.lease_blocks(donor, blocks, true, leases, found);
    }

    /// Leases so many blocks from a donor, or with `or_less` what it has of them.
    pub(super) fn lease_blocks(
        &self,
        donor: &DonorAddress,
        blocks: u32,
        or_less: bool,
        leases: &mut Vec<(usize, Leased)>,
        found: &mut Found,
    ) {
        let who = donor.address.to_string();
        let Some(place) = self.free_place(donor.address, leases) else {
            let text = format!("{who}: as many donors have joined as can");
            found.texts.push(text);
            return;
        };
        match self.lease(place, donor, u64::from(blocks) * BLOCK_BYTES, or_less) {
            Ok(leased) => {
                let lent = u32::try_from(leased.grant().bytes / BLOCK_BYTES);
                found.add(&who, lent.unwrap_or(u32::MAX).min(blocks));
                leases.push((place, leased));
            }
            Err(error) => found.texts.push(describe(&error)),
        }
    }

    /// Connects to donors that have lent, or to none. Returns their links, with the blocks that each
    /// lends.
    pub(super) fn connect_all(
        self: &Arc<Self>,
        leases: Vec<(usize, Leased)>,
    ) -> Result<Vec<(usize, u32)>, DrainError> {
        let mut connected = Vec::new();
        for (place, leased) in leases {
            let slots = u32::try_from(leased.grant().bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
            // In a new loan no slot is used.
            fabric_host::lock(&self.spent).forget(place);
            self.lock().take_place(self.joiner_of(place));
            match self.connect(place, leased) {
                Ok(links) => {
                    self.lock().joiners[self.joiner_of(place)].links = Some(links);
                    connected.push((place, slots));
                }
                Err(error) => {
                    self.lock().joiners[self.joiner_of(place)].taken = false;
                    for (place, _) in connected {
                        self.disconnect(place);
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(connected)
    }

    /// Takes free slots of loans, those of the largest rest first.
    fn take_left(&self, drained: usize, blocks: u32, places: &mut Vec<Home>, found: &mut Found) {
        let state = self.lock();
        let links = self.takers(&state).filter(|&link| link != drained);
        let mut left: Vec<(usize, Vec<u32>)> = links
            .map(|link| (link, self.free_slots(&state, link)))
            .filter(|(_, free)| !free.is_empty())
            .collect();
        left.sort_by_key(|(_, free)| Reverse(free.len()));
        for (link, free) in left {
            let missing = (blocks - found.blocks) as usize;
            if missing == 0 {
                break;
            }
            let node = self.node_of(link);
            let taken = free.into_iter().take(missing);
            let before = places.len();
            places.extend(taken.map(|slot| Home { node, slot }));
            let count = u32::try_from(places.len() - before).expect("23 bits");
            found.add(&node.to_string(), count);
        }
    }

    /// Returns the links of donors that can get blocks at the moment.
    pub(super) fn takers<'a>(&'a self, state: &'a State) -> impl Iterator<Item = usize> + 'a {
        let links = 0..self.shared.nodes.links();
        let links = links.filter(|&link| self.is_lender(state, link) && self.is_reachable(link));
        // A donor that joined for added memory keeps its rest for that.
        links.filter(|&link| state.pools.used_of(self.node_of(link)).is_none())
    }

    pub(super) fn slots_of(&self, state: &State, link: usize) -> u32 {
        let bytes = match link.checked_sub(self.shared.nodes.fixed()) {
            Some(joiner) => {
                let links = state.joiners[joiner].links.as_ref();
                links.map_or(0, |(link, _)| link.bytes())
            }
            None => self.leases.bytes(link),
        };
        u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX)
    }

    /// Returns the slots of a loan that are free, in order.
    pub(super) fn free_slots(&self, state: &State, link: usize) -> Vec<u32> {
        let blocks = self.shared.homes.ram_blocks_at(self.node_of(link));
        let mut taken: HashSet<u32> = blocks.map(|(_, home)| home.slot).collect();
        taken.extend(fabric_host::lock(&self.spent).of(link));
        let slots = 0..self.slots_of(state, link);
        slots.filter(|slot| !taken.contains(slot)).collect()
    }

    fn free_place(&self, address: SocketAddr, leases: &[(usize, Leased)]) -> Option<usize> {
        let state = self.lock();
        self.place_for(&state, address, |place| {
            leases.iter().all(|&(taken, _)| taken != place)
        })
    }

    pub(super) fn address_of(&self, link: usize) -> Option<SocketAddr> {
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        lenders.get(link).and_then(|lent| lent.address)
    }

    /// Returns whether the donor of a link is reachable, as far as known.
    pub(in crate::fabric::hotplug) fn is_reachable(&self, link: usize) -> bool {
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let stats = lenders.get(link).and_then(|lent| lent.link.as_ref());
        stats.is_some_and(|stats| stats.is_reachable())
    }
}
