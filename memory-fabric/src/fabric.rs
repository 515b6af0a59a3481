//! A VM's distributed memory as its monitor sees it: start, look at, stop.

mod adapt;
mod calibrate;
mod config;
mod connections;
mod hotplug;
mod kinds;
mod sources;

use crate::discard::{self, Discarder};
use crate::guest_memory::GuestMemory;
use crate::heat::Touches;
pub use crate::homes::LocalUse;
use crate::homes::{GuestPages, Loan, Plan};
use crate::link::rdma::RdmaLink;
use crate::link::{Link, LinkEvent, describe};
use crate::nodes::Nodes;
use crate::page::{PAGE_SHIFT, PAGES_MAX, PageRange};
use crate::page_map::PageMap;
use crate::pager::evict::Evictor;
use crate::pager::fault::FaultThread;
use crate::pager::lanes;
use crate::pager::prefetch::{Bell, Foresight, Prefetcher};
use crate::pager::{Budget, PagerError, Policies, Shared};
pub use crate::policy::{FAST_ROUND_TRIP_MAX, RDMA_ROUND_TRIP_MAX, Tier};
use crate::stats::PagerStats;
pub use crate::transport::Compression;
use crate::transport::IN_FLIGHT_MAX;
pub use crate::transport::udp::{Fingerprint, FingerprintError};
use crate::uffd::Uffd;
use crate::view::{FabricView, LentBy};
pub use crate::view::{NodeSummary, RdmaSummary};
use crate::wire::TrafficClass;
use crate::working_set::Recorder;
use adapt::Adapter;
pub use config::{DONORS_MAX, DonorAddress, FabricConfig, FabricError, SPIN_DEFAULT};
use connections::Connections;
use crossbeam_channel::bounded;
pub use hotplug::{Hotplug, HotplugError, PlugError};
pub use kinds::{PathKind, TransportKind};
use sources::Sources;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The slab of the loopback transport has nobody to renew its lease; nobody ends it either.
const LOOPBACK_LEASE: Duration = Duration::from_secs(3600);

/// What the fabric tells the monitor, on one of its own threads.
#[derive(Debug)]
pub enum FabricEvent {
    /// A donor left, came back, or is lost.
    Link(LinkEvent),
    /// The pager failed: faults are no longer served.
    Failed(String),
}

/// Takes events. Must return soon, and must not touch guest memory.
pub type FabricObserver = Arc<dyn Fn(FabricEvent) + Send + Sync>;

/// The memory of a running VM.
pub struct Fabric {
    view: FabricView,
    transport: TransportKind,
    /// Donors that are reached over UDP.
    by_udp: usize,
    threads: Vec<JoinHandle<()>>,
    links: Vec<Link>,
    rdma_links: Vec<RdmaLink>,
    adapter: Option<Adapter>,
    /// Why some donors are not read by RDMA although this was tried.
    rdma_refusals: Vec<String>,
    /// The slowest link, as it was at the start.
    start: Option<(Tier, Duration)>,
    discarder: Discarder,
    hotplug: Option<Hotplug>,
    /// Donors of the start.
    donors: usize,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric")
            .field("plan", &self.view.plan)
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
        let span_pages = config
            .ram
            .iter()
            .map(|range| range.end())
            .chain(config.hotplug.map(|pages| pages.end()))
            .max()
            .unwrap_or(0);
        if span_pages > PAGES_MAX {
            return Err(FabricError::TooLarge { pages: span_pages });
        }
        if config.donors.len() > DONORS_MAX {
            return Err(FabricError::TooManyDonors(config.donors.len()));
        }
        let lenders = config.transport.lenders(config.donors.len());
        config.nodes.check(lenders)?;
        let span_bytes = usize::try_from(span_pages << PAGE_SHIFT).expect("64-bit host");
        let system = |what| move |error| FabricError::System(what, error);
        let memory = GuestMemory::new(span_bytes).map_err(system("create guest memory"))?;
        let memory = Arc::new(memory);

        let guest_bytes: u64 = config.ram.iter().map(|range| range.bytes()).sum();
        let sources = if config.local_bytes >= guest_bytes {
            Sources::None
        } else {
            // Before anything is leased: without it nothing is of use.
            drop(Uffd::new()?);
            Sources::obtain(config, guest_bytes)?
        };
        let ids = &config.nodes;
        let lent = ids.donors.iter().zip(sources.lent());
        let loans: Vec<Loan> = lent
            .map(|(&node, (_, bytes))| Loan {
                node,
                pages: bytes >> PAGE_SHIFT,
            })
            .collect();
        let joiners = config.hotplug.map_or(&[][..], |_| &ids.joiners);
        let nodes = Nodes::new(ids.local, &ids.donors[..loans.len()], joiners);
        let guest = GuestPages {
            ram: &config.ram,
            added: config.hotplug,
        };
        let local_pages = config.local_bytes >> PAGE_SHIFT;
        let plan = Plan::new(ids.local, guest, local_pages, config.local_use, &loans)?;
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
        let donors = sources.lent().into_iter();
        let stats = Arc::new(PagerStats::new(nodes.links()));
        let homes = Arc::clone(&plan.homes);
        let mut fabric = Self {
            discarder: Discarder::new(Arc::clone(&memory), homes, Arc::clone(&stats), None),
            view: FabricView {
                shared: None,
                memory,
                stats,
                plan: Arc::new(plan),
                nodes: Arc::new(nodes),
                requested_blocks: Arc::default(),
                local_bytes: match config.hotplug {
                    Some(_) => config.local_bytes,
                    None => config.local_bytes.min(guest_bytes),
                },
                lent_by: Arc::new(RwLock::new(
                    donors
                        .map(|(address, _)| LentBy {
                            address,
                            ..LentBy::default()
                        })
                        .collect(),
                )),
            },
            transport: config.transport,
            by_udp: sources.by_udp(),
            threads: Vec::new(),
            links: Vec::new(),
            rdma_links: Vec::new(),
            adapter: None,
            rdma_refusals: Vec::new(),
            start: None,
            hotplug: None,
            donors: loans.len(),
        };
        if config.hotplug.is_some() || !matches!(sources, Sources::None) {
            fabric.start_pager(config, sources, observer)?;
        }
        Ok(fabric)
    }

    fn start_pager(
        &mut self,
        config: &FabricConfig,
        sources: Sources,
        observer: &FabricObserver,
    ) -> Result<(), FabricError> {
        let system = |what| move |error| FabricError::System(what, error);
        let bell = || EventFd::new(EFD_NONBLOCK).map_err(system("create an eventfd"));
        let uffd = Uffd::new()?;
        let homes = Arc::clone(&self.view.plan.homes);
        let nodes = Arc::clone(&self.view.nodes);
        let extents = homes.ram_extents().into_iter();
        let elsewhere = extents.filter(|extent| extent.home != nodes.local());
        for pages in elsewhere.map(|extent| extent.pages).chain(homes.added()) {
            let bytes = usize::try_from(pages.bytes()).expect("64-bit host");
            uffd.register(self.view.memory.guest_page(pages.first), bytes)?;
        }
        let (fault_wake, evict_wake, prefetch_wake) = (bell()?, bell()?, bell()?);
        let prefetches = config.prefetch || !config.replay.is_empty();
        let mut classes = vec![
            (TrafficClass::Urgent, &fault_wake),
            (TrafficClass::Bulk, &evict_wake),
        ];
        if prefetches {
            classes.push((TrafficClass::Prefetch, &prefetch_wake));
        }
        let view = &mut self.view;
        let stats = &view.stats;
        let mut lent_by = view.lent_by();
        let Connections {
            urgent,
            bulk,
            ahead,
            rdma_links,
            links,
            rdma_refusals,
            followed,
        } = Connections::make(config, sources, &classes, stats, &mut lent_by, observer)?;
        (self.rdma_links, self.links) = (rdma_links, links);
        self.rdma_refusals = rdma_refusals;
        // Faults that meet a page being dropped: at most one a page and evictor step, and the
        // fault thread never stops taking them.
        let (retries, retried) = crossbeam_channel::bounded(IN_FLIGHT_MAX * 16);
        let failed = Arc::clone(observer);
        let continue_write_protected =
            uffd.can_continue_write_protected() && !config.without_continue_write_protected;
        let recorder = config.record.then(|| Recorder::new(&homes));
        let recorder = recorder
            .transpose()
            .map_err(system("reserve room for the working set"))?;
        let span_pages = homes.span_pages();
        let paths = lent_by.iter().filter_map(|lent_by| lent_by.path.clone());
        let paths: Vec<_> = paths.collect();
        let slowest = paths
            .iter()
            .map(|path| (path.tier(), path.latency_estimate()));
        self.start = slowest.max();
        *view.lent_by.write().unwrap_or_else(PoisonError::into_inner) = lent_by;
        let joiners = nodes.links() - nodes.fixed();
        let policies = Arc::new(Policies::new(paths, nodes.fixed(), joiners));
        let shared = Arc::new(Shared {
            recorder,
            memory: Arc::clone(&view.memory),
            homes,
            nodes,
            map: PageMap::new(span_pages).map_err(system("create the page map"))?,
            uffd,
            stats: Arc::clone(&view.stats),
            touches: Touches::new(span_pages).map_err(system("create the heat map"))?,
            budget: Budget::new(view.plan.cache_pages),
            policies: Arc::clone(&policies),
            arrivals: crate::pager::queue::Arrivals::default(),
            returns: crate::pager::queue::Arrivals::default(),
            evicted: crate::pager::EvictionClock::default(),
            ahead: crate::pager::queue::Arrivals::default(),
            forecast: crate::pager::forecast::WriteForecast::default(),
            retries,
            fault_wake,
            evict_wake,
            evict_told: AtomicBool::new(false),
            prefetch_bell: Bell::new(prefetch_wake),
            stopping: AtomicBool::new(false),
            stopped_at: std::sync::OnceLock::new(),
            failed: Arc::new(move |error: PagerError| {
                failed(FabricEvent::Failed(describe(&error)))
            }),
            continue_write_protected,
            spin: config.spin,
        });
        let (foresight, orders) = Foresight::new();
        let foresight = config.prefetch.then_some(foresight);
        let [
            (to_faults, of_faults),
            (to_evictor, of_evictor),
            (to_prefetcher, of_prefetcher),
        ] = [(); 3].map(|()| lanes::channel());
        let faults = FaultThread::new(Arc::clone(&shared), urgent, of_faults, retried, foresight);
        let replay = config.replay.clone();
        let prefetcher = Prefetcher::new(Arc::clone(&shared), ahead, of_prefetcher, orders, replay);
        let (discard, discards) = discard::channel();
        let evict_bell = shared.evict_wake.try_clone();
        self.discarder = Discarder::new(
            Arc::clone(&view.memory),
            Arc::clone(&shared.homes),
            Arc::clone(&view.stats),
            Some((
                discard,
                Arc::new(evict_bell.map_err(system("duplicate an eventfd"))?),
            )),
        );
        let evictor = Evictor::new(Arc::clone(&shared), bulk, of_evictor, discards);
        view.shared = Some(Arc::clone(&shared));
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into()).spawn(run);
            thread.map_err(system("start a thread"))
        };
        self.threads
            .push(spawn("pager-fault", Box::new(|| faults.run()))?);
        self.threads
            .push(spawn("pager-evict", Box::new(|| evictor.run()))?);
        if prefetches {
            self.threads
                .push(spawn("pager-prefetch", Box::new(|| prefetcher.run()))?);
        }
        let (adapter, changes) = bounded(2 * joiners);
        if shared.homes.added().is_some() {
            let mut lanes = vec![
                (TrafficClass::Urgent, to_faults),
                (TrafficClass::Bulk, to_evictor),
            ];
            lanes.extend(prefetches.then_some((TrafficClass::Prefetch, to_prefetcher)));
            let parts = hotplug::Parts {
                requested_blocks: Arc::clone(&view.requested_blocks),
                discarder: self.discarder.clone(),
                lanes,
                lenders: Arc::clone(&view.lent_by),
                adapter,
                shared: Arc::clone(&shared),
            };
            self.hotplug = Hotplug::new(parts, config, observer);
        }
        if !followed.is_empty() || self.hotplug.is_some() {
            let adapter = Adapter::start(
                followed,
                changes,
                Arc::clone(&view.stats),
                policies,
                Arc::clone(&shared.nodes),
            );
            self.adapter = Some(adapter.map_err(system("start a thread"))?);
        }
        Ok(())
    }

    /// What can be looked at from any thread, while the VM runs and after.
    #[must_use]
    pub fn view(&self) -> &FabricView {
        &self.view
    }

    /// The VM's memory on this node.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.view.memory
    }

    /// How it is divided.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.view.plan
    }

    /// What the pager counts.
    #[must_use]
    pub fn stats(&self) -> &Arc<PagerStats> {
        &self.view.stats
    }

    /// Takes pages that the guest has freed; may outlive the fabric.
    #[must_use]
    pub fn discarder(&self) -> Discarder {
        self.discarder.clone()
    }

    /// Adds memory, where the configuration has addresses for it; may outlive the fabric.
    #[must_use]
    pub fn hotplug(&self) -> Option<Hotplug> {
        self.hotplug.clone()
    }

    /// What pages of remote faults came by at the start.
    #[must_use]
    pub fn path(&self) -> PathKind {
        let donors = self.donors;
        match self.rdma_links.len() {
            _ if donors == 0 => PathKind::None,
            _ if self.view.plan.cache_pages == 0 => PathKind::None,
            _ if self.transport == TransportKind::Loopback => PathKind::Loopback,
            0 if self.by_udp == donors => PathKind::Udp,
            0 if self.by_udp == 0 => PathKind::Tcp,
            links if links == donors => PathKind::Rdma,
            _ => PathKind::Mixed,
        }
    }

    /// What pages that are fetched ahead came by at the start.
    #[must_use]
    pub fn bulk_path(&self) -> PathKind {
        let paths = self.view.paths().into_iter().take(self.donors).flatten();
        let by_rdma: Vec<bool> = paths.map(|path| path.selection.bulk_by_rdma).collect();
        match self.path() {
            path @ (PathKind::None | PathKind::Loopback | PathKind::Udp) => path,
            _ if by_rdma.iter().all(|&by_rdma| by_rdma) => PathKind::Rdma,
            _ if by_rdma.contains(&true) || self.by_udp > 0 => PathKind::Mixed,
            _ => PathKind::Tcp,
        }
    }

    /// Why donors are not read by RDMA where that was tried, and this host has it.
    #[must_use]
    pub fn rdma_refusals(&self) -> &[String] {
        &self.rdma_refusals
    }

    /// What a page takes from the farthest donor, as it was at the start. `None` without donors.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.start.map(|(_, latency)| latency)
    }

    /// The class of the slowest link, as it was at the start. `None` without donors.
    #[must_use]
    pub fn tier(&self) -> Option<Tier> {
        self.start.map(|(tier, _)| tier)
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
        let recorder = self.view.shared.as_ref()?.recorder.as_ref()?;
        Some((recorder.runs(), recorder.is_full()))
    }

    /// Every node's part.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeSummary> {
        self.view.nodes()
    }

    /// Stops the pager and returns the leases. What comes back are the nodes' parts with the
    /// donors' own counts.
    ///
    /// Nothing may touch the guest view any more, now or later: whoever waits for a page
    /// would go on with zeros. A monitor with a vCPU that cannot be stopped must end its
    /// process instead, without calling this.
    pub fn shutdown(self) -> Vec<NodeSummary> {
        self.shutdown_telling(|| {})
    }

    /// The same, and tells of each lease that was returned.
    pub fn shutdown_telling(mut self, mut returned: impl FnMut()) -> Vec<NodeSummary> {
        self.stop();
        self.close_hotplug();
        let mut nodes = self.nodes();
        // Before the leases end.
        self.rdma_links.clear();
        for (link, node) in self.links.drain(..).zip(nodes.iter_mut().skip(1)) {
            node.own_count = Some(link.release());
            returned();
        }
        nodes
    }

    fn close_hotplug(&mut self) {
        if let Some(hotplug) = self.hotplug.take() {
            hotplug.close();
        }
    }

    fn stop(&mut self) {
        self.adapter = None;
        if let Some(shared) = &self.view.shared {
            shared.stop();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.stop();
        self.close_hotplug();
        self.rdma_links.clear();
    }
}
