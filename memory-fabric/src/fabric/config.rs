//! What a VM's memory is to be, and why there is none.

use super::kinds::TransportKind;
use crate::control::ControlError;
use crate::donor::pool::LeaseError;
use crate::homes::{LocalUse, NodeIds, NodeIdsError, PlanError};
use crate::link::rdma::RdmaLinkError;
use crate::page::{PAGES_MAX, PageRange};
use crate::transport::Compression;
use crate::transport::udp::Fingerprint;
use crate::uffd::UffdError;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Most donors of one VM: each costs the fault thread a look at its connection.
pub const DONORS_MAX: usize = 64;

/// A donor to lease from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DonorAddress {
    /// Where it listens.
    pub address: SocketAddr,
    /// What the donor is known by; for connections over UDP alone.
    pub fingerprint: Option<Fingerprint>,
    /// Bytes to lease; when not given, its share of what the guest needs, or less if it has
    /// less.
    pub bytes: Option<u64>,
}

/// What a VM's memory is to be.
#[derive(Clone, Debug)]
pub struct FabricConfig {
    /// The VM's name, for the donors' logs.
    pub vm: String,
    /// The ids of this node, of each of `donors`, and of donors that join. The loopback slab counts
    /// as a donor; see [`TransportKind::lenders`].
    pub nodes: NodeIds,
    /// The guest's RAM by rising address.
    pub ram: Vec<PageRange>,
    /// Bytes of this node's memory to use.
    pub local_bytes: u64,
    /// What for.
    pub local_use: LocalUse,
    /// Who lends the rest.
    pub donors: Vec<DonorAddress>,
    /// How pages travel.
    pub transport: TransportKind,
    /// Whether every page carries a checksum on the network.
    pub checksum: bool,
    /// Whether pages are compressed on the network.
    pub compression: Compression,
    /// How long a donor that cannot be reached is waited for.
    pub grace: Duration,
    /// Whether pages are fetched before they are asked for, where a pattern is seen.
    pub prefetch: bool,
    /// Whether to record which pages are touched first; see [`Fabric::working_set`].
    pub record: bool,
    /// What an earlier run touched first, in that order: made ready at once.
    pub replay: Vec<PageRange>,
    /// How long the pager's threads look for work before they sleep, at the most.
    pub spin: Duration,
    /// Whether memory at home here may be backed by huge pages.
    pub huge_pages: bool,
    /// Pages above `ram`, whole blocks of 2 MiB, that may be added while the VM runs.
    pub hotplug: Option<PageRange>,
    /// Do without CONTINUE with write protection, as on kernels before 6.4. For tests.
    pub without_continue_write_protected: bool,
}

impl FabricConfig {
    /// Checks what needs no system and no donor; gives the number after the last page's.
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
        Ok(pages)
    }
}

/// Default of [`FabricConfig::spin`]: above a round trip and a wake-up on a fast network.
pub const SPIN_DEFAULT: Duration = Duration::from_micros(200);

/// Why a VM has no memory.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// Too large.
    #[error("guest memory ends at page {pages}, {PAGES_MAX} is the limit (16 TiB)")]
    TooLarge {
        /// The page after the last.
        pages: u64,
    },
    /// Too many donors.
    #[error("{0} donors named, {DONORS_MAX} is the limit")]
    TooManyDonors(usize),
    /// The node ids cannot be used.
    #[error(transparent)]
    Nodes(#[from] NodeIdsError),
    /// Too little memory.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// No userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UffdError),
    /// A donor did not lend.
    #[error("no memory from donor {address}")]
    Donor {
        /// The donor.
        address: SocketAddr,
        /// Why.
        #[source]
        source: ControlError,
    },
    /// There is no RDMA, and nothing else was allowed.
    #[error(transparent)]
    Rdma(#[from] RdmaLinkError),
    /// The slab of the loopback transport could not be made.
    #[error("no memory for the loopback slab")]
    Loopback(#[source] LeaseError),
    /// The system refused something.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}
