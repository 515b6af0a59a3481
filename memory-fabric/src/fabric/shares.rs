//! Leases at donors for the compute nodes that share a memory: how much each node gets, and how a
//! lease that the primary obtained comes to its node.

use super::sources::lease;
use super::{
    Compression, FabricConfig, FabricError, OnLostMemory, Redundancy, SPIN_DEFAULT, Sealing,
};
use crate::control::ControlError;
use crate::homes::{BLOCK_BYTES, LocalNode, LocalUse, NodeId, NodeIds};
use crate::link::{Delegated, Delegation, Leased, LinkConfig, while_kept};
use crate::page::{PAGE_SHIFT, PageIndex, PageRange};
use crate::stream::Carrier;
use crate::transport::TransportKind;
use crate::transport::udp::Fingerprint;
use crate::wire::{AUTHORITIES_BYTES_MAX, AUTHORITIES_MAX, ComputeAuthority, ComputeLease};
use fabric_identity::{ExpectedNode, SharedCredentials};
use std::io;
use std::ops::Range;
use std::sync::Arc;
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
    /// left are left out. With certificates, the leases are delegated to the one that its `process`
    /// has made.
    ///
    /// # Errors
    ///
    /// See [`FabricError`]; leases obtained until then are released.
    pub fn lease(
        &self,
        place: u8,
        process: Option<Fingerprint>,
    ) -> Result<NodeLeases, FabricError> {
        let (config, wanted) = self.of(place.into());
        let asked = FabricConfig {
            local_bytes: 0,
            local_use: LocalUse::Cache,
            ..config
        };
        let leases = lease(&asked, &LocalNode::new(NodeId(place)), wanted, true)?;
        let leases = leases.into_iter().map(|leased| {
            let message = message(&asked, &leased);
            let delegation = match &asked.credentials {
                Some(_) => Some(delegated(&leased, process)?),
                None => None,
            };
            Ok(NodeLease {
                leased,
                message,
                delegation,
            })
        });
        let leases = leases.collect::<Result<Vec<_>, FabricError>>()?;
        let authorities = match &asked.credentials {
            Some(credentials) if !leases.is_empty() => authorities(credentials)?,
            _ => Vec::new(),
        };
        Ok(NodeLeases {
            leases,
            authorities,
        })
    }
}

/// Delegates a lease to a process.
fn delegated(leased: &Leased, process: Option<Fingerprint>) -> Result<Delegation, FabricError> {
    let address = leased.address();
    let failed = |source| FabricError::Donor { address, source };
    let ended = |why: &str| {
        let error = io::Error::new(io::ErrorKind::NotConnected, why.to_owned());
        failed(ControlError::Stream(address, error))
    };
    let process = process.ok_or_else(|| {
        ended("the process on the node has no certificate; use the same release of ssi-hv there")
    })?;
    let mut delegation = leased.delegation(process);
    match delegation.refresh().map_err(failed)? {
        Delegated::Ended => Err(ended("the lease has ended")),
        Delegated::Same | Delegated::Again => Ok(delegation),
    }
}

/// The authorities by which a process knows its donors: those of this host.
fn authorities(credentials: &SharedCredentials) -> Result<Vec<ComputeAuthority>, FabricError> {
    let current = credentials.current();
    let authorities = current.authorities().iter().map(|one| ComputeAuthority {
        cluster: current.subject().cluster.to_string(),
        certificate: one.to_vec(),
    });
    let authorities: Vec<_> = authorities.collect();
    check_authorities(&authorities).map_err(FabricError::Authorities)?;
    Ok(authorities)
}

/// Checks what a process gets of authorities.
///
/// # Errors
///
/// Fails with the reason when one cannot be right, or they are too long.
pub fn check_authorities(authorities: &[ComputeAuthority]) -> Result<(), String> {
    let bytes: Result<Vec<_>, _> = authorities.iter().map(ComputeAuthority::check).collect();
    let (count, bytes) = (authorities.len(), bytes?.iter().sum::<usize>());
    if count > AUTHORITIES_MAX || bytes > AUTHORITIES_BYTES_MAX {
        return Err(format!(
            "{count} certificates of authorities with {bytes} bytes, {AUTHORITIES_MAX} with \
             {AUTHORITIES_BYTES_MAX} are the limit"
        ));
    }
    Ok(())
}

/// What a node has to know of a lease.
fn message(config: &FabricConfig, leased: &Leased) -> ComputeLease {
    let (over_udp, fingerprint) = match leased.carrier() {
        Carrier::Udp(fingerprint) => (true, fingerprint.map(Fingerprint::bytes)),
        Carrier::Quic(_) => (true, None),
        Carrier::Tcp | Carrier::Tls(_) => (false, None),
    };
    ComputeLease {
        donor: leased.node().0,
        address: leased.address(),
        grant: leased.grant().clone(),
        over_udp,
        fingerprint,
        name: match leased.carrier() {
            Carrier::Tls(node) | Carrier::Quic(node) => Some(node.name.to_string()),
            Carrier::Tcp | Carrier::Udp(_) => None,
        },
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

/// A lease for another compute node.
#[derive(Debug)]
struct NodeLease {
    leased: Leased,
    message: ComputeLease,
    /// With certificates.
    delegation: Option<Delegation>,
}

/// Leases for another compute node, which are released when this is dropped before that node has
/// taken them.
#[derive(Debug, Default)]
pub struct NodeLeases {
    leases: Vec<NodeLease>,
    authorities: Vec<ComputeAuthority>,
}

impl NodeLeases {
    /// Whole blocks that the donors lend, in bytes.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        let lent = self.leases.iter().map(|one| one.leased.grant().bytes);
        lent.map(|bytes| bytes - bytes % BLOCK_BYTES).sum()
    }

    /// What is sent to the node.
    pub fn messages(&self) -> impl Iterator<Item = &ComputeLease> {
        self.leases.iter().map(|one| &one.message)
    }

    /// What is sent to the node before that.
    #[must_use]
    pub fn authorities(&self) -> &[ComputeAuthority] {
        &self.authorities
    }

    /// What this host has to [refresh](Delegation::refresh) when it gets another certificate.
    pub fn delegations(&self) -> impl Iterator<Item = &Delegation> {
        self.leases.iter().filter_map(|one| one.delegation.as_ref())
    }

    /// The node has taken the leases: it alone renews them from here on.
    pub fn hand_over(self) {
        let leases = self.leases.into_iter();
        leases.for_each(|one| one.leased.hand_over());
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
    /// What this process shows donors; `None` without certificates.
    pub credentials: Option<Arc<SharedCredentials>>,
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
        let mut resumed = Vec::with_capacity(leases.len());
        for lease in leases {
            let address = lease.address;
            let carrier = self.carrier(lease);
            let link = LinkConfig {
                local: local.clone(),
                node: NodeId(lease.donor),
                address,
                carrier: carrier.map_err(|why| FabricError::Process(address, why))?,
                vm: self.vm.clone(),
                bytes: lease.grant.bytes,
                or_less: false,
                grace: config.grace,
            };
            let taken_over = while_kept(&mut resumed, || Leased::resume(link, lease.grant.clone()));
            let failed = |source| FabricError::Donor { address, source };
            resumed.push(taken_over.map_err(failed)?);
        }
        Ok((config, resumed))
    }

    /// What connections to the donor of a lease are made of. Without the name of the donor, or
    /// certificates of this process, there are none, unless both are missing.
    fn carrier(&self, lease: &ComputeLease) -> Result<Carrier, String> {
        let node = match (&self.credentials, &lease.name) {
            (Some(credentials), Some(name)) => Some(ExpectedNode {
                credentials: Arc::clone(credentials),
                name: name.parse().map_err(|error| format!("{error}"))?,
            }),
            (None, None) => None,
            (Some(_), None) => return Err("the primary has not named its node".to_owned()),
            (None, Some(_)) => {
                return Err("the primary has sent no authority by which to know it".to_owned());
            }
        };
        Ok(match (node, lease.over_udp) {
            (Some(node), true) => Carrier::Quic(node),
            (Some(node), false) => Carrier::Tls(node),
            (None, true) => Carrier::Udp(lease.fingerprint.map(Fingerprint::from)),
            (None, false) => Carrier::Tcp,
        })
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
                    name: lease.name.as_ref().and_then(|name| name.parse().ok()),
                    fingerprint: lease.fingerprint.map(Fingerprint::from),
                    zone: None,
                    bytes: Some(lease.grant.bytes),
                })
                .collect(),
            redundancy: Redundancy::None,
            transport: TransportKind::Tcp,
            rdma: std::sync::Arc::default(),
            credentials: self.credentials.clone(),
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
mod tests;
