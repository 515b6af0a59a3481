//! Where a VM's memory is: what each donor holds, and has room for.

use super::{FabricView, LentBy};
use crate::fabric::HOT_FAULTS_MIN;
use crate::homes::{BLOCK_BYTES, NodeId};
use crate::link::path::PathStats;
use crate::policy::Tier;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Whether a donor holds memory of the VM.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DonorUse {
    /// It does, and can get more.
    InUse,
    /// It cannot be reached, or is lost. Its copies are stale.
    Out,
    /// Its lease has ended.
    Left,
}

/// A donor's part of a VM's memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DonorPlacement {
    /// The donor.
    pub id: NodeId,
    /// Its address; `None` for the loopback slab.
    pub address: Option<SocketAddr>,
    /// Its failure domain, if it has a name.
    pub zone: Option<String>,
    /// Whether it is used.
    pub usage: DonorUse,
    /// Class of its link, and the time to fetch a page as measured; `None` for the loopback slab.
    pub link: Option<(Tier, Duration)>,
    /// Bytes that it lends to the VM.
    pub lent_bytes: u64,
    /// Of these, bytes of which it is the home, or has the copy that is read first, or pieces of data.
    pub home_bytes: u64,
    /// Of these, bytes of which it has the other copy, or pieces of parity.
    pub copy_bytes: u64,
    /// Of these, bytes for which it has room.
    pub free_bytes: u64,
    /// Of the bytes of which it is the home, those of blocks that are hot; `None` where blocks do not
    /// move by their heat, since there are copies.
    pub hot_bytes: Option<u64>,
}

/// The places of a VM's memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PlacementSummary {
    /// The donors in order.
    pub donors: Vec<DonorPlacement>,
    /// Bytes by the donors that hold them, valid or not.
    pub held: Vec<(Vec<NodeId>, u64)>,
    /// Bytes that have moved because of their heat.
    pub moved_by_heat_bytes: u64,
}

impl FabricView {
    /// Returns the places of the VM's memory.
    #[must_use]
    pub fn placement(&self) -> PlacementSummary {
        let lent_by = self.vm.lent_by();
        // All numbers come from one count: copies move meanwhile.
        let counted = self.vm.replicas.as_ref();
        let counted = counted.map(|set| set.copies().by_donors());
        let donors = lent_by.iter().enumerate();
        let donors: Vec<_> = donors
            .map(|(link, lent)| self.donor_at(link, lent, counted.as_ref()))
            .collect();
        let held = match counted {
            Some(counted) => {
                let mut pairs: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
                for (mut pair, blocks) in counted {
                    pair.sort_unstable();
                    *pairs.entry(pair).or_default() += u64::from(blocks) * BLOCK_BYTES;
                }
                let node = |link: u8| self.vm.nodes.node_at(link.into());
                let named = pairs.into_iter();
                named
                    .map(|(pair, bytes)| (pair.into_iter().map(node).collect(), bytes))
                    .collect()
            }
            None => {
                let alone = donors
                    .iter()
                    .map(|donor| (vec![donor.id], donor.home_bytes));
                alone.filter(|(_, bytes)| *bytes > 0).collect()
            }
        };
        PlacementSummary {
            donors,
            held,
            moved_by_heat_bytes: self.moved_by_heat_bytes(),
        }
    }

    /// Returns the bytes that have moved because of their heat.
    #[must_use]
    pub fn moved_by_heat_bytes(&self) -> u64 {
        self.vm.moves.heat.moved() * BLOCK_BYTES
    }

    /// Returns the bytes of hot blocks at a donor.
    fn hot_bytes_at(&self, node: NodeId) -> Option<u64> {
        let pager = self.pager()?;
        let homes = &self.vm.plan.homes;
        if self.vm.replicas.is_some() {
            return None;
        }
        let now = Instant::now();
        let is_hot = |block| {
            let faults = pager.touches.recent_in(homes.pages_of(block), now);
            faults >= HOT_FAULTS_MIN
        };
        let blocks = homes.ram_blocks_at(node);
        let hot = blocks.filter(|&(block, _)| is_hot(block));
        Some(hot.count() as u64 * BLOCK_BYTES)
    }

    /// Returns a donor's part. `counted` has the blocks by the donors of their copies, or pieces.
    fn donor_at(
        &self,
        link: usize,
        lent_by: &LentBy,
        counted: Option<&BTreeMap<Vec<u8>, u32>>,
    ) -> DonorPlacement {
        let number = u8::try_from(link).expect("a few links");
        let needed = self
            .vm
            .replicas
            .as_ref()
            .map_or(1, |set| set.copies().needed());
        let copy_bytes = BLOCK_BYTES / needed as u64;
        let counted_from = |at: Range<usize>| {
            let all = counted?.iter();
            let there = all.filter(|(donors, _)| {
                let mut named = donors.iter().take(at.end).skip(at.start);
                named.any(|donor| *donor == number)
            });
            let blocks = there.map(|(_, &blocks)| u64::from(blocks));
            Some(blocks.sum::<u64>() * copy_bytes)
        };
        let home_bytes = counted_from(0..needed);
        let home_bytes = home_bytes.unwrap_or_else(|| self.homes_at(link, lent_by));
        let id = self.vm.nodes.node_at(link);
        let lost = self.pager().is_some_and(|pager| pager.losses.is_lost(link));
        let is_down = lent_by.link.as_ref();
        let is_down = is_down.is_some_and(|link| !link.is_reachable());
        let path = lent_by.path.as_deref();
        let mut found = DonorPlacement {
            id,
            address: lent_by.address,
            zone: lent_by.zone.clone(),
            usage: match (lent_by.own_count, lost || is_down) {
                (Some(_), _) => DonorUse::Left,
                (None, true) => DonorUse::Out,
                (None, false) => DonorUse::InUse,
            },
            link: path.map(|path: &PathStats| (path.tier(), path.latency_estimate())),
            lent_bytes: lent_by.lent_bytes,
            home_bytes,
            copy_bytes: counted_from(needed..usize::MAX).unwrap_or(0),
            free_bytes: lent_by.lent_bytes.saturating_sub(home_bytes),
            hot_bytes: self.hot_bytes_at(id),
        };
        if let Some(set) = &self.vm.replicas {
            let copies = set.copies();
            found.free_bytes = u64::from(copies.room_at(number)) * copy_bytes;
            found.usage = match (copies.has_left(number), copies.is_out(number)) {
                (true, _) => DonorUse::Left,
                (false, true) => DonorUse::Out,
                (false, false) => found.usage,
            };
        }
        if found.usage == DonorUse::Left {
            found.lent_bytes = 0;
        }
        if found.usage != DonorUse::InUse {
            found.free_bytes = 0;
        }
        found
    }
}
