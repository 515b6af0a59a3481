//! A VM's distributed memory as its monitor sees it: start, look at, stop.

mod adapt;
mod calibrate;
mod config;
mod connections;
mod engine;
mod hotplug;
mod leases;
mod replicas;
mod sealing;
mod shared;
mod shares;
mod sources;
mod threads;

use crate::discard::Discarder;
pub use crate::drain::{DrainState, DrainSummary, RebalanceState, RebalanceSummary};
use crate::guest_memory::GuestMemory;
pub use crate::homes::LocalUse;
use crate::homes::{HomeTable, Loan, LocalNode, NodeId, Plan};
use crate::link::{Link, LinkEvent};
use crate::nodes::Nodes;
use crate::page::{PAGE_SHIFT, PageRange};
pub use crate::policy::{FAST_ROUND_TRIP_MAX, RDMA_ROUND_TRIP_MAX, Tier};
use crate::protection::WriteProtection;
use crate::stats::PagerStats;
use crate::transport::select::Selection;
pub use crate::transport::udp::{Fingerprint, FingerprintError};
pub use crate::transport::{Compression, PathKind, TransportKind};
use crate::uffd::Uffd;
pub use crate::view::{
    AddedSummary, DonorPlacement, DonorUse, LostSummary, NodeSummary, PlacementSummary,
    RdmaSummary, ReplicaSummary,
};
use crate::view::{FabricView, VmMemory};
pub use config::{
    DONORS_MAX, DonorAddress, FabricConfig, FabricError, OnLostMemory, Redundancy, SPIN_DEFAULT,
};
use engine::Engine;
pub use fabric_replicas::{
    Layout, LayoutError, capacity as replicated_blocks, stripe_capacity as striped_blocks,
};
pub(crate) use hotplug::HOT_FAULTS_MIN;
pub use hotplug::{DrainError, Drains, HeatPolicy};
pub use hotplug::{Hotplug, HotplugError, PlugError};
pub use sealing::Sealing;
use shared::SharedDonors;
pub use shares::{DonorShares, LeasingNode, NodeLeases, check_authorities};
use sources::Sources;
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// The slab of the loopback transport has nobody to renew its lease; nobody ends it either.
const LOOPBACK_LEASE: Duration = Duration::from_secs(3600);

/// An event that the fabric reports to the monitor, on one of the fabric's threads.
#[derive(Debug)]
pub enum FabricEvent {
    /// A donor became unreachable or reachable, or is lost.
    Link(LinkEvent),
    /// A donor of replicated memory is not used any more; other copies are.
    Degraded {
        /// The donor.
        node: NodeId,
        /// Why.
        reason: String,
    },
    /// The guest does not wait any more for a donor of replicated memory that was reported as
    /// unreachable: others have its memory.
    AwaitedNoMore {
        /// The donor.
        node: NodeId,
    },
    /// All replicated memory has two copies again.
    Repaired,
    /// The drain of a donor has ended: it is done, or has failed.
    Drained(DrainSummary),
    /// A rebalancing has ended.
    Rebalanced(RebalanceState),
    /// A donor is lost, and pages with it, which are poisoned when they are used.
    Poisoned(LostMemory),
    /// The pager failed: faults are no longer served.
    Failed(String),
}

/// Memory that was lost with a donor.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LostMemory {
    /// The donor.
    pub node: NodeId,
    /// Why it is lost.
    pub reason: String,
    /// Pages of which it had the only copy.
    pub lost_pages: u64,
    /// The other pages with their home there: their bytes are here, or they were never written.
    /// They stay here, beyond the budget.
    pub kept_pages: u64,
    /// Whether it was reported as unreachable before.
    pub was_down: bool,
}

/// Takes events. Must return soon, and must not touch guest memory.
pub type FabricObserver = Arc<dyn Fn(FabricEvent) + Send + Sync>;

/// The memory of a running VM.
pub struct Fabric {
    view: FabricView,
    discarder: Discarder,
    transport: TransportKind,
    /// `None` when all memory is local, or shared.
    engine: Option<Engine>,
    /// Donors beside compute nodes that share the memory.
    shared: Option<SharedDonors>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric")
            .field("plan", self.plan())
            .finish_non_exhaustive()
    }
}

impl Fabric {
    /// Obtains leases and starts the pager. From then on the guest view can be touched.
    ///
    /// # Errors
    ///
    /// See [`FabricError`]; leases obtained until then are released.
    pub fn start(config: &FabricConfig, observer: &FabricObserver) -> Result<Self, FabricError> {
        Self::start_with(WriteProtection::Full, config, observer)
    }

    /// The same without what kernels before 6.4 lack. For tests.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    #[doc(hidden)]
    pub fn start_as_on_old_kernels(
        config: &FabricConfig,
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        Self::start_with(WriteProtection::OnlyByCopy, config, observer)
    }

    /// The same as on kernels that lose write protection. For tests.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    #[doc(hidden)]
    pub fn start_without_write_protection(
        config: &FabricConfig,
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        Self::start_with(WriteProtection::None, config, observer)
    }

    /// Uses no more of userfaultfd's write protection than that.
    fn start_with(
        protection_max: WriteProtection,
        config: &FabricConfig,
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        let span_pages = config.check()?;
        let span_bytes = usize::try_from(span_pages << PAGE_SHIFT).expect("64-bit host");
        let system = |what| move |error| FabricError::System(what, error);
        let memory = GuestMemory::new(span_bytes).map_err(system("create guest memory"))?;

        let local = LocalNode::new(config.nodes.local);
        let guest_bytes: u64 = config.ram.iter().map(|range| range.bytes()).sum();
        let sources = if config.local_bytes >= guest_bytes {
            Sources::None
        } else {
            // Before anything is leased: without it nothing is of use.
            let uffd = Uffd::new()?;
            if config.on_lost_memory == OnLostMemory::Poison {
                uffd.check_poison()?;
            }
            Sources::obtain(config, &local, guest_bytes)?
        };
        let lent = sources.lent();
        let ids = &config.nodes;
        let donors = &ids.donors[..lent.len()];
        // For added memory, or for the memory of a donor that is drained.
        let mut nodes = Nodes::new(donors, &ids.joiners);
        let mut homes = HomeTable::new(local, &config.ram, config.hotplug).with_links(nodes.all());
        let mut replicas = None;
        let loans: Vec<Loan> = if config.redundancy.is_some() && !lent.is_empty() {
            let lent = lent.iter().map(|(_, bytes)| *bytes);
            let (copies, primaries) = replicas::place(config, guest_bytes, lent)?;
            nodes = Nodes::replicated(donors, &ids.joiners);
            homes = homes.with_replicas(donors, nodes.all().len());
            replicas = Some(replicas::set(copies, &nodes, observer));
            replicas::loans(&primaries, donors)
        } else {
            let loans = donors.iter().zip(&lent).map(|(&node, (_, bytes))| Loan {
                node,
                pages: bytes >> PAGE_SHIFT,
                first_slot: 0,
            });
            loans.collect()
        };
        let local_pages = config.local_bytes >> PAGE_SHIFT;
        let plan = Plan::new(homes, local_pages, config.local_use, &loans)?;
        if plan.beyond_budget_pages > 0 && !loans.is_empty() {
            tracing::warn!(
                added_mib = plan.beyond_budget_pages >> (20 - PAGE_SHIFT),
                "donors lend only just what local memory leaves: a cache is added on top of \
                 --local-memory; let donors lend more, so that local memory can be the cache"
            );
        }
        if config.huge_pages {
            for extent in plan.homes.ram_extents_at(ids.local) {
                memory
                    .allow_huge_pages(extent.pages)
                    .map_err(system("allow huge pages"))?;
            }
        }
        let lent = lent.into_iter();
        let lent_by = lent.map(|(address, bytes)| config.lender(address, bytes));
        let vm = VmMemory {
            memory: Arc::new(memory),
            stats: Arc::new(PagerStats::new(nodes.links())),
            plan: Arc::new(plan),
            nodes: Arc::new(nodes),
            replicas,
            local_bytes: match config.hotplug {
                Some(_) => config.local_bytes,
                None => config.local_bytes.min(guest_bytes),
            },
            lent_by: Arc::new(RwLock::new(lent_by.collect())),
            requested_blocks: Arc::default(),
            moves: Arc::default(),
        };
        let is_paged = config.hotplug.is_some() || !matches!(sources, Sources::None);
        let engine = is_paged
            .then(|| Engine::start(config, &vm, sources, observer, protection_max))
            .transpose()?;
        let discarder = engine.as_ref().map(|engine| engine.discarder().clone());
        let pager = engine.as_ref().map(|engine| Arc::clone(engine.shared()));
        Ok(Self {
            discarder: discarder.unwrap_or_else(|| vm.discarder(None)),
            view: FabricView::new(vm, pager),
            transport: config.transport,
            engine,
            shared: None,
        })
    }

    /// What can be looked at from any thread, while the VM runs and after.
    #[must_use]
    pub fn view(&self) -> &FabricView {
        &self.view
    }

    /// The VM's memory on this node.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.view.vm().memory
    }

    /// How it is divided.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.view.vm().plan
    }

    /// What the pager counts.
    #[must_use]
    pub fn stats(&self) -> &Arc<PagerStats> {
        &self.view.vm().stats
    }

    /// Takes pages that the guest has freed; may outlive the fabric.
    #[must_use]
    pub fn discarder(&self) -> Discarder {
        self.discarder.clone()
    }

    /// Adds memory, where the configuration has addresses for it; may outlive the fabric.
    #[must_use]
    pub fn hotplug(&self) -> Option<Hotplug> {
        self.engine.as_ref()?.hotplug().cloned()
    }

    /// Drains donors. `None` when all memory is local.
    #[must_use]
    pub fn drains(&self) -> Option<Drains> {
        self.engine.as_ref().map(Engine::drains)
    }

    /// What pages of remote faults came by at the start.
    #[must_use]
    pub fn path(&self) -> PathKind {
        self.summary(|selection| selection.faults)
    }

    /// What pages that are fetched ahead came by at the start.
    #[must_use]
    pub fn bulk_path(&self) -> PathKind {
        self.summary(|selection| selection.bulk)
    }

    /// Why donors are not read by RDMA where that was tried, and this host has it.
    #[must_use]
    pub fn rdma_refusals(&self) -> &[String] {
        let shared = self.shared.as_ref();
        let shared = shared.map_or(&[][..], SharedDonors::rdma_refusals);
        self.engine.as_ref().map_or(shared, Engine::rdma_refusals)
    }

    /// What a page takes from the farthest donor, as it was at the start. `None` without donors.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.slowest().map(|(_, latency)| latency)
    }

    /// The class of the slowest link, as it was at the start. `None` without donors.
    #[must_use]
    pub fn tier(&self) -> Option<Tier> {
        self.slowest().map(|(tier, _)| tier)
    }

    /// Pages at home elsewhere that are resident here, or on their way.
    #[must_use]
    pub fn cached_pages(&self) -> u64 {
        self.view.cached_pages()
    }

    /// The runs of pages that were touched first until now, in that order, and whether there
    /// were more; `None` when they are not recorded.
    #[must_use]
    pub fn working_set(&self) -> Option<(Vec<PageRange>, bool)> {
        let recorder = self.view.pager()?.recorder.as_ref()?;
        Some((recorder.runs(), recorder.is_full()))
    }

    /// Every node's part.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeSummary> {
        self.view.nodes()
    }

    /// Stops the pager and releases the leases. Returns the summaries of the nodes, with the
    /// donors' own counts.
    ///
    /// No thread may touch the guest view from now on: accesses to pages at home elsewhere end in
    /// SIGSEGV, and those of system calls and vCPUs in EFAULT; so do accesses that still wait for a
    /// page of a lost donor. A monitor with a vCPU or a device that cannot be stopped must end its
    /// process instead of calling this.
    pub fn shutdown(self) -> Vec<NodeSummary> {
        self.shutdown_with_progress(|| {})
    }

    /// Does what [`shutdown`](Self::shutdown) does, and calls `returned` after each returned lease.
    pub fn shutdown_with_progress(self, mut returned: impl FnMut()) -> Vec<NodeSummary> {
        let Self {
            view,
            engine,
            shared,
            ..
        } = self;
        let shared = shared.map(SharedDonors::stop).unwrap_or_default();
        let mut links = engine.map_or(shared, Engine::stop);
        // All at once: a donor that does not answer delays no other.
        links.iter_mut().flatten().for_each(Link::begin_release);
        let mut nodes = view.nodes();
        for (link, node) in links.into_iter().zip(nodes.iter_mut().skip(1)) {
            if let Some(link) = link {
                node.own_count = Some(link.release());
                returned();
            }
        }
        nodes
    }

    /// Donors of the start.
    fn donors(&self) -> usize {
        self.view.vm().nodes.fixed()
    }

    fn summary(&self, wanted: impl Fn(Selection) -> PathKind) -> PathKind {
        let is_local = self.plan().cache_pages == 0 && self.shared.is_none();
        if self.donors() == 0 || is_local {
            return PathKind::None;
        }
        if self.transport == TransportKind::Loopback {
            return PathKind::Loopback;
        }
        let paths = self.view.paths().into_iter().take(self.donors()).flatten();
        PathKind::of_all(paths.map(|path| wanted(path.selection)))
    }

    fn slowest(&self) -> Option<(Tier, Duration)> {
        let shared = self.shared.as_ref().and_then(SharedDonors::slowest);
        self.engine.as_ref().map_or(shared, Engine::slowest)
    }
}
