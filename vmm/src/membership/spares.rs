//! Nodes that may join a running VM.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;

use fabric_identity::Name;
use memory_fabric::fabric::DonorAddress;

use super::choose::Candidate;

/// What is remembered of a node that the VM may use: its entry can change, or expire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub name: Name,
    zone: Option<Name>,
    /// What it had free before it lent to the VM.
    pub free_bytes: u64,
}

impl From<&Candidate> for Known {
    fn from(candidate: &Candidate) -> Self {
        Self {
            name: candidate.name.clone(),
            zone: candidate.zone.clone(),
            free_bytes: candidate.free_bytes,
        }
    }
}

/// The nodes that the VM was offered, by the addresses that it uses.
pub(super) type Remembered = BTreeMap<SocketAddr, Known>;

/// Nodes that a VM does not use again, by their names and addresses: they sent wrong pieces of pages.
#[derive(Debug, Default)]
pub(super) struct Distrusted {
    names: HashSet<Name>,
    addresses: HashSet<SocketAddr>,
}

impl Distrusted {
    /// Adds the node at an address, with the names that are known of it, once. Returns false if it is
    /// in.
    pub fn add(&mut self, address: SocketAddr, names: impl Iterator<Item = Name>) -> bool {
        let is_new = self.addresses.insert(address);
        if is_new {
            self.names.extend(names);
        }
        is_new
    }

    pub fn has(&self, name: &Name, address: SocketAddr) -> bool {
        self.is_one(Some(name), address)
    }

    /// The same of a donor whose name may be unknown.
    pub fn is_one(&self, name: Option<&Name>, address: SocketAddr) -> bool {
        let is_named = name.is_some_and(|name| self.names.contains(name));
        is_named || self.addresses.contains(&address)
    }
}

/// Returns whether nodes may fail together: they are in one zone, or one of them has none and they are
/// on one host.
fn are_beside(one: (Option<&str>, &str), other: (Option<&str>, &str)) -> bool {
    match (one.0, other.0) {
        (Some(zone), Some(other)) => zone == other,
        _ => one.1 == other.1,
    }
}

/// Returns the nodes of `found` with so much room that may join the donors in `used`, in the order in
/// which they are asked: those first that share no zone, or host, with one of these, then those with
/// the most room. A node with the name of one of them is the same one at another address.
pub(super) fn in_turn(
    mut found: Vec<(Candidate, SocketAddr)>,
    used: &[DonorAddress],
    known: &Remembered,
    least_bytes: u64,
) -> Vec<(Candidate, SocketAddr)> {
    let known = |donor: &DonorAddress| known.get(&donor.address);
    let is_used = |one: &Candidate, address: SocketAddr| {
        used.iter().any(|donor| {
            donor.address == address
                || donor.name.as_ref() == Some(&one.name)
                || known(donor).is_some_and(|known| known.name == one.name)
        })
    };
    let of_used = used.iter().map(|donor| {
        let zone = known(donor).and_then(|known| known.zone.as_ref());
        let zone = zone.map(Name::as_str).or(donor.zone.as_deref());
        (zone, donor.address.ip().to_string())
    });
    let of_used: Vec<_> = of_used.collect();
    found.retain(|(one, address)| one.free_bytes >= least_bytes && !is_used(one, *address));
    found.sort_by_cached_key(|(one, address)| {
        let host = address.ip().to_string();
        let place = (one.zone.as_ref().map(Name::as_str), host.as_str());
        let mut of_used = of_used.iter();
        let is_beside = of_used.any(|(zone, host)| are_beside(place, (*zone, host)));
        (is_beside, Reverse(one.free_bytes), one.name.clone())
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory_fabric::BLOCK_BYTES;

    fn found(name: &str, address: &str, blocks: u64, zone: &str) -> (Candidate, SocketAddr) {
        let candidate = Candidate {
            name: name.parse().expect("a name"),
            donor: address.parse().expect("a donor"),
            free_bytes: blocks * BLOCK_BYTES,
            zone: zone.parse().ok(),
        };
        (candidate, address.parse().expect("an address"))
    }

    fn used(address: &str, zone: Option<&str>) -> DonorAddress {
        DonorAddress {
            address: address.parse().expect("an address"),
            name: None,
            fingerprint: None,
            zone: zone.map(str::to_owned),
            bytes: None,
        }
    }

    fn names(
        found: &[(Candidate, SocketAddr)],
        used: &[DonorAddress],
        known: &Remembered,
    ) -> Vec<String> {
        let turn = in_turn(found.to_vec(), used, known, 3 * BLOCK_BYTES).into_iter();
        turn.map(|(one, _)| one.name.to_string()).collect()
    }

    #[test]
    fn nodes_of_other_zones_and_hosts_are_asked_first() {
        let all = [
            found("a", "10.0.0.1:7", 9, "x"),
            found("b", "10.0.0.2:7", 8, "y"),
            found("c", "10.0.0.3:7", 3, "y"),
            found("d", "10.0.0.4:7", 4, ""),
            found("e", "10.0.0.5:7", 7, ""),
            found("small", "10.0.0.6:7", 2, "z"),
        ];
        let none = Remembered::new();
        assert_eq!(names(&all, &[], &none), ["a", "b", "e", "d", "c"]);
        // One of zone x, and one without a zone on the host of e.
        let donors = [used("10.0.0.8:7", Some("x")), used("10.0.0.5:8", None)];
        assert_eq!(names(&all, &donors, &none), ["b", "d", "c", "a", "e"]);
        // One of zone x on the host of d, which has no zone, and of b, which is in another one.
        let donors = [used("10.0.0.4:8", Some("x")), used("10.0.0.2:8", Some("x"))];
        assert_eq!(names(&all, &donors, &none), ["b", "e", "c", "a", "d"]);
        // One without a zone on the host of a.
        let donors = [used("10.0.0.1:8", None)];
        assert_eq!(names(&all, &donors, &none), ["b", "e", "d", "c", "a"]);
        // Donors of stripes have no zone; that of the entry counts.
        let (known, address) = found("f", "10.0.0.9:7", 0, "y");
        let known = Remembered::from([(address, Known::from(&known))]);
        let donors = [used("10.0.0.9:7", None)];
        assert_eq!(names(&all, &donors, &known), ["a", "e", "d", "b", "c"]);
    }

    #[test]
    fn a_node_does_not_join_beside_itself() {
        let (a, address) = found("a", "10.0.0.1:7", 9, "");
        let known = Remembered::from([(address, Known::from(&a))]);
        let donors = [used("10.0.0.1:7", None)];
        // At the address in use, by another name; at another one, by its name.
        let other = found("b", "10.0.0.1:7", 9, "");
        let moved = found("a", "10.0.1.1:7", 9, "");
        let all = [other, moved];
        assert!(names(&all, &donors, &known).is_empty());
        // By the name in its certificate.
        let certified = DonorAddress {
            name: Some(a.name.clone()),
            ..used("10.0.2.1:7", None)
        };
        assert_eq!(names(&all, &[certified], &Remembered::new()), ["b"]);
        // It is lost, and was started again elsewhere.
        assert_eq!(names(&all, &[], &known), ["a", "b"]);
    }
}
