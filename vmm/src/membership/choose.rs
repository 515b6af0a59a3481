//! Which nodes lend to a VM: as few as suffice, those with the most room first, and in different
//! zones where that matters.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use fabric_identity::Name;
use memory_fabric::BLOCK_BYTES;
use memory_fabric::fabric::{Redundancy, replicated_blocks, striped_blocks};

use crate::config::DONORS_MAX;
use crate::config::address::Donor;
use crate::size::ByteSize;

/// What a VM needs of nodes.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Blocks of the guest that are not local.
    pub blocks: u32,
    /// How they are kept.
    pub redundancy: Redundancy,
}

/// A node that a VM can use.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its name in the cluster.
    pub name: Name,
    /// How it is used; `memory` is open.
    pub donor: Donor,
    /// What it had free last.
    pub free_bytes: u64,
    /// Its failure domain.
    pub zone: Option<Name>,
}

impl Candidate {
    /// Returns what fails with it: its zone, or its host.
    fn domain(&self) -> String {
        match &self.zone {
            Some(zone) => format!("zone {zone}"),
            None => format!("host {}", self.donor.address.host()),
        }
    }

    fn units(&self, unit_bytes: u64, most: u32) -> u32 {
        let units = u32::try_from(self.free_bytes / unit_bytes);
        units.unwrap_or(u32::MAX).min(most)
    }
}

/// Chooses nodes; `None` when all together do not suffice. Of a VM without copies each is asked for
/// its part; donors of copies and stripes are asked for what the VM finds right.
#[must_use]
pub fn choose(need: Need, candidates: &[Candidate]) -> Option<Vec<Donor>> {
    let chosen = match need.redundancy {
        Redundancy::None => return parts(need.blocks, candidates),
        Redundancy::Copies => until(in_turn(candidates), |chosen| {
            holds_copies(need.blocks, chosen)
        })
        .or_else(|| {
            // All copies in different zones are not possible.
            until(in_turn(candidates), |chosen| {
                let slots = slots(chosen, BLOCK_BYTES, need.blocks);
                replicated_blocks(&slots) >= need.blocks
            })
        }),
        Redundancy::Stripes(layout) => until(in_turn(candidates), |chosen| {
            let slots = slots(chosen, BLOCK_BYTES / layout.data() as u64, need.blocks);
            chosen.len() >= layout.pieces() && striped_blocks(&slots, layout) >= need.blocks
        }),
    };
    Some(chosen?.into_iter().map(|one| one.donor.clone()).collect())
}

/// The largest first, which is how many VMs spread over a cluster.
fn by_room(candidates: &[Candidate]) -> Vec<&Candidate> {
    let mut sorted: Vec<_> = candidates.iter().collect();
    sorted.retain(|one| one.free_bytes >= BLOCK_BYTES);
    sorted.sort_by_key(|one| (Reverse(one.free_bytes), one.name.clone()));
    sorted
}

fn parts(blocks: u32, candidates: &[Candidate]) -> Option<Vec<Donor>> {
    let (mut left, mut chosen) = (blocks, Vec::new());
    for one in by_room(candidates).into_iter().take(DONORS_MAX) {
        if left == 0 {
            break;
        }
        let part = one.units(BLOCK_BYTES, left);
        left -= part;
        chosen.push(Donor {
            memory: Some(ByteSize::from_bytes(u64::from(part) * BLOCK_BYTES)),
            ..one.donor.clone()
        });
    }
    (left == 0).then_some(chosen)
}

/// Orders nodes so that the first ones are of different zones: the largest of each zone, then the
/// second of each.
fn in_turn(candidates: &[Candidate]) -> Vec<&Candidate> {
    let mut ranks: BTreeMap<String, usize> = BTreeMap::new();
    let mut ranked: Vec<(usize, &Candidate)> = Vec::new();
    for one in by_room(candidates) {
        let rank = ranks.entry(one.domain()).or_default();
        ranked.push((*rank, one));
        *rank += 1;
    }
    // Stable: within a rank the order is that by room.
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().map(|(_, one)| one).collect()
}

/// Returns the shortest beginning that is enough.
fn until<'a>(
    ordered: Vec<&'a Candidate>,
    is_enough: impl Fn(&[&'a Candidate]) -> bool,
) -> Option<Vec<&'a Candidate>> {
    let most = ordered.len().min(DONORS_MAX);
    let mut counts = 1..=most;
    let count = counts.find(|&count| is_enough(&ordered[..count]))?;
    Some(ordered[..count].to_vec())
}

fn slots(chosen: &[&Candidate], unit_bytes: u64, most: u32) -> Vec<u32> {
    let slots = chosen.iter().map(|one| one.units(unit_bytes, most));
    slots.collect()
}

/// Whether two copies of each block fit, each in another zone.
fn holds_copies(blocks: u32, chosen: &[&Candidate]) -> bool {
    let mut zones: BTreeMap<String, u32> = BTreeMap::new();
    for one in chosen {
        let held = zones.entry(one.domain()).or_default();
        *held = held
            .saturating_add(one.units(BLOCK_BYTES, blocks))
            .min(blocks);
    }
    let slots: Vec<u32> = zones.into_values().collect();
    replicated_blocks(&slots) >= blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, free_blocks: u64, zone: Option<&str>) -> Candidate {
        Candidate {
            name: name.parse().expect("a name"),
            donor: format!("{name}:7000").parse().expect("a donor"),
            free_bytes: free_blocks * BLOCK_BYTES,
            zone: zone.map(|zone| zone.parse().expect("a zone")),
        }
    }

    fn chosen(need: Need, candidates: &[Candidate]) -> Option<Vec<String>> {
        let donors = choose(need, candidates)?;
        Some(donors.iter().map(ToString::to_string).collect())
    }

    const fn need(blocks: u32, redundancy: Redundancy) -> Need {
        Need { blocks, redundancy }
    }

    #[test]
    fn the_node_with_the_most_room_lends_first_and_the_last_one_the_rest() {
        let all = [
            candidate("a", 4, None),
            candidate("b", 10, None),
            candidate("c", 4, None),
        ];
        let one = chosen(need(10, Redundancy::None), &all).expect("enough");
        assert_eq!(one, ["b:7000,memory=20 MiB"]);
        let two = chosen(need(11, Redundancy::None), &all).expect("enough");
        assert_eq!(two, ["b:7000,memory=20 MiB", "a:7000,memory=2 MiB"]);
        assert!(chosen(need(18, Redundancy::None), &all).is_some());
        assert_eq!(chosen(need(19, Redundancy::None), &all), None);
        assert_eq!(chosen(need(1, Redundancy::None), &[]), None);
        let full = [candidate("a", 0, None)];
        assert_eq!(chosen(need(1, Redundancy::None), &full), None);
    }

    #[test]
    fn copies_are_in_different_zones_where_there_are_some() {
        let all = [
            candidate("a", 20, Some("x")),
            candidate("b", 20, Some("x")),
            candidate("c", 10, Some("y")),
        ];
        let copies = |blocks| chosen(need(blocks, Redundancy::Copies), &all);
        assert_eq!(copies(10).expect("enough"), ["a:7000", "c:7000"]);
        // Zone y has no room for all of the second copies.
        assert_eq!(copies(20).expect("enough"), ["a:7000", "c:7000", "b:7000"]);
        assert_eq!(copies(26), None);
        let one = [candidate("a", 100, None)];
        assert_eq!(chosen(need(1, Redundancy::Copies), &one), None);
        // Nodes of one host are lost together, unless there are no others.
        let mut here = candidate("d", 50, None);
        here.donor = "a:7001".parse().expect("a donor");
        let hosts = [
            candidate("a", 60, None),
            here.clone(),
            candidate("e", 10, None),
        ];
        let apart = chosen(need(10, Redundancy::Copies), &hosts).expect("enough");
        assert_eq!(apart, ["a:7000", "e:7000"]);
        let together = chosen(
            need(10, Redundancy::Copies),
            &[candidate("a", 60, None), here],
        );
        assert_eq!(together.expect("enough"), ["a:7000", "a:7001"]);
    }

    #[test]
    fn each_piece_of_a_stripe_is_on_a_node_of_its_own() {
        let layout = Redundancy::Stripes("2+1".parse().expect("stripes"));
        let all: Vec<_> = ["a", "b", "c", "d"]
            .map(|name| candidate(name, 5, None))
            .into();
        let pieces = |blocks, count: usize| chosen(need(blocks, layout), &all[..count]);
        assert_eq!(pieces(10, 4).map(|all| all.len()), Some(3));
        assert_eq!(pieces(12, 4).map(|all| all.len()), Some(4));
        assert_eq!(pieces(1, 2), None);
        assert_eq!(pieces(14, 4), None);
    }
}
