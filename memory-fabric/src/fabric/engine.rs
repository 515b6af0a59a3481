//! The engine of a VM with remote memory: links to donors, the pager's threads, the thread that
//! follows the links' speed, and hot-plug.

use super::adapt::Adapter;
use super::connections::Connections;
use super::hotplug::{BootEvents, Drains, Hotplug, Parts};
use super::leases::{Leases, LeasesHeld};
use super::replicas;
use super::sealing::Sealer;
use super::sources::Sources;
use super::threads::PagerThreads;
use super::{FabricConfig, FabricError, FabricEvent, FabricObserver};
use crate::discard::Discarder;
use crate::fingerprint::FingerprintTable;
use crate::heat::Touches;
use crate::link::{Link, describe};
use crate::page_map::PageMap;
use crate::pager::evict::Evictor;
use crate::pager::fault::FaultThread;
use crate::pager::mailbox::{EvictorMailbox, FaultMailbox, PrefetcherMailbox};
use crate::pager::prefetch::{FaultObserver, Prefetcher};
use crate::pager::{Budget, Lifecycle, Losses, PagerError, Policies, Shared};
use crate::policy::Tier;
use crate::protection::{self, WriteProtection};
use crate::uffd::Uffd;
use crate::view::VmMemory;
use crate::wire::TrafficClass;
use crate::working_set::Recorder;
use crossbeam_channel::bounded;
use fabric_replicas::Role;
use std::io;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

fn system(what: &'static str) -> impl FnOnce(io::Error) -> FabricError {
    move |error| FabricError::System(what, error)
}

/// The engine of a fabric. Dropping it stops it, and returns the leases; the fields are dropped in
/// order.
pub(super) struct Engine {
    adapter: Option<Adapter>,
    threads: PagerThreads,
    hotplug: ClosedOnDrop,
    leases: LeasesHeld,
    discarder: Discarder,
    rdma_refusals: Vec<String>,
    /// The slowest link at the start.
    slowest: Option<(Tier, Duration)>,
}

/// Hot-plug whose donors leave on drop, even if clones of it live on.
struct ClosedOnDrop(Hotplug);

impl Drop for ClosedOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What of write protection can be relied on: probed once in a process, and logged once.
fn write_protection(uffd: &Uffd) -> WriteProtection {
    static FOUND: OnceLock<WriteProtection> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let kept = protection::is_kept();
        let found = WriteProtection::of(&kept, uffd.can_continue_write_protected());
        if found == WriteProtection::None {
            let cause = match &kept {
                Ok(_) => {
                    "this kernel loses userfaultfd's write protection when it maps a page anew"
                }
                Err(_) => {
                    "it is not known whether this kernel keeps userfaultfd's write protection"
                }
            };
            let error = kept.err().map(|error| describe(&error));
            tracing::warn!(
                error,
                "{cause}; every page that is fetched counts as changed and is written back \
                 (`ssi-hv doctor` has the remedy)"
            );
        }
        found
    })
}

impl Engine {
    /// Connects to all lenders, and starts the pager.
    pub(super) fn start(
        config: &FabricConfig,
        vm: &VmMemory,
        sources: Sources,
        observer: &FabricObserver,
        protection_max: WriteProtection,
    ) -> Result<Self, FabricError> {
        let uffd = Uffd::new()?;
        let homes = &vm.plan.homes;
        let nodes = &vm.nodes;
        let extents = homes.ram_extents().into_iter();
        let elsewhere = extents.filter(|extent| extent.home != homes.local());
        for pages in elsewhere.map(|extent| extent.pages).chain(homes.added()) {
            let bytes = usize::try_from(pages.bytes()).expect("64-bit host");
            uffd.register(vm.memory.guest_page(pages.first), bytes)?;
        }
        let no_eventfd = || system("create an eventfd");
        let (faults, fault_inbox) = FaultMailbox::new().map_err(no_eventfd())?;
        let (evictor, evictor_inbox) = EvictorMailbox::new().map_err(no_eventfd())?;
        let (prefetcher, prefetcher_inbox) = PrefetcherMailbox::new().map_err(no_eventfd())?;
        let prefetches = config.prefetch || !config.replay.is_empty();
        let mut wakes = vec![
            (TrafficClass::Urgent, faults.port().event_fd()),
            (TrafficClass::Bulk, evictor.port().event_fd()),
        ];
        if prefetches {
            wakes.push((TrafficClass::Prefetch, prefetcher.port().event_fd()));
        }
        let classes = wakes.iter().map(|(class, _)| *class).collect();
        let mut lent_by = vm.lent_by();
        let lent_bytes: Vec<u64> = sources.lent().iter().map(|(_, bytes)| *bytes).collect();
        let boot_events = BootEvents::new(observer);
        let of_links = match &vm.replicas {
            Some(set) => {
                let threads = wakes.iter().map(|(_, wake)| *wake);
                replicas::wake_by(set, threads).map_err(system("duplicate an eventfd"))?;
                replicas::link_observer(set, nodes, observer)
            }
            None => boot_events.observer(),
        };
        let Connections {
            mut urgent,
            mut bulk,
            mut ahead,
            // Drop order: when the start fails, RDMA ends before the leases.
            links,
            rdma_links,
            rdma_refusals,
            followed,
        } = Connections::make(config, sources, &wakes, &vm.stats, &mut lent_by, &of_links)?;
        let paths = lent_by.iter().filter_map(|lent_by| lent_by.path.clone());
        let paths: Vec<_> = paths.collect();
        if let Some(set) = &vm.replicas {
            for (donor, path) in paths.iter().enumerate() {
                set.set_path(donor, Arc::clone(path));
            }
            urgent = replicas::join_transports(set, Role::Reader, urgent, vm);
            bulk = replicas::join_transports(set, Role::Evictor, bulk, vm);
            ahead = replicas::join_transports(set, Role::Reader, ahead, vm);
        }
        let sealer = Sealer::new(vm, &of_links)?;
        let transports = [
            (TrafficClass::Urgent, &mut urgent),
            (TrafficClass::Bulk, &mut bulk),
            (TrafficClass::Prefetch, &mut ahead),
        ];
        let is_sealed = lent_by.iter().map(|lent_by| lent_by.is_sealed);
        sealer.seal(is_sealed.zip(lent_bytes), transports)?;
        let slowest = paths
            .iter()
            .map(|path| (path.tier(), path.latency_estimate()))
            .max();
        *vm.lent_by.write().unwrap_or_else(PoisonError::into_inner) = lent_by;
        let failed = Arc::clone(observer);
        let protection = write_protection(&uffd).min(protection_max);
        let recorder = config.record.then(|| Recorder::new(homes)).transpose();
        let span_pages = homes.span_pages();
        let joiners = nodes.joiners();
        let policies = Arc::new(Policies::new(paths, nodes.fixed(), joiners));
        let shared = Arc::new(Shared {
            recorder: recorder.map_err(system("reserve room for the working set"))?,
            memory: Arc::clone(&vm.memory),
            homes: Arc::clone(homes),
            nodes: Arc::clone(nodes),
            map: PageMap::new(span_pages).map_err(system("create the page map"))?,
            fingerprints: FingerprintTable::new(vm.plan.cache_pages)
                .map_err(system("create the table of fingerprints"))?,
            uffd,
            stats: Arc::clone(&vm.stats),
            touches: Touches::new(span_pages).map_err(system("create the heat map"))?,
            budget: Budget::new(vm.plan.cache_pages),
            policies: Arc::clone(&policies),
            forecast: crate::pager::forecast::WriteForecast::default(),
            lifecycle: Lifecycle::new(Arc::new(move |error: PagerError| {
                failed(FabricEvent::Failed(describe(&error)));
            })),
            losses: Losses::new(nodes.links()),
            faults,
            evictor,
            prefetcher,
            copy_write_protected: protection >= WriteProtection::OnlyByCopy,
            continue_write_protected: protection == WriteProtection::Full,
            spin: config.spin,
        });
        let discarder = vm.discarder(Some(shared.evictor.discards()));
        let fault_observer = config.prefetch.then(FaultObserver::new);

        let mut threads = PagerThreads::new(&shared);
        let faults = FaultThread::new(Arc::clone(&shared), urgent, fault_inbox, fault_observer);
        threads.spawn("pager-fault", || faults.run())?;
        let evictor = Evictor::new(Arc::clone(&shared), bulk, evictor_inbox);
        threads.spawn("pager-evict", || evictor.run())?;
        if prefetches {
            let (shared, replay) = (Arc::clone(&shared), config.replay.clone());
            let prefetcher = Prefetcher::new(shared, ahead, prefetcher_inbox, replay);
            threads.spawn("pager-prefetch", || prefetcher.run())?;
        }

        // Each joins and leaves, and each of the start may leave.
        let (to_adapter, changes) = bounded(2 * joiners + nodes.fixed());
        let leases = Leases::new(rdma_links, links);
        let parts = Parts {
            requested_blocks: Arc::clone(&vm.requested_blocks),
            discarder: discarder.clone(),
            classes,
            lenders: Arc::clone(&vm.lent_by),
            adapter: to_adapter,
            sealer,
            leases: leases.clone(),
            boot_events,
            replicas: vm.replicas.clone(),
            moves: Arc::clone(&vm.moves),
            shared,
        };
        let hotplug = ClosedOnDrop(Hotplug::new(parts, config, observer));
        let follows = !followed.is_empty() || config.hotplug.is_some();
        let adapter = follows
            .then(|| {
                let (stats, nodes) = (Arc::clone(&vm.stats), Arc::clone(nodes));
                Adapter::start(followed, changes, stats, policies, nodes)
            })
            .transpose();
        Ok(Self {
            adapter: adapter.map_err(system("start a thread"))?,
            threads,
            hotplug,
            leases: LeasesHeld(leases),
            discarder,
            rdma_refusals,
            slowest,
        })
    }

    /// Returns the state that the pager's threads share.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        self.threads.shared()
    }

    pub(super) fn discarder(&self) -> &Discarder {
        &self.discarder
    }

    pub(super) fn hotplug(&self) -> Option<&Hotplug> {
        let has_addresses = self.shared().homes.added().is_some();
        has_addresses.then_some(&self.hotplug.0)
    }

    pub(super) fn drains(&self) -> Drains {
        self.hotplug.0.drains()
    }

    /// Returns why donors are not used over RDMA although this was tried.
    pub(super) fn rdma_refusals(&self) -> &[String] {
        &self.rdma_refusals
    }

    /// Returns tier and latency of the slowest link at the start.
    pub(super) fn slowest(&self) -> Option<(Tier, Duration)> {
        self.slowest
    }

    /// Stops everything except the leases of the guest's start, and returns their links.
    /// A donor that was drained has none.
    pub(super) fn stop(self) -> Vec<Option<Link>> {
        let Self {
            adapter,
            threads,
            hotplug,
            leases,
            ..
        } = self;
        // Drop order: no thread of the pager uses a connection that has ended.
        drop((adapter, threads, hotplug));
        leases.0.end_rdma();
        leases.0.take_links()
    }
}
