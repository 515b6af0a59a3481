//! One guest memory that several compute nodes share, and their connections for what concerns vCPUs.
//!
//! Nodes have places in the VM's table; the first is the primary. All pages go through the protocol
//! of [`fabric_coherence`]. Donors have no part in it: they store pages for the home of these.

mod depot;
mod losses;
mod security;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fabric_coherence::{Member, Members};
use fabric_identity::pinned::PinnedIdentity;
use fabric_identity::{Fingerprint, Holder, Role, SharedCredentials, Subject};
use fabric_peers::ring::verbs::VerbsRings;
use fabric_peers::{PeerError, RdmaPeers, Secret, Streams, TcpPeers, TcpPeersConfig};
use fabric_sharing::{Config, Depot, Failure, Homes, LOCAL_PAGES_MIN, SharedMemory, TooLittleLent};

use crate::guest_memory::GuestMemory;
use crate::homes::{BLOCK_BYTES, NodeId};
use crate::page::PAGE_SIZE;
use crate::rdma::Settings;
use losses::Fenced;

pub use crate::control::{CONTROL_TIMEOUT, ControlError, ControlStream};
pub use crate::donor::{CpuLender, Ending};
pub use crate::stream::Carrier;
pub use crate::wire::{
    AUTHORITIES_BYTES_MAX, AUTHORITIES_MAX, AUTHORITY_BYTES_MAX, COMPUTE_NODES_MAX,
    COMPUTE_REASON_BYTES_MAX, ClockRate, ComputeAuthority, ComputeEnd, ComputeLease, ComputeMember,
    ComputePorts, ComputeRequest, ComputeTable, ErrorMessage, FrameKind, LeaseGrant,
    MEMBER_NAME_BYTES_MAX, NodeClock, Refusal, Token, VmSecret,
};
pub use depot::DonorDepot;
pub use fabric_peers::{Channel, Paths, PeerTransport, SecureStream, Security};
pub use fabric_sharing::{DiscardError, Discards, Halts, Layout, SharingStats, TableFences};
pub use losses::NodeLosses;
pub use security::TlsSecurity;

/// How long a node's memory may be out of reach before the node is lost.
pub const NODE_GRACE: Duration = Duration::from_secs(15);

/// What the connections of [`SharedGuest`] that carry no memory are for.
const VCPUS: &str = "vCPUs of a VM on several nodes";

/// Where the nodes before this one connect to.
#[derive(Debug)]
pub struct Listeners {
    memory: TcpListener,
    vcpus: TcpListener,
    /// The certificate of this process; `None` without TLS.
    identity: Option<PinnedIdentity>,
}

/// Names the process of a VM in its certificate, for people: each boot is a cluster of its own.
fn subject(vm: [u8; 16], me: u8) -> io::Result<Subject> {
    let vm: String = vm.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = |text: String| text.parse().map_err(io::Error::other);
    Ok(Subject {
        cluster: name(format!("vm-{vm}"))?,
        holder: Holder {
            role: Role::Node,
            name: name(me.to_string())?,
        },
    })
}

impl Listeners {
    /// Listens on free ports of an address.
    ///
    /// # Errors
    ///
    /// When the host has no such address, or no free port.
    pub fn bind(address: IpAddr) -> io::Result<Self> {
        Ok(Self {
            memory: TcpListener::bind((address, 0))?,
            vcpus: TcpListener::bind((address, 0))?,
            identity: None,
        })
    }

    /// Like [`bind`](Self::bind), for connections under TLS: makes a certificate for this process,
    /// which is at the place `me` of the VM.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind), and when the kernel gives no random numbers.
    pub fn secured(address: IpAddr, vm: [u8; 16], me: u8) -> io::Result<Self> {
        let identity = PinnedIdentity::generate(&subject(vm, me)?)?;
        Ok(Self {
            identity: Some(identity),
            ..Self::bind(address)?
        })
    }

    /// The ports, and the certificate.
    ///
    /// # Errors
    ///
    /// When the kernel does not report them.
    pub fn ports(&self) -> io::Result<ComputePorts> {
        Ok(ComputePorts {
            memory: self.memory.local_addr()?.port(),
            vcpus: self.vcpus.local_addr()?.port(),
            certificate: self.certificate().map(Fingerprint::bytes),
        })
    }
}

impl Listeners {
    /// What this process shows donors at which it uses leases that the VM has delegated to it, and
    /// by which it knows them; `None` when there are no authorities.
    ///
    /// # Errors
    ///
    /// When the process has no certificate, or the authorities cannot be used.
    pub fn delegate(
        &self,
        authorities: Vec<ComputeAuthority>,
    ) -> io::Result<Option<Arc<SharedCredentials>>> {
        let Some(first) = authorities.first() else {
            return Ok(None);
        };
        let cluster = first.cluster.parse().map_err(io::Error::other)?;
        let identity = self.identity.as_ref();
        let identity = identity.ok_or_else(|| io::Error::other("it has no certificate"))?;
        let authorities = authorities.into_iter();
        let authorities = authorities.map(|one| one.certificate.into()).collect();
        let shown = SharedCredentials::of_process(identity, cluster, authorities);
        shown.map(Some).map_err(io::Error::other)
    }

    fn certificate(&self) -> Option<Fingerprint> {
        self.identity.as_ref().map(PinnedIdentity::fingerprint)
    }

    /// What makes the connections of the process at the place `me` of `table` secure; `None`
    /// without certificates.
    fn security(
        &self,
        me: u8,
        table: &[ComputeMember],
    ) -> Result<Option<Arc<dyn Security>>, SharingError> {
        let wrong = |node: Option<u8>, reason: String| SharingError { node, reason };
        let shown = table.iter().map(|node| node.certificate);
        let Some(identity) = &self.identity else {
            return match shown.flatten().next() {
                None => Ok(None),
                Some(_) => Err(wrong(None, "this process has no certificate".to_owned())),
            };
        };
        let mut certificates = Vec::with_capacity(table.len());
        for (place, certificate) in (0..).zip(shown) {
            let Some(certificate) = certificate else {
                let reason = "its process has no certificate; use the same release of ssi-hv there";
                return Err(wrong(Some(place), reason.to_owned()));
            };
            certificates.push(Fingerprint::from(certificate));
        }
        if certificates.get(usize::from(me)).copied() != self.certificate() {
            let reason = "the primary names another certificate than that of this process";
            return Err(wrong(None, reason.to_owned()));
        }
        let security = TlsSecurity::shared(identity, me, certificates);
        security
            .map(Some)
            .map_err(|error| SharingError::here(&error))
    }
}

/// A node that listens on these ports and lends so much memory.
#[must_use]
pub fn member(node: IpAddr, ports: ComputePorts, lent_bytes: u64) -> ComputeMember {
    ComputeMember {
        memory: SocketAddr::new(node, ports.memory),
        vcpus: SocketAddr::new(node, ports.vcpus),
        lent_bytes,
        certificate: ports.certificate,
    }
}

/// A node's place among the compute nodes of a VM.
#[derive(Clone, Debug)]
pub struct Membership {
    /// Its place.
    pub me: u8,
    /// Names the VM.
    pub vm: [u8; 16],
    /// What the nodes prove to each other that they know.
    pub secret: VmSecret,
    /// All nodes.
    pub table: ComputeTable,
    /// The guest's memory: ranges of guest-physical addresses, in their order.
    pub ranges: Vec<Range<u64>>,
    /// Whether the nodes merge page tables of the guest's kernel.
    pub merge_tables: bool,
    /// Which memory has its home at which node.
    pub layout: Layout,
    /// How this node uses RDMA, by which alone the memory then travels; `None` for TCP.
    pub rdma: Option<Settings>,
}

/// Why nodes do not share a memory, or not any longer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharingError {
    /// The place of the node that is lost or broke the protocol, if it is that.
    pub node: Option<u8>,
    /// What happened.
    pub reason: String,
}

impl fmt::Display for SharingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for SharingError {}

impl SharingError {
    fn here(error: &dyn std::error::Error) -> Self {
        Self {
            node: None,
            reason: fabric_host::describe(error),
        }
    }
}

impl From<PeerError> for SharingError {
    fn from(error: PeerError) -> Self {
        let node = match &error {
            PeerError::Lost { peer, .. }
            | PeerError::Refused { peer, .. }
            | PeerError::Broken { peer, .. } => Some(peer.place()),
            PeerError::System(_) => None,
        };
        let reason = fabric_host::describe(&error);
        Self { node, reason }
    }
}

impl From<Failure> for SharingError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Peer(error) => error.into(),
            Failure::Offence(offence) => Self {
                node: Some(offence.peer.place()),
                reason: fabric_host::describe(&failure),
            },
            failure => Self::here(&failure),
        }
    }
}

/// Divides the blocks of a guest's memory among the nodes.
fn homes(
    table: &[ComputeMember],
    ranges: &[Range<u64>],
    layout: Layout,
) -> Result<Homes, TooLittleLent> {
    let lent = table.iter().map(|node| node.lent_bytes / BLOCK_BYTES);
    let lent: Vec<u64> = lent.collect();
    // The memory below the last address was allocated.
    let block = |address: u64| usize::try_from(address / BLOCK_BYTES).unwrap_or(usize::MAX);
    let ranges = ranges.iter();
    let ranges: Vec<_> = ranges
        .map(|range| block(range.start)..block(range.end))
        .collect();
    Homes::in_proportion(&lent, &ranges, layout)
}

/// The parts of blocks, by their addresses, that are within `ranges`, with neighbours joined.
fn extents(blocks: impl Iterator<Item = u64>, ranges: &[Range<u64>]) -> Vec<(u64, u64)> {
    let mut extents: Vec<(u64, u64)> = Vec::new();
    for start in blocks {
        for range in ranges {
            let (start, end) = (start.max(range.start), (start + BLOCK_BYTES).min(range.end));
            if start >= end {
                continue;
            }
            match extents.last_mut() {
                Some((first, bytes)) if *first + *bytes == start => *bytes += end - start,
                _ => extents.push((start, end - start)),
            }
        }
    }
    extents
}

/// A guest memory that this node shares with the other compute nodes of the VM. Dropping it ends the
/// sharing: no thread may touch the guest view any more.
#[derive(Debug)]
pub struct SharedGuest {
    memory: SharedMemory,
    paths: Arc<Paths>,
    homes: Homes,
    fenced: Fenced,
}

impl SharedGuest {
    /// Connects to the other nodes, and shares `memory`, which nothing has touched, with them.
    /// Returns it with a connection to each other node, by its place, that does not block. `failed`
    /// is called once when the memory cannot be served any more: threads that wait for a page then
    /// wait for ever. What this node lends contains what the donors of `depot` lend to it.
    ///
    /// # Errors
    ///
    /// When a node is not there in time or does not fit, or this host lacks something.
    pub fn start(
        membership: Membership,
        listeners: Listeners,
        memory: Arc<GuestMemory>,
        depot: Option<DonorDepot>,
        failed: impl FnOnce(SharingError) + Send + 'static,
    ) -> Result<(Self, Vec<(u8, Channel)>), SharingError> {
        let Membership {
            me,
            vm,
            secret,
            table: ComputeTable(table),
            ranges,
            merge_tables,
            layout,
            rdma,
        } = membership;
        let wrong = |reason: String| SharingError { node: None, reason };
        let count = u8::try_from(table.len()).unwrap_or(u8::MAX);
        let ids: Vec<NodeId> = (0..count).map(NodeId).collect();
        let members = Members::new(&ids).map_err(|error| SharingError::here(&error))?;
        let place = Member::at(me).filter(|_| me < count);
        let place = place.ok_or_else(|| wrong(format!("this is node {me} of {count}")))?;
        let pages = memory.bytes() / PAGE_SIZE;
        let pages = u32::try_from(pages).map_err(|_| wrong(format!("{pages} pages to share")))?;
        let security = listeners.security(me, &table)?;
        let config = |addresses: Vec<SocketAddr>, listener| {
            let mut config =
                TcpPeersConfig::new(place, members.clone(), addresses, listener, pages);
            config.vm = vm;
            config.secret = Secret(secret.0);
            config.grace = NODE_GRACE;
            config.security.clone_from(&security);
            config
        };
        let of_vcpus = table.iter().map(|node| node.vcpus).collect();
        let of_memory = table.iter().map(|node| node.memory).collect();
        // Both are made at the same time, whichever another node begins with.
        let streams = Streams::begin(config(of_vcpus, listeners.vcpus), VCPUS)?;
        let mut config = config(of_memory, listeners.memory);
        config.rdma = rdma.map(|settings| RdmaPeers {
            rings: Arc::new(VerbsRings::new(settings)),
            is_demanded: true,
        });
        let peers = TcpPeers::connect(config)?;
        let paths = peers.paths();
        let streams = streams.finish()?;
        let mut sharing = Config::new(place, members.all());
        // Copies of what other nodes are the home of need some memory at least, beside what is lent.
        let by_donors = depot.as_ref().map_or(0, DonorDepot::lent_bytes);
        let lent = table[usize::from(me)].lent_bytes.saturating_sub(by_donors);
        let lent = lent / PAGE_SIZE as u64;
        let lent = usize::try_from(lent).unwrap_or(usize::MAX);
        sharing.merge_tables = merge_tables;
        sharing.local_pages = lent.saturating_add(LOCAL_PAGES_MIN);
        let homes = homes(&table, &ranges, layout).map_err(|error| SharingError::here(&error))?;
        let depot = depot.map(|mut depot| {
            depot.settle(&homes, place);
            Box::new(depot) as Box<dyn Depot>
        });
        sharing.homes = Some(homes.clone());
        let (fenced, failed) = Fenced::new(ranges, failed);
        let memory = SharedMemory::start_with(sharing, memory, peers, depot, failed)?;
        let streams = streams.into_iter();
        let streams = streams.map(|(peer, stream)| (peer.place(), stream));
        let shared = Self {
            memory,
            paths,
            homes,
            fenced,
        };
        Ok((shared, streams.collect()))
    }

    /// Ends the sharing because the node at this place is lost, by what the caller knows of it.
    /// Returns what was lost with it, also where the memory has failed for that node before; `None`
    /// where it has failed for another reason, was asked before, or does not say so within `time`.
    /// Threads that wait for a page wait for ever.
    #[must_use]
    pub fn lost_with(&self, place: u8, time: Duration) -> Option<NodeLosses> {
        self.fenced
            .lost_with(Member::at(place)?, &self.memory, time)
    }

    /// What to wait for before a vCPU acts on other nodes other than through this memory.
    #[must_use]
    pub const fn fences(&self) -> &Arc<TableFences> {
        self.memory.fences()
    }

    /// What a vCPU's thread lets know that it halts.
    #[must_use]
    pub const fn halts(&self) -> &Arc<Halts> {
        self.memory.halts()
    }

    /// Drops what the guest does not need.
    #[must_use]
    pub const fn discards(&self) -> &Arc<Discards> {
        self.memory.discards()
    }

    /// How much of the guest's memory has its home at the node at this place.
    #[must_use]
    pub fn bytes_at(&self, place: u8) -> u64 {
        let pages = Member::at(place).map_or(0, |member| self.homes.pages_at(member));
        (pages * PAGE_SIZE) as u64
    }

    /// The guest's memory whose home is the node at this place: starts and lengths, in order, within
    /// `ranges` of guest-physical addresses.
    #[must_use]
    pub fn memory_at(&self, place: u8, ranges: &[Range<u64>]) -> Vec<(u64, u64)> {
        let blocks = Member::at(place).into_iter();
        let blocks = blocks.flat_map(|member| self.homes.blocks_at(member));
        let blocks = blocks.map(|block| block as u64 * BLOCK_BYTES);
        extents(blocks, ranges)
    }

    /// What this node counts.
    #[must_use]
    pub fn stats(&self) -> &Arc<SharingStats> {
        self.memory.stats()
    }

    /// How this memory travels to each other node.
    #[must_use]
    pub const fn paths(&self) -> &Arc<Paths> {
        &self.paths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_blocks_are_one_extent_without_what_the_guest_lacks() {
        const B: u64 = BLOCK_BYTES;
        let ranges = [0..3 * B - 4096, 8 * B..10 * B];
        let blocks = |numbers: &[u64]| {
            let starts: Vec<u64> = numbers.iter().map(|number| number * B).collect();
            extents(starts.into_iter(), &ranges)
        };
        assert_eq!(blocks(&[1, 2, 3, 8]), [(B, 2 * B - 4096), (8 * B, B)]);
        assert_eq!(blocks(&[0, 2]), [(0, B), (2 * B, B - 4096)]);
        assert_eq!(blocks(&[4, 10]), []);
    }
}
