//! Metrics of a VM.

use super::donors::{self, DonorTimes, each, node_label};
use super::families::{Families, Labels, flag, float};
use super::replicas;
use super::shared::{self, NodeTimes};
use ssi_hv_api::report::{
    Distribution, DrainUsed, PathUsed, RateLimited, RebalanceUsed, Role, TrafficClass,
};
use ssi_hv_api::status::{LinkNow, NodeNow, VmState, VmStatus};

/// Durations of one kind of fault, or of one of its stages.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultTimes {
    /// `remote`, `zero`, `minor` or `write_protect`.
    pub kind: &'static str,
    /// `queue`, `fetch` or `install`; `None` for the whole.
    pub stage: Option<&'static str>,
    /// The distribution of durations.
    pub times: Distribution,
}

const STATES: [(VmState, &str); 4] = [
    (VmState::Starting, "starting"),
    (VmState::Running, "running"),
    (VmState::Paused, "paused"),
    (VmState::Ending, "ending"),
];

/// Tiers of links; see `memory_fabric::transport`.
const TIERS: [&str; 3] = ["rdma", "fast-tcp", "slow"];

/// Formats the metrics of a VM whose memory does not exist yet.
#[must_use]
pub fn starting(uptime_s: f64) -> String {
    let mut all = Families::of_process(uptime_s);
    add_state(&mut all, VmState::Starting);
    all.text()
}

/// Formats all metrics of a VM.
#[must_use]
pub fn vm(
    status: &VmStatus,
    times: &[FaultTimes],
    donors: &[DonorTimes],
    nodes: &[NodeTimes],
) -> String {
    let mut all = Families::of_process(status.uptime_s);
    add_state(&mut all, status.state);
    add_guest(&mut all, status);
    add_memory(&mut all, status);
    add_faults(&mut all, times);
    add_donors(&mut all, &status.nodes);
    donors::add_times(&mut all, donors);
    shared::add(&mut all, status, nodes);
    add_rate_limits(&mut all, &status.rate_limits);
    all.add_certificate(status.certificate_not_after);
    all.add_rdma(&status.rdma);
    all.text()
}

fn add_state(all: &mut Families, now: VmState) {
    all.gauges(
        "ssi_hv_vm_state",
        "State of the VM: 1 for the current state, 0 for others.",
        STATES.map(|(state, name)| (vec![("state", name.to_owned())], flag(state == now))),
    );
}

fn add_rate_limits(all: &mut Families, limited: &[RateLimited]) {
    all.counters(
        "ssi_hv_device_throttled_total",
        "How often a request or packet waited for the limits of its disk or network card.",
        limited
            .iter()
            .map(|one| (vec![("device", one.device.clone())], one.throttled)),
    );
}

fn add_guest(all: &mut Families, status: &VmStatus) {
    let transport = &status.transport;
    let labels = vec![
        ("vm", status.name.clone()),
        ("transport", transport.kind.clone()),
        ("bulk", transport.bulk.clone()),
    ];
    all.gauges(
        "ssi_hv_vm_info",
        "The VM: always 1, with its name and its transports as labels.",
        [(labels, 1.0)],
    );
    all.gauge(
        "ssi_hv_vm_paused_by_user",
        "Whether a user has paused it: 1 or 0.",
        flag(status.paused_by_user),
    );
    all.counter(
        "ssi_hv_vm_restarts_total",
        "How often the guest rebooted and was booted again.",
        status.boot.restarts,
    );
    all.counter(
        "ssi_hv_vm_errors_total",
        "Errors that the VM has reported; `ssi-hv status` has their text.",
        status.errors_total,
    );
    all.gauge(
        "ssi_hv_vm_cpus",
        "Virtual CPUs.",
        f64::from(status.guest.cpus),
    );
    let init = status.boot.to_init_ms;
    all.gauges(
        "ssi_hv_vm_init_seconds",
        "From the start until the guest's init ran; absent until then.",
        init.map(|ms| (Vec::new(), ms / 1e3)),
    );
}

fn add_memory(all: &mut Families, status: &VmStatus) {
    let memory = &status.memory;
    for (name, help, bytes) in [
        (
            "ssi_hv_guest_memory_bytes",
            "Memory of the guest.",
            status.guest.memory_bytes,
        ),
        (
            "ssi_hv_home_here_bytes",
            "Memory of the guest with its home on this host.",
            memory.home_here_bytes,
        ),
        (
            "ssi_hv_cache_limit_bytes",
            "How much of the rest may be local at once.",
            memory.cache_bytes,
        ),
        (
            "ssi_hv_cached_bytes",
            "How much of the rest is local or in transit.",
            memory.cached_bytes,
        ),
        (
            "ssi_hv_resident_bytes",
            "Memory of this host that the guest's memory uses.",
            memory.resident_bytes,
        ),
    ] {
        all.gauge(name, help, float(bytes));
    }
    replicas::add(all, memory.replicas.as_ref());
    add_drain(all, memory.drain.as_ref());
    add_rebalance(all, memory.rebalance.as_ref());
    replicas::add_moved_by_heat(all, memory.moved_by_heat_bytes);
    if let Some(lost) = &memory.lost {
        for (name, help, count) in [
            (
                "ssi_hv_lost_pages_total",
                "Pages of which a lost donor had the only copy.",
                lost.pages,
            ),
            (
                "ssi_hv_poisoned_pages_total",
                "How often a lost page was poisoned, because the guest used it.",
                lost.poisoned,
            ),
            (
                "ssi_hv_recovered_pages_total",
                "Lost pages that the guest has freed, and may use again.",
                lost.recovered,
            ),
            (
                "ssi_hv_machine_checks_total",
                "Machine checks that the guest got for lost pages.",
                lost.machine_checks,
            ),
        ] {
            all.counter(name, help, count);
        }
    }
    if let Some(sealing) = &memory.sealing {
        for (name, help, count) in [
            (
                "ssi_hv_pages_sealed_total",
                "Pages that were sealed for donors.",
                sealing.pages_sealed,
            ),
            (
                "ssi_hv_pages_opened_total",
                "Sealed pages that were fetched and opened.",
                sealing.pages_opened,
            ),
            (
                "ssi_hv_pages_rejected_total",
                "Pages that did not open: a donor or the network had changed them.",
                sealing.pages_rejected,
            ),
        ] {
            all.counter(name, help, count);
        }
    }
    let (evictions, ahead) = (&status.evictions, &status.prefetch);
    for (name, help, count) in [
        (
            "ssi_hv_evictions_total",
            "Pages dropped locally to free memory.",
            evictions.total,
        ),
        (
            "ssi_hv_evictions_clean_total",
            "Of these, clean pages.",
            evictions.clean,
        ),
        (
            "ssi_hv_evictions_zero_total",
            "Of these, pages of zeroes.",
            evictions.zero,
        ),
        (
            "ssi_hv_evictions_unchanged_total",
            "Of these, pages that counted as dirty and were equal to their home's copy.",
            evictions.unchanged,
        ),
        (
            "ssi_hv_evictions_cancelled_total",
            "Evictions that a touch cancelled; not among the others.",
            evictions.cancelled,
        ),
        (
            "ssi_hv_memory_stalls_total",
            "Faults that waited until local memory was free.",
            status.stalled_for_memory,
        ),
        (
            "ssi_hv_prefetch_pages_total",
            "Pages fetched before they were touched.",
            ahead.issued,
        ),
        (
            "ssi_hv_prefetch_used_pages_total",
            "Of these, pages that were touched, or mapped along with one that was.",
            ahead.used,
        ),
        (
            "ssi_hv_prefetch_wasted_pages_total",
            "Of these, pages that were evicted untouched.",
            ahead.wasted,
        ),
        (
            "ssi_hv_prefetch_late_total",
            "Touches of a page while it was in transit.",
            ahead.late,
        ),
    ] {
        all.counter(name, help, count);
    }
}

fn add_drain(all: &mut Families, drain: Option<&DrainUsed>) {
    let Some(drain) = drain else { return };
    for (name, help, bytes) in [
        (
            "ssi_hv_drain_bytes",
            "Memory that a donor held when it began to be drained.",
            drain.bytes,
        ),
        (
            "ssi_hv_drain_moved_bytes",
            "How much of it has moved to other donors.",
            drain.moved_bytes,
        ),
    ] {
        let labels = vec![("node", drain.node.to_string())];
        all.gauges(name, help, [(labels, float(bytes))]);
    }
}

fn add_rebalance(all: &mut Families, rebalance: Option<&RebalanceUsed>) {
    let Some(rebalance) = rebalance else { return };
    all.gauge(
        "ssi_hv_rebalance_bytes",
        "Memory at donors that was to move when it was rebalanced last.",
        float(rebalance.bytes),
    );
    all.gauge(
        "ssi_hv_rebalance_moved_bytes",
        "How much of it has moved.",
        float(rebalance.moved_bytes),
    );
}

fn add_faults(all: &mut Families, times: &[FaultTimes]) {
    let kind = |of: &FaultTimes| ("kind", of.kind.to_owned());
    let whole = times.iter().filter(|of| of.stage.is_none());
    all.histograms(
        "ssi_hv_fault_seconds",
        "How long faults took, from reading the fault until the page was mapped.",
        whole.map(|of| (vec![kind(of)], &of.times)),
    );
    let stages = times.iter().filter_map(|of| {
        let labels = vec![kind(of), ("stage", of.stage?.to_owned())];
        Some((labels, &of.times))
    });
    all.histograms(
        "ssi_hv_fault_stage_seconds",
        "How long each stage of faults took.",
        stages,
    );
}

fn add_donors(all: &mut Families, nodes: &[NodeNow]) {
    let is_donor = |now: &&NodeNow| now.node.role == Role::Donor;
    let donors: Vec<&NodeNow> = nodes.iter().filter(is_donor).collect();
    all.gauges(
        "ssi_hv_donor_info",
        "A donor: always 1, with its address as a label.",
        donors.iter().filter_map(|now| {
            let address = ("address", now.node.address.clone()?);
            Some((vec![node_label(now), address], 1.0))
        }),
    );
    all.gauges(
        "ssi_hv_donor_memory_bytes",
        "Memory of the guest with its home there.",
        each(&donors, |now| Some(float(now.node.memory_bytes))),
    );
    all.gauges(
        "ssi_hv_donor_sealed",
        "Whether it gets sealed pages only: 1 or 0.",
        each(&donors, |now| Some(flag(now.node.sealed))),
    );
    all.counters(
        "ssi_hv_donor_pages_fetched_total",
        "Pages fetched from it.",
        each(&donors, |now| Some(now.node.pages_fetched)),
    );
    all.counters(
        "ssi_hv_donor_pages_written_back_total",
        "Pages written back to it.",
        each(&donors, |now| Some(now.node.pages_written_back)),
    );
    all.counters(
        "ssi_hv_donor_faults_total",
        "Remote faults that it served.",
        each(&donors, |now| now.node.faults.map(|faults| faults.count)),
    );
    add_links(all, &donors);
    add_traffic(all, &donors);
    donors::add_rdma(all, &donors);
}

/// Returns the speed of the path to a donor while it has a link; the measurement of a donor that
/// left is outdated.
fn path_now(now: &NodeNow) -> Option<&PathUsed> {
    now.link.and(now.node.path.as_ref())
}

fn add_links(all: &mut Families, donors: &[&NodeNow]) {
    let of_link =
        |value: fn(&LinkNow) -> f64| each(donors, move |now| now.link.as_ref().map(value));
    all.gauges(
        "ssi_hv_donor_reachable",
        "Whether the donor is reachable, as far as is known: 1 or 0.",
        of_link(|link| flag(link.reachable)),
    );
    all.gauges(
        "ssi_hv_donor_round_trip_seconds",
        "The last round trip of a small request; one is sent every 2 s.",
        of_link(|link| link.round_trip_us / 1e6),
    );
    all.gauges(
        "ssi_hv_donor_rdma",
        "Whether pages are currently read from it by RDMA: 1 or 0.",
        of_link(|link| flag(link.rdma)),
    );
    all.counters(
        "ssi_hv_donor_outages_total",
        "How often the donor became unreachable.",
        each(donors, |now| Some(now.link?.outages)),
    );
    all.gauges(
        "ssi_hv_donor_page_seconds",
        "Latency of a page, by the latest estimate.",
        each(donors, |now| Some(path_now(now)?.latency_estimate_us / 1e6)),
    );
    let tiers = donors.iter().flat_map(|now| {
        path_now(now).into_iter().flat_map(|path| {
            TIERS.map(|tier| {
                let labels = vec![node_label(now), ("tier", tier.to_owned())];
                (labels, flag(path.tier == tier))
            })
        })
    });
    all.gauges(
        "ssi_hv_donor_tier",
        "Tier of the link: 1 for the current tier, 0 for others.",
        tiers,
    );
    all.counters(
        "ssi_hv_donor_tier_changes_total",
        "How often the tier changed.",
        each(donors, |now| Some(path_now(now)?.tier_changes)),
    );
}

fn add_traffic(all: &mut Families, donors: &[&NodeNow]) {
    let classes: Vec<(Labels, TrafficClass)> = donors
        .iter()
        .filter_map(|now| Some((now, now.node.traffic?)))
        .flat_map(|(now, traffic)| {
            let classes = [
                ("urgent", traffic.urgent),
                ("prefetch", traffic.prefetch),
                ("write_back", traffic.write_back),
            ];
            classes.map(|(name, class)| {
                let labels = vec![node_label(now), ("class", name.to_owned())];
                (labels, class)
            })
        })
        .collect();
    let of = |value: fn(&TrafficClass) -> u64| {
        let samples = classes.iter();
        samples.map(move |(labels, class)| (labels.clone(), value(class)))
    };
    all.counters(
        "ssi_hv_donor_page_bytes_total",
        "Bytes of pages that travelled in frames (not by RDMA), before compression.",
        of(|class| class.plain_bytes),
    );
    all.counters(
        "ssi_hv_donor_wire_bytes_total",
        "Bytes sent for them, without headers.",
        of(|class| class.wire_bytes),
    );
    all.counters(
        "ssi_hv_donor_compressed_pages_total",
        "Pages that were sent as fewer bytes, zero pages included.",
        of(|class| class.pages_compressed),
    );
}
