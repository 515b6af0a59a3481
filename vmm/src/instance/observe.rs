//! The observable state of a VM, for its report at the end and for clients.

use std::time::Duration;

use memory_fabric::fabric::NodeSummary;
use memory_fabric::guest_memory::huge_bytes;
use memory_fabric::link::rdma::RdmaStats;
use memory_fabric::page::PAGE_SHIFT;
use memory_fabric::stats::{DonorStats, Histogram, LocalStages, PagerStats, Summary};
use memory_fabric::view::FabricView;

use super::drains::used;
use super::hotplug::HotplugMemory;
use super::links::path_used;
use super::lost_node::extents;
use super::rebalance::rebalanced;
use super::timeline::distributions;
use super::vm::{BootedVm, Instance};
use crate::compute::AtDonors;
use crate::report::{
    Boot, FaultKind, Faults, FreePages, HotplugUsed, LostUsed, MemoryUsed, Node, Percentiles,
    Prefetch, RUNNING, RateLimited, RdmaUsed, ReplicasUsed, Report, Role, SealingUsed, Stages,
    Traffic, TrafficClass,
};
use crate::status::{ERRORS_MAX, Evictions, LinkNow, NodeNow, VmState, VmStatus, observed};

/// Limit of memory in small pages up to which huge pages are counted at run time: the kernel walks
/// the page tables, and blocks changes of mappings during the walk.
const HUGE_WALK_BYTES_MAX: u64 = 16 << 30;

fn may_walk(view: &FabricView) -> bool {
    view.resident_bytes()
        .is_ok_and(|bytes| bytes <= HUGE_WALK_BYTES_MAX)
}

/// Returns the report of a VM as of now.
pub fn report(instance: &Instance, booted: &BootedVm) -> Report {
    let view = &booted.view;
    let mut report = Report::new(instance.host.clone());
    report.guest = instance.guest.clone();
    report.boot = boot(instance, booted);
    report.transport = booted.transport.clone();
    report.memory = memory(view, may_walk(view), booted.machine_checks());
    fill(&mut report, &view.nodes(), view);
    fill_nodes(&mut report, booted);
    report.rate_limits = rate_limits(booted);
    report.errors = instance.supervisor.now().errors.lines();
    report.outcome = RUNNING.to_owned();
    report
}

fn boot(instance: &Instance, booted: &BootedVm) -> Boot {
    Boot {
        to_init_ms: booted.time_to_init_ms(),
        restarts: instance.restarts(),
    }
}

/// Returns the status of a VM.
pub fn status(instance: &Instance, booted: &BootedVm) -> VmStatus {
    status_with(instance, booted, may_walk(&booted.view))
}

/// Like [`status`]; counts huge pages only on request.
pub fn status_with(instance: &Instance, booted: &BootedVm, count_huge: bool) -> VmStatus {
    let now = instance.supervisor.now();
    let errors_total = now.errors.total();
    let mut errors = now.errors.lines();
    let view = &booted.view;
    let stats = view.stats();
    let newest = errors.len().saturating_sub(ERRORS_MAX);
    let reported = booted.reported(now.state == VmState::Paused);
    let mut memory = memory(view, count_huge, booted.machine_checks());
    add_shared(booted, &mut memory);
    let (nodes, vcpus, of_several) = match reported {
        Some(reported) => {
            let nodes = reported.nodes.into_iter();
            let nodes = nodes.map(|node| NodeNow { node, link: None });
            let mut donors = linked_nodes(view, 0).split_off(1);
            let all = donors.iter_mut().map(|donor| &mut donor.node);
            add_nodes(&reported.at_donors, all, &mut memory);
            let nodes = nodes.chain(donors).collect();
            let of_several = (reported.coherence, reported.policy);
            (nodes, reported.vcpus, Some(of_several))
        }
        None => (linked_nodes(view, instance.guest.cpus), Vec::new(), None),
    };
    let (coherence, vcpu_policy) = of_several.unzip();
    VmStatus {
        name: instance.name.clone(),
        pid: std::process::id(),
        state: now.state,
        paused_by_user: now.held,
        uptime_s: instance.started.elapsed().as_secs_f64(),
        guest: instance.guest.clone(),
        boot: boot(instance, booted),
        transport: booted.transport.clone(),
        memory,
        nodes,
        vcpus,
        coherence,
        vcpu_policy,
        faults: faults(stats),
        evictions: Evictions {
            total: stats.evictions.get(),
            clean: stats.evictions_clean.get(),
            zero: stats.evictions_zero.get(),
            unchanged: stats.evictions_unchanged.get(),
            cancelled: stats.evictions_cancelled.get(),
        },
        stalled_for_memory: stats.stalled_for_memory.get(),
        prefetch: prefetch(stats),
        rate_limits: rate_limits(booted),
        rdma: observed::rdma_resources(),
        certificate_not_after: instance.certificate_not_after(),
        cluster: instance.cluster(),
        errors_total,
        errors: errors.split_off(newest),
        heat: None,
        placement: None,
    }
}

/// Returns the node of all vCPUs and the donors, with their links.
fn linked_nodes(view: &FabricView, cpus: u32) -> Vec<NodeNow> {
    let links = std::iter::once(None).chain(view.links());
    let rdma = std::iter::once(None).chain(view.rdma());
    let mut nodes = nodes(&view.nodes(), view);
    all_cpus_here(&mut nodes, cpus);
    let nodes = nodes.into_iter().zip(links).zip(rdma);
    nodes
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
        .collect()
}

/// Returns the devices with limits, and how often these were reached.
pub fn rate_limits(booted: &BootedVm) -> Vec<RateLimited> {
    let limiters = booted.limiters.iter();
    limiters
        .map(|limiter| {
            let limits = limiter.limits();
            RateLimited {
                device: limiter.device().to_owned(),
                bytes_per_second: limits.bytes.map(|rate| rate.per_second),
                operations_per_second: limits.operations.map(|rate| rate.per_second),
                throttled: limiter.throttled(),
            }
        })
        .collect()
}

/// Returns the amounts of local memory by kind.
pub fn memory(view: &FabricView, count_huge: bool, machine_checks: u64) -> MemoryUsed {
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
        replicas: view.replicas().map(|replicas| ReplicasUsed {
            bytes: replicas.bytes,
            stripes: replicas.layout.map(|layout| layout.to_string()),
            degraded_bytes: replicas.degraded_bytes,
            in_one_zone_bytes: replicas.in_one_zone_bytes,
            repaired_bytes: replicas.repaired_bytes,
            losses: replicas.losses,
            wrong_pieces: replicas.wrong_pieces,
            out: replicas.out.iter().map(|node| node.0.into()).collect(),
        }),
        drain: view.drain().map(|drain| used(&drain)),
        rebalance: view.rebalance().map(|last| rebalanced(&last)),
        moved_by_heat_bytes: view.moved_by_heat_bytes(),
        lost: lost(view, machine_checks),
        sealing: sealing(&view.nodes(), view),
    }
}

/// Returns the pages that were sealed and opened, if a node has sealed ones.
fn sealing(summaries: &[NodeSummary], view: &FabricView) -> Option<SealingUsed> {
    let stats = &view.stats().sealing;
    let is_sealed = summaries.iter().any(|node| node.is_sealed);
    is_sealed.then(|| SealingUsed {
        pages_sealed: stats.sealed.get(),
        pages_opened: stats.opened.get(),
        pages_rejected: stats.rejected.get(),
    })
}

/// Returns the pages that were lost with donors, if a donor was.
fn lost(view: &FabricView, machine_checks: u64) -> Option<LostUsed> {
    let lost = view.lost();
    if lost.nodes.is_empty() {
        return None;
    }
    let extents = extents(lost.extents);
    Some(LostUsed {
        nodes: lost.nodes.iter().map(|node| node.0.into()).collect(),
        pages: lost.lost_pages,
        bytes: lost.lost_pages << PAGE_SHIFT,
        ranges: extents.ranges,
        ranges_omitted: extents.ranges_omitted,
        poisoned: lost.poisoned_pages,
        recovered: lost.recovered_pages,
        machine_checks,
    })
}

/// Copies the pager's counters into a report.
pub fn fill(report: &mut Report, summaries: &[NodeSummary], view: &FabricView) {
    let stats = view.stats();
    // Again, after the summaries: a VM that ends still writes pages, and looks for lost ones.
    report.memory.sealing = sealing(summaries, view);
    if let Some(before) = &report.memory.lost {
        report.memory.lost = lost(view, before.machine_checks);
    }
    report.nodes = nodes(summaries, view);
    report.evictions = stats.evictions.get();
    report.evictions_unchanged = stats.evictions_unchanged.get();
    report.free_pages = FreePages {
        reported: stats.free_pages.reported.get(),
        dropped_here: stats.free_pages.dropped_here.get(),
        dropped_at_home: stats.free_pages.dropped_at_home.get(),
    };
    report.faults = faults(stats);
    report.distributions = Some(distributions(stats));
    report.prefetch = prefetch(stats);
}

/// Enters the nodes on which vCPUs are.
pub fn fill_nodes(report: &mut Report, booted: &BootedVm) {
    add_shared(booted, &mut report.memory);
    match booted.reported(false) {
        Some(reported) => {
            // Only the donors are those of the pager.
            let mut donors = std::mem::take(&mut report.nodes).split_off(1);
            add_nodes(&reported.at_donors, donors.iter_mut(), &mut report.memory);
            report.nodes = reported.nodes.into_iter().chain(donors).collect();
            report.coherence = Some(reported.coherence);
            report.vcpu_policy = Some(reported.policy);
        }
        None => all_cpus_here(&mut report.nodes, report.guest.cpus),
    }
}

/// Enters the memory that is added to what hosts with vCPUs share, of which the fabric knows nothing.
fn add_shared(booted: &BootedVm, memory: &mut MemoryUsed) {
    if memory.hotplug.is_none() {
        memory.hotplug = booted.hotplug.as_ref().map(HotplugMemory::used);
    }
}

/// Adds what other nodes keep at donors by themselves to what this host does.
fn add_nodes<'a>(
    at_donors: &AtDonors,
    donors: impl Iterator<Item = &'a mut Node>,
    memory: &mut MemoryUsed,
) {
    for donor in donors {
        let of_nodes = at_donors.donors.iter().find(|one| one.id == donor.id);
        let of_nodes = of_nodes.copied().unwrap_or_default();
        for (count, more) in [
            (&mut donor.memory_bytes, of_nodes.memory_bytes),
            (&mut donor.pages_fetched, of_nodes.pages_fetched),
            (&mut donor.pages_written_back, of_nodes.pages_written_back),
        ] {
            *count = count.saturating_add(more);
        }
    }
    if let Some(sealing) = &mut memory.sealing {
        let [sealed, opened, rejected] = at_donors.sealing;
        sealing.pages_sealed = sealing.pages_sealed.saturating_add(sealed);
        sealing.pages_opened = sealing.pages_opened.saturating_add(opened);
        sealing.pages_rejected = sealing.pages_rejected.saturating_add(rejected);
    }
}

fn all_cpus_here(nodes: &mut [Node], cpus: u32) {
    if let Some(node) = nodes.first_mut() {
        node.cpus = (0..cpus).collect();
    }
}

/// Returns every node's part, for donors with the faults that they served.
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
            sealed: summary.is_sealed,
            faults: donor.map(of_donor),
            traffic: summary.address.and(donor).map(traffic),
            rdma: summary.rdma.map(|rdma| RdmaUsed {
                pages_read: rdma.pages_read,
                pages_written: rdma.pages_written,
                connections: rdma.connections,
                failures: rdma.failures,
            }),
            path: path.as_deref().map(path_used),
            ..Node::default()
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

/// Returns the faults so far, by kind.
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

/// Returns the prefetched pages so far.
fn prefetch(stats: &PagerStats) -> Prefetch {
    Prefetch {
        issued: stats.prefetch_issued.get(),
        used: stats.prefetch_used.get(),
        wasted: stats.prefetch_wasted.get(),
        late: stats.prefetch_late.get(),
        replayed: stats.replayed.get(),
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

/// Converts percentiles to microseconds.
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
