//! The readable state of a running VM's memory, from any thread and at any time.
//!
//! Everything here is a load: no lock of the pager is taken, and guest memory is never accessed.

mod placement;

use crate::discard::{DiscardMailbox, Discarder};
use crate::drain::{Drain, DrainSummary, LastMoves, Rebalance, RebalanceSummary};
use crate::extents::Extents;
use crate::guest_memory::GuestMemory;
use crate::heat::{Heat, look};
use crate::homes::{BLOCK_BYTES, NodeId, Plan};
use crate::link::LinkStats;
use crate::link::path::PathStats;
use crate::link::rdma::RdmaStats;
use crate::nodes::Nodes;
use crate::page::PAGE_SHIFT;
use crate::pager::{Shared, losses};
use crate::stats::PagerStats;
use crate::wire::LeaseStatus;
use fabric_replicas::{Layout, ReplicaSet};
pub use placement::{DonorPlacement, DonorUse, PlacementSummary};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A node's part in a VM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeSummary {
    /// Its id.
    pub id: NodeId,
    /// The donor's address; `None` for the compute node and the loopback slab.
    pub address: Option<SocketAddr>,
    /// Bytes of guest memory that it provides.
    pub memory_bytes: u64,
    /// Whether it gets sealed pages only.
    pub is_sealed: bool,
    /// Pages fetched from it.
    pub pages_fetched: u64,
    /// Pages written back to it.
    pub pages_written_back: u64,
    /// Its RDMA connections, if any.
    pub rdma: Option<RdmaSummary>,
    /// Its own counters, once the fabric has shut down.
    pub own_count: Option<LeaseStatus>,
}

/// RDMA counters of a donor.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RdmaSummary {
    /// Pages fetched by READ.
    pub pages_read: u64,
    /// Pages written back by WRITE.
    pub pages_written: u64,
    /// Connections established.
    pub connections: u64,
    /// Connections that failed.
    pub failures: u64,
}

/// The state of replicated memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ReplicaSummary {
    /// The layout of stripes; `None` for two copies. What is said of copies holds for pieces.
    pub layout: Option<Layout>,
    /// Bytes of guest memory with two copies, if both are valid.
    pub bytes: u64,
    /// Of these, bytes that lack a valid copy.
    pub degraded_bytes: u64,
    /// Of these, bytes with a copy on a donor that will not return, for which no other one has room.
    pub displaced_bytes: u64,
    /// Of these, bytes with both valid copies in one zone.
    pub in_one_zone_bytes: u64,
    /// Bytes whose second copy was restored.
    pub repaired_bytes: u64,
    /// Number of times that a donor went out of use.
    pub losses: u64,
    /// Pieces that were not what was written, and that others replaced.
    pub wrong_pieces: u64,
    /// The donors that are not in use.
    pub out: Vec<NodeId>,
    /// Of these, those that will not return.
    pub lost: Vec<NodeId>,
}

/// Pages that were lost with donors.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LostSummary {
    /// The donors.
    pub nodes: Vec<NodeId>,
    /// Pages of which a lost donor had the only copy.
    pub lost_pages: u64,
    /// How often one of them was poisoned because the guest used it.
    pub poisoned_pages: u64,
    /// Of the lost pages, those that the guest has freed and may use again.
    pub recovered_pages: u64,
    /// Where the pages are that are lost now, which those are not that may be used again.
    pub extents: Extents,
}

/// Memory that is added to a guest at run time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AddedSummary {
    /// Bytes of the address range for it.
    pub max_bytes: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Plugged bytes.
    pub plugged_bytes: u64,
}

/// The lenders in order; donors that joined follow those of the start. Those that left stay, with
/// their counters.
pub(crate) type Lenders = Arc<RwLock<Vec<LentBy>>>;

/// A lender.
#[derive(Clone, Debug, Default)]
pub(crate) struct LentBy {
    /// `None` for the loopback slab.
    pub address: Option<SocketAddr>,
    /// Its failure domain, if it has a name.
    pub zone: Option<String>,
    /// Bytes that it lends.
    pub lent_bytes: u64,
    /// Whether it gets sealed pages only.
    pub is_sealed: bool,
    /// `None` for the loopback slab.
    pub link: Option<Arc<LinkStats>>,
    /// `None` without RDMA.
    pub rdma: Option<Arc<RdmaStats>>,
    /// Speed of the path; `None` for the loopback slab.
    pub path: Option<Arc<PathStats>>,
    /// Its own counters, once its lease has ended.
    pub own_count: Option<LeaseStatus>,
    /// Bytes of memory that compute nodes share and that have their place there.
    pub shared_bytes: u64,
}

/// A VM's memory, shared by all parts of its fabric.
#[derive(Clone)]
pub(crate) struct VmMemory {
    pub memory: Arc<GuestMemory>,
    pub stats: Arc<PagerStats>,
    pub plan: Arc<Plan>,
    pub nodes: Arc<Nodes>,
    /// `None` without replicas.
    pub replicas: Option<Arc<ReplicaSet>>,
    pub local_bytes: u64,
    /// One for each donor, in the order of the links.
    pub lent_by: Lenders,
    /// Number of requested blocks of added memory.
    pub requested_blocks: Arc<AtomicU32>,
    pub moves: Arc<LastMoves>,
}

impl VmMemory {
    pub fn lent_by(&self) -> Vec<LentBy> {
        // Written only when a donor joins or leaves.
        let lent_by = self.lent_by.read();
        lent_by.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a discarder of its pages; `evictor` is `None` without an evictor.
    pub fn discarder(&self, evictor: Option<DiscardMailbox>) -> Discarder {
        let (memory, stats) = (Arc::clone(&self.memory), Arc::clone(&self.stats));
        Discarder::new(memory, Arc::clone(&self.plan.homes), stats, evictor)
    }
}

/// The readable state of a VM's memory. Cheap to clone; may outlive the fabric.
#[derive(Clone)]
pub struct FabricView {
    vm: VmMemory,
    /// `None` when all memory is local.
    pager: Option<Arc<Shared>>,
}

impl std::fmt::Debug for FabricView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FabricView")
            .field("plan", &self.vm.plan)
            .finish_non_exhaustive()
    }
}

impl FabricView {
    pub(crate) fn new(vm: VmMemory, pager: Option<Arc<Shared>>) -> Self {
        Self { vm, pager }
    }

    pub(crate) fn vm(&self) -> &VmMemory {
        &self.vm
    }

    pub(crate) fn pager(&self) -> Option<&Shared> {
        self.pager.as_deref()
    }

    /// Returns the division of memory.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.vm.plan
    }

    /// Returns the pager's counters.
    #[must_use]
    pub fn stats(&self) -> &PagerStats {
        &self.vm.stats
    }

    /// Returns the allocated bytes of the guest's memory file.
    ///
    /// # Errors
    ///
    /// Fails when the file cannot be queried.
    pub fn resident_bytes(&self) -> std::io::Result<u64> {
        self.vm.memory.resident_bytes()
    }

    /// Returns the pages with their home elsewhere that are resident here or in transit.
    #[must_use]
    pub fn cached_pages(&self) -> u64 {
        self.pager().map_or(0, |pager| pager.budget.used())
    }

    /// Returns every node's part.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeSummary> {
        let here = NodeSummary {
            id: self.vm.plan.homes.local(),
            address: None,
            memory_bytes: self.vm.local_bytes + self.added_here_bytes(),
            is_sealed: false,
            pages_fetched: 0,
            pages_written_back: 0,
            rdma: None,
            own_count: None,
        };
        let lent_by = self.vm.lent_by();
        let donors = lent_by.iter().zip(self.vm.stats.donors.iter()).enumerate();
        let donors = donors.map(|(link, (lent_by, stats))| NodeSummary {
            id: self.vm.nodes.node_at(link),
            address: lent_by.address,
            memory_bytes: self.homes_at(link, lent_by),
            is_sealed: lent_by.is_sealed,
            pages_fetched: stats.pages_fetched.get(),
            pages_written_back: stats.pages_written_back.get(),
            rdma: lent_by.rdma.as_ref().map(|rdma| RdmaSummary {
                pages_read: rdma.pages_read.get(),
                pages_written: rdma.pages_written.get(),
                connections: rdma.connections.get(),
                failures: rdma.failures.get(),
            }),
            own_count: lent_by.own_count,
        });
        std::iter::once(here).chain(donors).collect()
    }

    /// Returns the guest's memory whose home, or first copy, is at a donor.
    fn homes_at(&self, link: usize, lent_by: &LentBy) -> u64 {
        let Some(set) = &self.vm.replicas else {
            let pages = self.vm.plan.homes.pages_at(self.vm.nodes.node_at(link));
            return (pages << PAGE_SHIFT) + lent_by.shared_bytes;
        };
        let donor = u8::try_from(link).expect("a few links");
        u64::from(set.copies().first_copies_at(donor)) * BLOCK_BYTES
    }

    /// Returns the memory of this node that was added to the guest.
    fn added_here_bytes(&self) -> u64 {
        u64::from(
            self.vm
                .plan
                .homes
                .added_blocks_at(self.vm.plan.homes.local()),
        ) * BLOCK_BYTES
    }

    /// Returns the memory that can be added to the guest, if the configuration has addresses for
    /// it.
    #[must_use]
    pub fn added(&self) -> Option<AddedSummary> {
        let pages = self.vm.plan.homes.added()?;
        // Relaxed: a number for reports.
        let requested = self.vm.requested_blocks.load(Ordering::Relaxed);
        Some(AddedSummary {
            max_bytes: pages.bytes(),
            requested_bytes: u64::from(requested) * BLOCK_BYTES,
            plugged_bytes: u64::from(self.vm.plan.homes.added_blocks()) * BLOCK_BYTES,
        })
    }

    /// Returns the progress of the last drain of a donor, if any.
    #[must_use]
    pub fn drain(&self) -> Option<DrainSummary> {
        // Written only when a drain begins or ends.
        let drain = self.vm.moves.drain.read();
        let drain = drain.unwrap_or_else(PoisonError::into_inner);
        drain.as_ref().map(Drain::summary)
    }

    /// Returns the progress of the last rebalancing, if any.
    #[must_use]
    pub fn rebalance(&self) -> Option<RebalanceSummary> {
        // As that of a drain.
        let rebalance = self.vm.moves.rebalance.read();
        let rebalance = rebalance.unwrap_or_else(PoisonError::into_inner);
        rebalance.as_ref().map(Rebalance::summary)
    }

    /// Returns the pages that were lost with donors. Looks at each page with its home at one of them, if
    /// pages were lost or recovered since the last call.
    #[must_use]
    pub fn lost(&self) -> LostSummary {
        self.pager().map_or_else(LostSummary::default, |pager| {
            let lost = &pager.losses;
            LostSummary {
                nodes: lost
                    .links()
                    .map(|link| self.vm.nodes.node_at(link))
                    .collect(),
                lost_pages: lost.lost.get(),
                poisoned_pages: lost.poisoned.get(),
                recovered_pages: lost.recovered.get(),
                extents: losses::extents(pager),
            }
        })
    }

    /// Returns the state of replicated memory; `None` without replicas.
    #[must_use]
    pub fn replicas(&self) -> Option<ReplicaSummary> {
        let set = self.vm.replicas.as_ref()?;
        let copies = set.copies();
        let donors = (0..=u8::MAX).zip(self.vm.nodes.all());
        let is_out = |donor: u8| copies.is_out(donor) && copies.is_member(donor);
        let out: Vec<_> = donors.filter(|(donor, _)| is_out(*donor)).collect();
        let lost = out.iter().filter(|(donor, _)| copies.is_lost(*donor));
        Some(ReplicaSummary {
            layout: copies.layout(),
            bytes: u64::from(copies.blocks()) * BLOCK_BYTES,
            degraded_bytes: u64::from(copies.degraded()) * BLOCK_BYTES,
            displaced_bytes: u64::from(copies.displaced()) * BLOCK_BYTES,
            in_one_zone_bytes: u64::from(copies.in_one_zone()) * BLOCK_BYTES,
            repaired_bytes: set.repaired_blocks.get() * BLOCK_BYTES,
            losses: set.losses.get(),
            wrong_pieces: set.wrong_pieces.get(),
            lost: lost.map(|(_, node)| **node).collect(),
            out: out.iter().map(|(_, node)| **node).collect(),
        })
    }

    /// Returns how often connections to each donor broke, of RDMA too.
    #[must_use]
    pub fn breaks(&self) -> Vec<(NodeId, u64)> {
        let lent_by = self.vm.lent_by().into_iter().enumerate();
        let breaks = lent_by.filter_map(|(link, lent)| {
            let by_rdma = lent.rdma.map_or(0, |rdma| rdma.failures.get());
            let breaks = lent.link?.breaks.get() + by_rdma;
            Some((self.vm.nodes.node_at(link), breaks))
        });
        breaks.collect()
    }

    /// Returns the link to each donor, in order; `None` for the loopback slab, and for donors that
    /// left.
    #[must_use]
    pub fn links(&self) -> Vec<Option<Arc<LinkStats>>> {
        self.vm
            .lent_by()
            .into_iter()
            .map(|lent| lent.link)
            .collect()
    }

    /// Returns the RDMA counters of each donor, in order, if any.
    #[must_use]
    pub fn rdma(&self) -> Vec<Option<Arc<RdmaStats>>> {
        self.vm
            .lent_by()
            .into_iter()
            .map(|lent| lent.rdma)
            .collect()
    }

    /// Returns the speed of the path to each donor, in order; `None` for the loopback slab.
    #[must_use]
    pub fn paths(&self) -> Vec<Option<Arc<PathStats>>> {
        self.vm
            .lent_by()
            .into_iter()
            .map(|lent| lent.path)
            .collect()
    }

    /// Returns the locations and recent touches of pages, extent by extent. Examines a bounded
    /// number of pages for any size of guest: see [`Heat`].
    #[must_use]
    pub fn heat(&self) -> Heat {
        let pager = self.pager().map(|pager| (&pager.map, &pager.touches));
        look(&self.vm.plan.homes, &self.vm.memory, pager)
    }
}
