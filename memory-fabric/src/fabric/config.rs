//! Configuration of a VM's memory, and the errors of starting it.

use super::sealing::Sealing;
use crate::control::ControlError;
use crate::donor::pool::LeaseError;
use crate::homes::{LocalUse, NodeIds, NodeIdsError, PlanError};
use crate::link::rdma::RdmaLinkError;
use crate::page::{PAGES_MAX, PageRange};
use crate::transport::rdma::Settings;
use crate::transport::udp::Fingerprint;
use crate::transport::{Compression, TransportKind};
use crate::uffd::UffdError;
use crate::view::LentBy;
use fabric_identity::{Name, SharedCredentials};
use fabric_replicas::Layout;
use fabric_sealing::KeyError;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Limit of a VM's donors: for each of them the fault thread polls a connection.
pub const DONORS_MAX: usize = 64;

/// A donor to lease from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DonorAddress {
    /// Its address.
    pub address: SocketAddr,
    /// Its name in its certificate: needed with [`FabricConfig::credentials`].
    pub name: Option<Name>,
    /// The donor's fingerprint, for connections over UDP only.
    pub fingerprint: Option<Fingerprint>,
    /// Its failure domain; without one, it is one by itself. The two copies of a block are in
    /// different ones, where there is room.
    pub zone: Option<String>,
    /// Bytes to lease; by default its share of the guest's need, or less if it has less.
    pub bytes: Option<u64>,
}

/// The consequence of memory that is lost with a donor, because no other node has a copy.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum OnLostMemory {
    /// The VM ends.
    #[default]
    End,
    /// The lost pages are poisoned, and the VM continues without them.
    Poison,
}

/// What makes up for the loss of a donor.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Redundancy {
    /// Nothing: each block is at one donor.
    #[default]
    None,
    /// A copy of each block on another donor.
    Copies,
    /// Each page is a stripe of pieces on different donors, of which some may be lost.
    Stripes(Layout),
}

impl Redundancy {
    /// Returns whether memory at donors survives the loss of one.
    #[must_use]
    pub fn is_some(self) -> bool {
        self != Self::None
    }
}

/// Configuration of a VM's memory.
#[derive(Clone, Debug)]
pub struct FabricConfig {
    /// The VM's name, for the donors' logs.
    pub vm: String,
    /// The ids of this node, of each of `donors`, and of donors that join. The loopback slab counts
    /// as a donor; see [`TransportKind::lenders`].
    pub nodes: NodeIds,
    /// The guest's RAM by rising address.
    pub ram: Vec<PageRange>,
    /// Budget of this node's memory, in bytes.
    pub local_bytes: u64,
    /// Use of that memory.
    pub local_use: LocalUse,
    /// Donors of the rest.
    pub donors: Vec<DonorAddress>,
    /// What makes up for the loss of a donor.
    pub redundancy: Redundancy,
    /// How pages travel.
    pub transport: TransportKind,
    /// What is set of RDMA connections.
    pub rdma: Arc<Settings>,
    /// What this node shows donors. With it, every connection is under TLS to the donor with the name
    /// that was given.
    pub credentials: Option<Arc<SharedCredentials>>,
    /// Whether every page carries a checksum on the network.
    pub checksum: bool,
    /// Which donors get sealed pages only.
    pub seal: Sealing,
    /// Whether pages are compressed on the network. Sealed pages are not: they do not shrink.
    pub compression: Compression,
    /// How long to wait for an unreachable donor.
    pub grace: Duration,
    /// The consequence of memory that is lost with a donor.
    pub on_lost_memory: OnLostMemory,
    /// Whether pages are prefetched when a pattern is detected.
    pub prefetch: bool,
    /// Whether to record the order of first touches; see [`Fabric::working_set`].
    pub record: bool,
    /// The first touches of an earlier run, in order: these pages are prepared at once.
    pub replay: Vec<PageRange>,
    /// Longest polling time of the pager's threads before they sleep.
    pub spin: Duration,
    /// Whether home memory of this node may use huge pages.
    pub huge_pages: bool,
    /// Pages above `ram`, whole blocks of 2 MiB, that may be added while the VM runs.
    pub hotplug: Option<PageRange>,
}

impl FabricConfig {
    /// Returns a donor, or the loopback slab, that lends so much, and to which no connection is
    /// made yet.
    pub(super) fn lender(&self, address: Option<SocketAddr>, lent_bytes: u64) -> LentBy {
        let donor = self
            .donors
            .iter()
            .find(|donor| Some(donor.address) == address);
        LentBy {
            address,
            zone: donor.and_then(|donor| donor.zone.clone()),
            lent_bytes,
            is_sealed: self.seals(address),
            ..LentBy::default()
        }
    }

    /// Checks what needs neither system nor donors; returns the end of the guest's address space in
    /// pages.
    pub(super) fn check(&self) -> Result<u64, FabricError> {
        let ranges = self.ram.iter().copied().chain(self.hotplug);
        let pages = ranges.map(PageRange::end).max().unwrap_or(0);
        if pages > PAGES_MAX {
            return Err(FabricError::TooLarge { pages });
        }
        if self.donors.len() > DONORS_MAX {
            return Err(FabricError::TooManyDonors(self.donors.len()));
        }
        let lenders = self.transport.lenders(self.donors.len());
        self.nodes.check(lenders)?;
        let is_redundant = self.redundancy.is_some();
        if is_redundant && self.hotplug.is_some() {
            return Err(FabricError::ReplicasWithHotplug);
        }
        if is_redundant && self.on_lost_memory == OnLostMemory::Poison {
            return Err(FabricError::PoisonWithReplicas);
        }
        let donors = self.donors.len();
        match self.redundancy {
            Redundancy::Copies if donors < 2 => return Err(FabricError::TooFewForReplicas(donors)),
            Redundancy::Stripes(layout) => {
                let needed = layout.pieces();
                if donors < needed {
                    return Err(FabricError::TooFewForStripes {
                        layout,
                        needed,
                        donors,
                    });
                }
                if matches!(self.transport, TransportKind::Rdma | TransportKind::Hybrid) {
                    return Err(FabricError::StripesOverRdma);
                }
                if self.donors.iter().any(|donor| donor.zone.is_some()) {
                    return Err(FabricError::StripesWithZones);
                }
            }
            _ => {}
        }
        Ok(pages)
    }
}

/// Default of [`FabricConfig::spin`]: above a round trip and a wake-up on a fast network.
pub const SPIN_DEFAULT: Duration = Duration::from_micros(200);

/// Why a VM's memory cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// The memory is too large.
    #[error("guest memory ends at page {pages}, {PAGES_MAX} is the limit (16 TiB)")]
    TooLarge {
        /// The end of its address space in pages.
        pages: u64,
    },
    /// There are too many donors.
    #[error("{0} donors named, {DONORS_MAX} is the limit")]
    TooManyDonors(usize),
    /// Copies on different donors need two of them.
    #[error("{0} donor(s) named for two copies of each page; name at least 2")]
    TooFewForReplicas(usize),
    /// Pieces on different donors need so many.
    #[error("{donors} donor(s) named for stripes of {layout}; name at least {needed}")]
    TooFewForStripes {
        /// The stripes.
        layout: Layout,
        /// Pieces of a stripe.
        needed: usize,
        /// Number of donors.
        donors: usize,
    },
    /// Adapters read and write whole pages.
    #[error("pieces of stripes do not travel by RDMA; use another transport, or two copies")]
    StripesOverRdma,
    /// Pieces are placed without regard to zones.
    #[error("zones of donors have no effect on stripes; name none, or use two copies")]
    StripesWithZones,
    /// Memory that is added has one copy.
    #[error("memory that is added at run time has no replicas; start without one of the two")]
    ReplicasWithHotplug,
    /// Both copies of a page may be lost at different times.
    #[error(
        "replicated memory that is lost is not poisoned; use one copy, or end the VM when memory is \
         lost"
    )]
    PoisonWithReplicas,
    /// Donors lend too little for two copies.
    #[error(
        "guest memory of {guest_mib} MiB needs two copies of what exceeds local memory of \
         {local_mib} MiB, and {donors} donors can hold two copies, on different donors, of \
         {held_mib} MiB; let them lend more, add a donor, or raise --local-memory by {missing_mib} \
         MiB"
    )]
    TooLittleForReplicas {
        /// Guest memory, MiB.
        guest_mib: u64,
        /// Local budget, MiB.
        local_mib: u64,
        /// Number of donors.
        donors: usize,
        /// Memory of which they can hold two copies, MiB.
        held_mib: u64,
        /// What is missing, MiB, rounded up.
        missing_mib: u64,
    },
    /// Donors lend too little for stripes.
    #[error(
        "guest memory of {guest_mib} MiB needs stripes of {layout} for what exceeds local memory of \
         {local_mib} MiB, and {donors} donors can hold, with all pieces on different ones, {held_mib} \
         MiB; let them lend more, add a donor, or raise --local-memory by {missing_mib} MiB"
    )]
    TooLittleForStripes {
        /// The stripes.
        layout: Layout,
        /// Guest memory, MiB.
        guest_mib: u64,
        /// Local budget, MiB.
        local_mib: u64,
        /// Number of donors.
        donors: usize,
        /// Memory that they can hold, MiB.
        held_mib: u64,
        /// What is missing, MiB, rounded up.
        missing_mib: u64,
    },
    /// The node ids are invalid.
    #[error(transparent)]
    Nodes(#[from] NodeIdsError),
    /// There is too little memory.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Pages cannot be sealed.
    #[error(transparent)]
    Sealing(#[from] KeyError),
    /// There is no userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UffdError),
    /// A donor did not lend.
    #[error("no memory from donor {address}")]
    Donor {
        /// The donor.
        address: SocketAddr,
        /// Its error.
        #[source]
        source: ControlError,
    },
    /// A donor has no name.
    #[error("donor {0} has no name to compare with its certificate; add name=NAME to it")]
    Unnamed(SocketAddr),
    /// Nodes cannot be told whom to believe who a donor is.
    #[error(
        "ca.pem cannot be given to nodes that use donors: {0}; remove authorities from it, or use some \
         with shorter certificates"
    )]
    Authorities(String),
    /// A process cannot connect to a donor that the primary has named.
    #[error("cannot connect to donor {0} by what the primary says of it: {1}")]
    Process(SocketAddr, String),
    /// RDMA is not available, and no other transport was allowed.
    #[error(transparent)]
    Rdma(#[from] RdmaLinkError),
    /// The slab of the loopback transport could not be created.
    #[error("no memory for the loopback slab")]
    Loopback(#[source] LeaseError),
    /// A system call failed.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}
