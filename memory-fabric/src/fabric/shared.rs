//! Donors of a VM whose memory several compute nodes share: leases and connections, without a pager.

use super::connections::{Connections, Transports};
use super::leases::{Leases, LeasesHeld};
use super::replicas;
use super::sealing::Sealer;
use super::shares::LeasingNode;
use super::sources::Sources;
use super::{Fabric, FabricConfig, FabricError, FabricObserver, Redundancy};
use crate::compute::DonorDepot;
use crate::guest_memory::GuestMemory;
use crate::homes::{BLOCK_BYTES, HomeTable, LocalNode, LocalUse, Plan};
use crate::link::Link;
use crate::nodes::Nodes;
use crate::page::PAGE_SHIFT;
use crate::policy::Tier;
use crate::stats::PagerStats;
use crate::view::{FabricView, VmMemory};
use crate::wire::{ComputeLease, TrafficClass};
use fabric_replicas::Role;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The leases of donors beside compute nodes, and what stores pages with them, until it is taken.
pub(super) struct SharedDonors {
    depot: Mutex<Option<DonorDepot>>,
    leases: LeasesHeld,
    rdma_refusals: Vec<String>,
    slowest: Option<(Tier, Duration)>,
}

impl SharedDonors {
    pub(super) fn rdma_refusals(&self) -> &[String] {
        &self.rdma_refusals
    }

    pub(super) fn slowest(&self) -> Option<(Tier, Duration)> {
        self.slowest
    }

    /// Ends all connections, and returns the links, whose leases are held still.
    pub(super) fn stop(self) -> Vec<Option<Link>> {
        let Self { depot, leases, .. } = self;
        // Drop order: nothing uses a connection that has ended.
        drop(depot);
        leases.0.end_rdma();
        leases.0.take_links()
    }
}

impl Fabric {
    /// Obtains leases for a memory that compute nodes share. Donors without a size of their own are
    /// asked for `wanted_bytes` in all. Nothing is paged: [`take_depot`](Self::take_depot) returns
    /// what stores pages at the donors.
    ///
    /// # Errors
    ///
    /// See [`FabricError`]; leases obtained until then are released.
    pub fn start_shared(
        config: &FabricConfig,
        wanted_bytes: u64,
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        config.check()?;
        let local = LocalNode::new(config.nodes.local);
        let asked = FabricConfig {
            local_bytes: 0,
            local_use: LocalUse::Cache,
            ..config.clone()
        };
        let sources = Sources::obtain(&asked, &local, wanted_bytes.max(BLOCK_BYTES))?;
        Self::shared_with(config, sources, wanted_bytes, observer)
    }

    /// Takes over leases that the primary obtained for this node; else as
    /// [`start_shared`](Self::start_shared).
    ///
    /// # Errors
    ///
    /// See [`FabricError`]; the leases are released.
    pub fn join_shared(
        node: &LeasingNode,
        leases: &[ComputeLease],
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        let (config, leases) = node.resume(leases)?;
        Self::shared_with(&config, Sources::Donors(leases), 0, observer)
    }

    fn shared_with(
        config: &FabricConfig,
        sources: Sources,
        wanted_bytes: u64,
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        let system = |what| move |error| FabricError::System(what, error);
        let span_pages = config.check()?;
        let span_bytes = usize::try_from(span_pages << PAGE_SHIFT).expect("64-bit host");
        let memory = GuestMemory::new(span_bytes).map_err(system("create guest memory"))?;
        let local = LocalNode::new(config.nodes.local);
        let guest_bytes: u64 = config.ram.iter().map(|range| range.bytes()).sum();
        let lent = sources.lent();
        let donors = &config.nodes.donors[..lent.len()];
        let mut nodes = Nodes::new(donors, &[]);
        let mut replicas = None;
        if config.redundancy == Redundancy::Copies {
            nodes = Nodes::replicated(donors, &[]);
            let zones = replicas::zones_of(&config.donors);
            let lent = lent.iter().map(|lent| lent.1);
            let (copies, _) = replicas::place_at_most(wanted_bytes, &zones, lent);
            replicas = Some(replicas::set(copies, &nodes, observer));
        }
        // The pager has no part in this memory: for it, all of it is here.
        let homes = HomeTable::new(local, &config.ram, None).with_links(nodes.all());
        let plan = Plan::new(homes, guest_bytes >> PAGE_SHIFT, LocalUse::Cache, &[])?;
        let lent_bytes: Vec<u64> = lent.iter().map(|(_, bytes)| *bytes).collect();
        let lent = lent.into_iter();
        let lent_by = lent.map(|(address, bytes)| config.lender(address, bytes));
        let vm = VmMemory {
            memory: Arc::new(memory),
            stats: Arc::new(PagerStats::new(nodes.links())),
            plan: Arc::new(plan),
            nodes: Arc::new(nodes),
            replicas,
            local_bytes: config.local_bytes.min(guest_bytes),
            lent_by: Arc::new(RwLock::new(lent_by.collect())),
            requested_blocks: Arc::default(),
            moves: Arc::default(),
        };
        let donors = SharedDonors::connect(config, &vm, sources, &lent_bytes, observer)?;
        Ok(Self {
            discarder: vm.discarder(None),
            view: FabricView::new(vm, None),
            transport: config.transport,
            engine: None,
            shared: Some(donors),
        })
    }

    /// Takes what stores pages at the donors of a [shared](Self::start_shared) memory. It has to be
    /// dropped before the fabric.
    #[must_use]
    pub fn take_depot(&self) -> Option<DonorDepot> {
        fabric_host::lock(&self.shared.as_ref()?.depot).take()
    }
}

impl SharedDonors {
    fn connect(
        config: &FabricConfig,
        vm: &VmMemory,
        sources: Sources,
        lent_bytes: &[u64],
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        let system = |what| move |error| FabricError::System(what, error);
        let wake = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        let wake = wake.map_err(system("create an eventfd"))?;
        // One thread uses both.
        let classes = [(TrafficClass::Urgent, &wake), (TrafficClass::Bulk, &wake)];
        let mut lent_by = vm.lent_by();
        let observer = &match &vm.replicas {
            Some(set) => {
                let threads = std::iter::once(&wake);
                replicas::wake_by(set, threads).map_err(system("duplicate an eventfd"))?;
                replicas::link_observer(set, &vm.nodes, observer)
            }
            None => Arc::clone(observer),
        };
        let Connections {
            mut urgent,
            mut bulk,
            links,
            rdma_links,
            rdma_refusals,
            ..
        } = Connections::make(config, sources, &classes, &vm.stats, &mut lent_by, observer)?;
        let paths = lent_by.iter().filter_map(|lent_by| lent_by.path.as_ref());
        let mut room = lent_bytes.to_vec();
        if let Some(set) = &vm.replicas {
            for (donor, path) in paths.clone().enumerate() {
                set.set_path(donor, Arc::clone(path));
            }
            // The thread that writes repairs as well.
            urgent = replicas::join_transports(set, Role::Reader, urgent, vm);
            bulk = replicas::join_transports(set, Role::Evictor, bulk, vm);
            room.fill(0);
            room.push(u64::from(set.copies().blocks()) * BLOCK_BYTES);
        }
        let slowest = paths
            .map(|path| (path.tier(), path.latency_estimate()))
            .max();
        let sealer = Sealer::new(vm, observer)?;
        let transports: [(TrafficClass, &mut Transports); 2] = [
            (TrafficClass::Urgent, &mut urgent),
            (TrafficClass::Bulk, &mut bulk),
        ];
        let is_sealed = lent_by.iter().map(|lent_by| lent_by.is_sealed);
        sealer.seal(is_sealed.zip(lent_bytes.iter().copied()), transports)?;
        *vm.lent_by.write().unwrap_or_else(PoisonError::into_inner) = lent_by;
        let depot = DonorDepot::new(urgent, bulk, room, wake, vm);
        Ok(Self {
            depot: Mutex::new(Some(depot)),
            leases: LeasesHeld(Leases::new(rdma_links, links)),
            rdma_refusals,
            slowest,
        })
    }
}
