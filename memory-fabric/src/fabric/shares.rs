//! Leases at donors for the compute nodes that share a memory: how much each node gets, and how a
//! lease that the primary obtained comes to its node.

use super::sources::lease;
use super::{
    Compression, FabricConfig, FabricError, OnLostMemory, Redundancy, SPIN_DEFAULT, Sealing,
};
use crate::homes::{BLOCK_BYTES, LocalNode, LocalUse, NodeId, NodeIds};
use crate::link::{Leased, LinkConfig};
use crate::page::{PAGE_SHIFT, PageIndex, PageRange};
use crate::stream::Carrier;
use crate::transport::TransportKind;
use crate::transport::udp::Fingerprint;
use crate::wire::ComputeLease;
use std::ops::Range;
use std::time::Duration;

/// How much of what donors lend each compute node uses.
#[derive(Clone, Debug)]
pub struct DonorShares {
    config: FabricConfig,
    /// What each node lends itself, by its place; the first is this one.
    lent_bytes: Vec<u64>,
    is_divided: bool,
}

impl DonorShares {
    /// Divides the donors of `config` among nodes in proportion to what each lends itself, or leaves
    /// all to the first one, which is this.
    #[must_use]
    pub fn new(config: FabricConfig, lent_bytes: Vec<u64>, is_divided: bool) -> Self {
        Self {
            config,
            lent_bytes,
            is_divided,
        }
    }

    /// The part of so many blocks for a node. What is left by rounding is for the first one, which
    /// gets at least one of them.
    fn part(&self, blocks: u64, place: usize) -> u64 {
        let whole = self
            .lent_bytes
            .iter()
            .fold(0_u128, |sum, lent| sum + u128::from(*lent));
        let of = |lent: u64| {
            let part = u128::from(blocks) * u128::from(lent) / whole.max(1);
            u64::try_from(part).unwrap_or(blocks)
        };
        match (place, self.is_divided) {
            (0, false) => blocks,
            (_, false) => 0,
            (0, true) => {
                blocks
                    - self
                        .lent_bytes
                        .iter()
                        .skip(1)
                        .map(|lent| of(*lent))
                        .sum::<u64>()
            }
            (_, true) => self.lent_bytes.get(place).map_or(0, |lent| of(*lent)),
        }
    }

    /// What the node at this place asks donors for: those of the configuration from which it gets
    /// something, and what those of them without a size of their own are asked for in all.
    #[must_use]
    pub fn of(&self, place: usize) -> (FabricConfig, u64) {
        let guest: u64 = self.config.ram.iter().map(|range| range.bytes()).sum();
        let lent = self
            .lent_bytes
            .iter()
            .fold(0_u64, |sum, lent| sum.saturating_add(*lent));
        let wanted = guest.saturating_sub(lent).div_ceil(BLOCK_BYTES);
        let wanted = self.part(wanted, place) * BLOCK_BYTES;
        let mut config = self.config.clone();
        let donors = config.nodes.donors.drain(..).zip(config.donors.drain(..));
        let donors = donors.filter_map(|(node, mut donor)| {
            match &mut donor.bytes {
                Some(bytes) => {
                    let blocks = *bytes / BLOCK_BYTES;
                    let part = self.part(blocks, place) * BLOCK_BYTES;
                    // The first one has what is no whole block as well.
                    let rest = if place == 0 { *bytes % BLOCK_BYTES } else { 0 };
                    *bytes = part + rest;
                    (*bytes > 0).then_some((node, donor))
                }
                None => (place == 0 || wanted > 0).then_some((node, donor)),
            }
        });
        let (nodes, donors) = donors.unzip();
        config.nodes.donors = nodes;
        config.donors = donors;
        (config, wanted)
    }

    /// Obtains the leases for another node. Donors without a size of their own that have no memory
    /// left are left out.
    ///
    /// # Errors
    ///
    /// See [`FabricError`]; leases obtained until then are released.
    pub fn lease(&self, place: u8) -> Result<NodeLeases, FabricError> {
        let (config, wanted) = self.of(place.into());
        let asked = FabricConfig {
            local_bytes: 0,
            local_use: LocalUse::Cache,
            ..config
        };
        let leases = lease(&asked, &LocalNode::new(NodeId(place)), wanted, true)?;
        let leases = leases.into_iter().map(|leased| {
            let message = message(&asked, &leased);
            (leased, message)
        });
        Ok(NodeLeases(leases.collect()))
    }
}

/// What a node has to know of a lease.
fn message(config: &FabricConfig, leased: &Leased) -> ComputeLease {
    let (over_udp, fingerprint) = match leased.carrier() {
        Carrier::Udp(fingerprint) => (true, fingerprint.map(Fingerprint::bytes)),
        _ => (false, None),
    };
    ComputeLease {
        donor: leased.node().0,
        address: leased.address(),
        grant: leased.grant().clone(),
        over_udp,
        fingerprint,
        grace_ms: u32::try_from(config.grace.as_millis()).unwrap_or(u32::MAX),
        sealed: config.seals(Some(leased.address())),
        checksum: config.checksum,
        compression: match config.compression {
            Compression::Auto => None,
            Compression::On => Some(true),
            Compression::Off => Some(false),
        },
    }
}

/// Leases for another compute node, which are released when this is dropped before that node has
/// taken them.
#[derive(Debug, Default)]
pub struct NodeLeases(Vec<(Leased, ComputeLease)>);

impl NodeLeases {
    /// Whole blocks that the donors lend, in bytes.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        let lent = self.0.iter().map(|(leased, _)| leased.grant().bytes);
        lent.map(|bytes| bytes - bytes % BLOCK_BYTES).sum()
    }

    /// What is sent to the node.
    pub fn messages(&self) -> impl Iterator<Item = &ComputeLease> {
        self.0.iter().map(|(_, message)| message)
    }

    /// The node has taken the leases: it alone renews them from here on.
    pub fn hand_over(self) {
        self.0
            .into_iter()
            .for_each(|(leased, _)| leased.hand_over());
    }
}

/// A compute node that has leases of its own.
#[derive(Clone, Debug)]
pub struct LeasingNode {
    /// The VM's name, for the donors' logs.
    pub vm: String,
    /// The node's place.
    pub place: u8,
    /// The guest's memory: ranges of guest-physical addresses, whole pages, in their order.
    pub ranges: Vec<Range<u64>>,
}

impl LeasingNode {
    /// Takes over the leases, and returns what is configured by them.
    pub(super) fn resume(
        &self,
        leases: &[ComputeLease],
    ) -> Result<(FabricConfig, Vec<Leased>), FabricError> {
        let config = self.config(leases);
        config.check()?;
        let local = LocalNode::new(config.nodes.local);
        let resumed = leases.iter().map(|lease| {
            let resumed = Leased::resume(
                LinkConfig {
                    local: local.clone(),
                    node: NodeId(lease.donor),
                    address: lease.address,
                    carrier: match lease.over_udp {
                        true => Carrier::Udp(lease.fingerprint.map(Fingerprint::from)),
                        false => Carrier::Tcp,
                    },
                    vm: self.vm.clone(),
                    bytes: lease.grant.bytes,
                    or_less: false,
                    grace: config.grace,
                },
                lease.grant.clone(),
            );
            let address = lease.address;
            resumed.map_err(|source| FabricError::Donor { address, source })
        });
        let resumed = resumed.collect::<Result<_, _>>()?;
        Ok((config, resumed))
    }

    fn config(&self, leases: &[ComputeLease]) -> FabricConfig {
        let pages = self.ranges.iter().filter_map(|range| {
            let first = PageIndex::containing(range.start)?;
            let count = (range.end - range.start) >> PAGE_SHIFT;
            Some(PageRange::new(first, u32::try_from(count).ok()?))
        });
        let first = leases.first();
        let is_sealed = |lease: &ComputeLease| lease.sealed;
        FabricConfig {
            vm: self.vm.clone(),
            nodes: NodeIds {
                local: NodeId(self.place),
                donors: leases.iter().map(|lease| NodeId(lease.donor)).collect(),
                joiners: Vec::new(),
            },
            ram: pages.collect(),
            local_bytes: 0,
            local_use: LocalUse::Cache,
            donors: leases
                .iter()
                .map(|lease| super::DonorAddress {
                    address: lease.address,
                    name: None,
                    fingerprint: lease.fingerprint.map(Fingerprint::from),
                    zone: None,
                    bytes: Some(lease.grant.bytes),
                })
                .collect(),
            redundancy: Redundancy::None,
            transport: TransportKind::Tcp,
            rdma: std::sync::Arc::default(),
            credentials: None,
            checksum: first.is_some_and(|lease| lease.checksum),
            seal: match (leases.iter().all(is_sealed), leases.iter().any(is_sealed)) {
                (true, _) => Sealing::On,
                (false, true) => Sealing::Auto,
                (false, false) => Sealing::Off,
            },
            compression: match first.and_then(|lease| lease.compression) {
                None => Compression::Auto,
                Some(true) => Compression::On,
                Some(false) => Compression::Off,
            },
            grace: Duration::from_millis(first.map_or(0, |lease| lease.grace_ms).into()),
            on_lost_memory: OnLostMemory::End,
            prefetch: false,
            record: false,
            replay: Vec::new(),
            spin: SPIN_DEFAULT,
            huge_pages: false,
            hotplug: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::donor::server::{Donor, DonorConfig};
    use crate::fabric::DonorAddress;
    use crate::transport::rdma::DeviceChoice;
    use std::net::SocketAddr;

    const GUEST: u64 = 64 << 20;

    fn node() -> LeasingNode {
        LeasingNode {
            vm: "test".to_owned(),
            place: 1,
            ranges: std::iter::once(0..GUEST).collect(),
        }
    }

    /// Donors that are asked for so much, of a guest with 64 MiB.
    fn config(donors: &[(SocketAddr, Option<u64>)]) -> FabricConfig {
        let mut config = node().config(&[]);
        config.nodes = NodeIds::in_order(donors.len() + 1);
        config.nodes.donors.remove(0);
        config.grace = Duration::from_secs(1);
        config.donors = donors
            .iter()
            .map(|(address, bytes)| DonorAddress {
                address: *address,
                name: None,
                fingerprint: None,
                zone: None,
                bytes: *bytes,
            })
            .collect();
        config
    }

    fn donor(bytes: u64) -> Donor {
        let donor = Donor::start(&DonorConfig {
            credentials: None,
            listen: ([127, 0, 0, 1], 0).into(),
            memory_bytes: bytes,
            lease_duration_max: Duration::from_secs(60),
            spin: Duration::ZERO,
            rdma: DeviceChoice::None,
            allow: None,
        });
        donor.expect("a donor on loopback")
    }

    fn address(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    #[test]
    fn what_is_asked_of_donors_is_divided_by_what_nodes_lend() {
        let mib = |count: u64| count << 20;
        let all = config(&[(address(1), Some(mib(41))), (address(2), None)]);
        let lent = vec![mib(16), mib(8), mib(1)];
        let shares = DonorShares::new(all.clone(), lent.clone(), true);
        let asked = |place: usize| {
            let (config, wanted) = shares.of(place);
            let donors = config.nodes.donors.iter().zip(&config.donors);
            let donors = donors.map(|(node, donor)| (node.0, donor.address.port(), donor.bytes));
            (donors.collect::<Vec<_>>(), wanted >> 20)
        };
        // 20 blocks and a half of the first donor, and 20 blocks that nobody lends.
        assert_eq!(asked(1), (vec![(2, 1, Some(mib(12))), (3, 2, None)], 12));
        assert_eq!(asked(2), (Vec::new(), 0), "less than a block of each");
        assert_eq!(asked(3), (Vec::new(), 0), "no such node");
        assert_eq!(asked(0), (vec![(2, 1, Some(mib(29))), (3, 2, None)], 28));
        let whole = DonorShares::new(all.clone(), lent, false);
        assert_eq!(whole.of(0).0.donors, all.donors);
        assert_eq!(whole.of(0).1, mib(40));
        assert!(whole.of(1).0.donors.is_empty());
    }

    #[test]
    fn no_part_is_lost_and_the_first_node_has_some_of_each() {
        for lent in [
            vec![1, 1],
            vec![1, 5, 9],
            vec![1 << 40, 3, 3, 3],
            vec![2, u64::MAX],
        ] {
            let shares = DonorShares::new(config(&[]), lent.clone(), true);
            for blocks in 1..50 {
                let parts = (0..lent.len()).map(|place| shares.part(blocks, place));
                assert_eq!(parts.sum::<u64>(), blocks, "{lent:?}");
                assert!(shares.part(blocks, 0) > 0, "{blocks} for {lent:?}");
            }
        }
    }

    #[test]
    fn a_lease_goes_over_to_the_node_that_resumes_it() {
        let donor = donor(GUEST);
        let pool = donor.pool();
        let all = config(&[(donor.address(), Some(40 << 20))]);
        let shares = DonorShares::new(all, vec![8 << 20, 8 << 20], true);
        let given = shares.lease(1).expect("a lease");
        assert_eq!(
            (given.lent_bytes(), pool.lent_bytes()),
            (20 << 20, 20 << 20)
        );
        drop(given);
        assert_eq!(pool.leases(), 0, "a start that fails keeps nothing");

        let given = shares.lease(1).expect("a lease");
        let messages: Vec<_> = given.messages().cloned().collect();
        let (config, resumed) = node().resume(&messages).expect("it is there");
        assert_eq!(config.nodes.donors, [NodeId(2)]);
        assert_eq!(resumed[0].grant().bytes, 20 << 20);
        given.hand_over();
        assert_eq!(pool.leases(), 1);
        drop(resumed);
        assert_eq!(pool.leases(), 0, "the node ends it");
        let refused = node().resume(&messages).expect_err("it has ended");
        assert!(refused.to_string().contains(&donor.address().to_string()));
    }

    #[test]
    fn donors_without_memory_are_left_out_unless_they_are_asked_for_a_size() {
        let (full, other) = (donor(1 << 20), donor(GUEST));
        let pool = full.pool();
        let _all = pool.lend("other".to_owned(), 1 << 20, false, Duration::from_secs(9));
        let lent = vec![1 << 20, 1 << 20];
        let both = config(&[(full.address(), None), (other.address(), None)]);
        let given = DonorShares::new(both, lent.clone(), true).lease(1);
        let given = given.expect("the other one lends");
        let donors = given.messages().map(|lease| lease.donor);
        assert_eq!(donors.collect::<Vec<_>>(), [3]);
        let sized = config(&[(full.address(), Some(8 << 20))]);
        let refused = DonorShares::new(sized, lent, true).lease(1);
        assert!(
            matches!(refused, Err(FabricError::Donor { .. })),
            "{refused:?}"
        );
    }
}
