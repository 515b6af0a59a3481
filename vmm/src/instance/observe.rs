//! What is known of a run, for its report at the end and for who asks meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::RunConfig;
use crate::control_socket::changes::Changes;
use crate::machine::MachineHandle;
use crate::report::{
    Boot, FaultKind, Faults, FreePages, Guest, Host, HotplugUsed, MemoryUsed, Node, Percentiles,
    Prefetch, RUNNING, RdmaUsed, Report, Role, Stages, Traffic, TrafficClass, TransportUsed,
};
use crate::status::{ERRORS_MAX, Evictions, LinkNow, NodeNow, VmStatus, observed};
use devices::virtio::Balloon;
use memory_fabric::fabric::NodeSummary;
use memory_fabric::guest_memory::huge_bytes;
use memory_fabric::link::rdma::RdmaStats;
use memory_fabric::page::PAGE_SHIFT;
use memory_fabric::stats::{DonorStats, Histogram, LocalStages, PagerStats, Summary};
use memory_fabric::view::FabricView;

use super::hotplug::Plugged;
use super::links::path_used;
use super::supervisor::Supervisor;
use super::timeline::distributions;

/// A run as it can be asked about. Nothing in it leads to guest memory.
#[derive(Debug)]
pub struct Watched {
    pub name: String,
    pub started: Instant,
    pub host: Host,
    /// How often the guest was restarted before.
    pub restarts: AtomicU64,
    pub guest: Guest,
    pub supervisor: Arc<Supervisor>,
    /// Its memory, once that is there.
    pub paged: Current<Paged>,
    /// The machine, once there is one, and how long it took until it ran.
    pub machine: Current<(MachineHandle, Duration)>,
    /// Its balloon, once there is one.
    pub balloon: Current<Arc<Balloon>>,
    /// What memory can be added to it, where it was started for that.
    pub plugged: Current<Plugged>,
    /// How often that has changed, over all boots.
    pub plugged_changes: Changes,
    /// How it was started.
    pub config: RunConfig,
}

/// Something that each boot of the guest has anew.
#[derive(Debug)]
pub struct Current<T>(Mutex<Option<T>>);

impl<T> Default for Current<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T: Clone> Current<T> {
    /// That of this boot, once it is there.
    pub fn get(&self) -> Option<T> {
        self.lock().clone()
    }

    /// It is there.
    pub fn set(&self, value: T) {
        *self.lock() = Some(value);
    }

    fn clear(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of a run.
#[derive(Clone, Debug)]
pub struct Paged {
    pub transport: TransportUsed,
    pub view: FabricView,
}

/// Most memory in small pages whose huge neighbours are counted while the guest runs: the kernel
/// walks the page tables, and whoever changes mappings meanwhile waits for that.
const HUGE_WALK_BYTES_MAX: u64 = 16 << 30;

fn may_walk(view: &FabricView) -> bool {
    view.resident_bytes()
        .is_ok_and(|bytes| bytes <= HUGE_WALK_BYTES_MAX)
}

impl Watched {
    /// Lets go of the boot that has ended; gives how often there has been another one.
    pub fn begin_anew(&self) -> u64 {
        self.machine.clear();
        self.balloon.clear();
        self.plugged.clear();
        self.paged.clear();
        // Relaxed: a number to look at.
        self.restarts.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn boot(&self) -> Boot {
        let machine = self.machine.get();
        Boot {
            to_init_ms: machine.and_then(|(machine, prepared)| time_to_init(&machine, prepared)),
            restarts: self.restarts.load(Ordering::Relaxed),
        }
    }

    /// The report as it would be now.
    pub fn report(&self, paged: &Paged) -> Report {
        let mut report = Report::new(self.host.clone());
        report.guest = self.guest.clone();
        report.boot = self.boot();
        report.transport = paged.transport.clone();
        report.memory = memory(&paged.view, may_walk(&paged.view));
        fill(&mut report, &paged.view.nodes(), &paged.view);
        report.errors = self.supervisor.now().errors.lines();
        report.outcome = RUNNING.to_owned();
        report
    }

    /// What it is doing, and how it does.
    pub fn status(&self, paged: &Paged) -> VmStatus {
        self.status_with(paged, may_walk(&paged.view))
    }

    /// The same; huge pages are counted only if that is wanted.
    pub fn status_with(&self, paged: &Paged, count_huge: bool) -> VmStatus {
        let now = self.supervisor.now();
        let errors_total = now.errors.total();
        let mut errors = now.errors.lines();
        let view = &paged.view;
        let stats = view.stats();
        let newest = errors.len().saturating_sub(ERRORS_MAX);
        let links = std::iter::once(None).chain(view.links());
        let rdma = std::iter::once(None).chain(view.rdma());
        VmStatus {
            name: self.name.clone(),
            pid: std::process::id(),
            state: now.state,
            paused_by_user: now.held,
            uptime_s: self.started.elapsed().as_secs_f64(),
            guest: self.guest.clone(),
            boot: self.boot(),
            transport: paged.transport.clone(),
            memory: memory(view, count_huge),
            nodes: nodes(&view.nodes(), view)
                .into_iter()
                .zip(links)
                .zip(rdma)
                .map(|((node, link), rdma)| NodeNow {
                    node,
                    link: link.as_ref().map(|link| LinkNow {
                        reachable: link.is_reachable(),
                        round_trip_us: micros(link.round_trip()),
                        round_trip_us_min: micros(link.round_trip_min()),
                        outages: link.outages.get(),
                        rdma: rdma.as_deref().is_some_and(RdmaStats::is_connected),
                    }),
                })
                .collect(),
            faults: faults(stats),
            evictions: Evictions {
                total: stats.evictions.get(),
                clean: stats.evictions_clean.get(),
                zero: stats.evictions_zero.get(),
                cancelled: stats.evictions_cancelled.get(),
            },
            stalled_for_memory: stats.stalled_for_memory.get(),
            prefetch: prefetch(stats),
            rdma: observed::rdma_resources(),
            errors_total,
            errors: errors.split_off(newest),
            heat: None,
        }
    }
}

/// From the start of the process until the guest's init ran, in milliseconds.
pub fn time_to_init(machine: &MachineHandle, prepared: Duration) -> Option<f64> {
    let time = machine.time_to_init()?;
    Some((prepared + time).as_secs_f64() * 1e3)
}

/// How much memory there is here, and of which kind.
pub fn memory(view: &FabricView, count_huge: bool) -> MemoryUsed {
    let plan = view.plan();
    MemoryUsed {
        home_here_bytes: plan.home_here_pages << PAGE_SHIFT,
        cache_bytes: plan.cache_pages << PAGE_SHIFT,
        cached_bytes: view.cached_pages() << PAGE_SHIFT,
        resident_bytes: view.resident_bytes().unwrap_or(0),
        hotplug: view.added().map(|added| HotplugUsed {
            max_bytes: added.max_bytes,
            requested_bytes: added.requested_bytes,
            plugged_bytes: added.plugged_bytes,
        }),
        huge_bytes: if count_huge { huge_bytes() } else { None },
    }
}

/// What the pager counted, into a report.
pub fn fill(report: &mut Report, summaries: &[NodeSummary], view: &FabricView) {
    let stats = view.stats();
    report.nodes = nodes(summaries, view);
    report.evictions = stats.evictions.get();
    report.free_pages = FreePages {
        reported: stats.free_pages.reported.get(),
        dropped_here: stats.free_pages.dropped_here.get(),
        dropped_at_home: stats.free_pages.dropped_at_home.get(),
    };
    report.faults = faults(stats);
    report.distributions = Some(distributions(stats));
    report.prefetch = prefetch(stats);
}

/// Every node's part, for donors with the faults that they served.
fn nodes(summaries: &[NodeSummary], view: &FabricView) -> Vec<Node> {
    let faults = std::iter::once(None).chain(view.stats().donors.iter().map(Some));
    let paths = std::iter::once(None).chain(view.paths());
    let nodes = summaries.iter().zip(faults).zip(paths);
    nodes
        .map(|((summary, donor), path)| Node {
            id: summary.id.0.into(),
            role: donor.map_or(Role::Compute, |_| Role::Donor),
            address: summary.address.map(|address| address.to_string()),
            memory_bytes: summary.memory_bytes,
            pages_fetched: summary.pages_fetched,
            pages_written_back: summary.pages_written_back,
            faults: donor.map(of_donor),
            traffic: summary.address.and(donor).map(traffic),
            rdma: summary.rdma.map(|rdma| RdmaUsed {
                pages_read: rdma.pages_read,
                pages_written: rdma.pages_written,
                connections: rdma.connections,
                failures: rdma.failures,
            }),
            path: path.as_deref().map(path_used),
        })
        .collect()
}

fn of_donor(donor: &DonorStats) -> FaultKind {
    kind(
        &donor.remote,
        Stages {
            queue: percentiles(&donor.queue.summary()),
            fetch: percentiles(&donor.fetch.summary()),
            install: percentiles(&donor.install.summary()),
        },
    )
}

fn traffic(donor: &DonorStats) -> Traffic {
    let class = |traffic: &memory_fabric::stats::Traffic| TrafficClass {
        plain_bytes: traffic.plain_bytes(),
        wire_bytes: traffic.wire_bytes.get(),
        pages_compressed: traffic.pages_compressed.get(),
        compressing: traffic.is_compressing(),
    };
    Traffic {
        urgent: class(&donor.urgent),
        prefetch: class(&donor.prefetch),
        write_back: class(&donor.bulk),
    }
}

/// The faults so far, by kind.
fn faults(stats: &PagerStats) -> Faults {
    let stages = Stages {
        queue: percentiles(&stats.queue.summary()),
        fetch: percentiles(&stats.fetch.summary()),
        install: percentiles(&stats.install.summary()),
    };
    Faults {
        remote: kind(&stats.remote, stages),
        zero: kind(&stats.zero, local(&stats.zero_stages)),
        minor: kind(&stats.minor, local(&stats.minor_stages)),
        write_protect: kind(&stats.write_protect, Stages::default()),
        stages,
    }
}

/// The pages that were fetched ahead so far.
fn prefetch(stats: &PagerStats) -> Prefetch {
    Prefetch {
        issued: stats.prefetch_issued.get(),
        used: stats.prefetch_used.get(),
        wasted: stats.prefetch_wasted.get(),
        late: stats.prefetch_late.get(),
    }
}

fn local(stages: &LocalStages) -> Stages {
    Stages {
        queue: percentiles(&stages.queue.summary()),
        fetch: Percentiles::default(),
        install: percentiles(&stages.install.summary()),
    }
}

fn kind(total: &Histogram, stages: Stages) -> FaultKind {
    let summary = total.summary();
    FaultKind {
        count: summary.count,
        latency_us: percentiles(&summary),
        stages,
    }
}

/// Percentiles in microseconds.
pub fn percentiles(summary: &Summary) -> Percentiles {
    Percentiles {
        p50: micros(summary.p50),
        p90: micros(summary.p90),
        p99: micros(summary.p99),
        p999: micros(summary.p999),
        max: micros(summary.max),
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
