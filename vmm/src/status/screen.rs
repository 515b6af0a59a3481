//! The status as text: one screen for each VM.

pub mod heat;
pub mod placement;
mod rdma;
pub mod shared;

use std::fmt::Write;

use super::{ClusterNow, NodeNow, NodeStatus, VmState, VmStatus};
use crate::config::cpu_list::CpuList;
use crate::report::{
    DrainUsed, FaultKind, Percentiles, RebalanceUsed, ReplicasUsed, Role, Traffic, TrafficClass,
    listed,
};
use crate::size::ByteSize;

/// Formats a VM on one screen.
#[must_use]
pub fn vm(status: &VmStatus) -> String {
    let mut text = String::new();
    let state = match status.state {
        VmState::Starting => "starting",
        VmState::Running => "running",
        VmState::Paused if status.paused_by_user => "paused by `ssi-hv pause`",
        VmState::Paused => "paused, a donor cannot be reached",
        VmState::Ending => "ending",
    };
    let mut line = |content: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", content.trim_end());
    };
    line(format!(
        "VM {} (process {}): {state}, up {}",
        status.name,
        status.pid,
        duration(status.uptime_s)
    ));
    let init = status.boot.to_init_ms.map_or_else(
        || "init not seen".to_owned(),
        |ms| format!("init after {}", duration(ms / 1e3)),
    );
    let irqchip = if status.guest.irqchip == "user" {
        ", irqchip user"
    } else {
        ""
    };
    line(format!(
        "{} vCPU(s){irqchip}, {}; transport {}, tier {}",
        status.guest.cpus, init, status.transport.kind, status.transport.tier
    ));
    if let Some(cpus) = &status.guest.cpu_pinning {
        line(pinning(cpus, status.guest.dedicated_cpus));
    }
    let memory = &status.memory;
    line(String::new());
    line(format!(
        "memory     {} of the guest: {} at home here, cache {} of {}",
        size(status.guest.memory_bytes),
        size(memory.home_here_bytes),
        size(memory.cached_bytes),
        size(memory.cache_bytes),
    ));
    let huge = match memory.huge_bytes {
        Some(bytes) => format!(", {} of it in huge pages", size(bytes)),
        None => String::new(),
    };
    line(format!(
        "           {} in memory here{huge}",
        size(memory.resident_bytes)
    ));
    if let Some(replicas) = &memory.replicas {
        let name = replicas.stripes.as_ref().map_or("copies ", |_| "stripes");
        line(format!("{name}    {}", copies(replicas)));
        if replicas.in_one_zone_bytes > 0 {
            let bytes = size(replicas.in_one_zone_bytes);
            line(format!("           {bytes} have both copies in one zone"));
        }
        if replicas.wrong_pieces > 0 {
            let pieces = replicas.wrong_pieces;
            line(format!("           donors sent {pieces} wrong pieces"));
        }
    }
    if let Some(lost) = &memory.lost {
        line(format!(
            "lost       {} in {} pages with {} donor(s); {} machine checks",
            size(lost.bytes),
            lost.pages,
            lost.nodes.len(),
            lost.machine_checks,
        ));
        if !lost.ranges.is_empty() {
            let ranges = listed(&lost.ranges, lost.ranges_omitted, 2);
            line(format!("           now at {ranges}"));
        }
    }
    if let Some(cluster) = &status.cluster {
        line(format!("cluster    {}", of_cluster(cluster)));
    }
    if let Some(drain) = &memory.drain {
        line(drained(drain));
    }
    if let Some(rebalance) = &memory.rebalance {
        line(rebalanced(rebalance));
    }
    if let Some(sealing) = &memory.sealing {
        line(format!(
            "sealing    {} pages sealed, {} opened, {} rejected",
            sealing.pages_sealed, sealing.pages_opened, sealing.pages_rejected
        ));
    }
    if let Some(hotplug) = &memory.hotplug {
        line(format!(
            "added      {} plugged of {} requested, {} is the limit",
            size(hotplug.plugged_bytes),
            size(hotplug.requested_bytes),
            size(hotplug.max_bytes)
        ));
    }
    line(format!(
        "evictions  {}: {} clean, {} zero, {} unchanged; {} cancelled; {} faults waited",
        status.evictions.total,
        status.evictions.clean,
        status.evictions.zero,
        status.evictions.unchanged,
        status.evictions.cancelled,
        status.stalled_for_memory
    ));
    for limited in &status.rate_limits {
        line(format!(
            "limits     {} was throttled {} time(s)",
            limited.device, limited.throttled
        ));
    }
    let ahead = &status.prefetch;
    line(format!(
        "ahead      {} pages fetched: {} used, {} wasted; {} touched on their way",
        ahead.issued, ahead.used, ahead.wasted, ahead.late
    ));
    if status.coherence.is_none() {
        line(wire(&status.nodes));
    }
    for text in rdma::lines(&status.rdma).lines() {
        line(text.to_owned());
    }
    line(String::new());
    match &status.coherence {
        Some(coherence) => shared::lines(status, coherence)
            .into_iter()
            .for_each(&mut line),
        None => tables(&mut line, status),
    }
    if !status.errors.is_empty() {
        line(String::new());
        for error in &status.errors {
            line(format!("error: {error}"));
        }
    }
    text
}

/// Adds the tables of donors and of faults.
fn tables(line: &mut impl FnMut(String), status: &VmStatus) {
    nodes(line, &status.nodes);
    line(String::new());
    line(row("fault, us", "count", ["p50", "p90", "p99", "max"]));
    let faults = &status.faults;
    for (name, kind) in [
        ("remote", &faults.remote),
        ("zero", &faults.zero),
        ("minor", &faults.minor),
        ("write protect", &faults.write_protect),
    ] {
        fault_rows(line, name, kind);
    }
    for node in &status.nodes {
        if let Some(kind) = node.node.faults.as_ref().filter(|_| status.nodes.len() > 2) {
            fault_rows(line, &format!("from node {}", node.node.id), kind);
        }
    }
}

/// Longest list of CPUs that fits a line.
const CPU_LIST_CHARS_MAX: usize = 30;

/// Describes the etcd of `--cluster`.
fn of_cluster(cluster: &ClusterNow) -> String {
    let nodes = format!("{} node(s) in etcd", cluster.nodes);
    match cluster.connected {
        true => nodes,
        // Why is in the log, and in JSON.
        false => format!(
            "{nodes}, which has not answered for {:.0} s",
            cluster.since_s
        ),
    }
}

/// Describes how much memory on donors has two copies.
fn copies(replicas: &ReplicasUsed) -> String {
    let lacking = match &replicas.stripes {
        Some(stripes) => format!("lack pieces of {stripes}"),
        None => "have one copy".to_owned(),
    };
    format!(
        "{}: {} of {} {lacking}; {} restored; {} out",
        replicas.state(),
        size(replicas.degraded_bytes),
        size(replicas.bytes),
        size(replicas.repaired_bytes),
        replicas.out.len(),
    )
}

/// Describes the last rebalancing.
fn rebalanced(rebalance: &RebalanceUsed) -> String {
    let error = rebalance.error.as_ref();
    format!(
        "rebalance  {}, {} of {} have moved{}",
        rebalance.state.word(),
        size(rebalance.moved_bytes),
        size(rebalance.bytes),
        error.map_or(String::new(), |error| format!("; {error}"))
    )
}

/// Describes the last donor that was drained.
fn drained(drain: &DrainUsed) -> String {
    let error = drain.error.as_ref();
    format!(
        "drain      node {}: {}, {} of {} have moved{}",
        drain.node,
        drain.state.word(),
        size(drain.moved_bytes),
        size(drain.bytes),
        error.map_or(String::new(), |error| format!("; {error}")),
    )
}

/// Describes the host CPU of each vCPU.
fn pinning(cpus: &[u32], dedicated: bool) -> String {
    let mut list = CpuList(cpus.to_vec()).to_string();
    if list.len() > CPU_LIST_CHARS_MAX {
        let end = list[..CPU_LIST_CHARS_MAX - 4].rfind(',').unwrap_or(0);
        list.truncate(end);
        list.push_str(",...");
    }
    let which = if dedicated {
        "its own CPU"
    } else {
        "a CPU of the host"
    };
    format!("pinned     each vCPU to {which}, in order: {list}")
}

/// Describes the network traffic of pages with all donors, and where they are compressed now.
fn wire(nodes: &[NodeNow]) -> String {
    let all: Vec<Traffic> = nodes.iter().filter_map(|now| now.node.traffic).collect();
    let classes = || all.iter().flat_map(Traffic::classes);
    let sum = |of: fn(&TrafficClass) -> u64| classes().map(of).sum();
    let compressing = |of: fn(&Traffic) -> TrafficClass| all.iter().any(|t| of(t).compressing);
    let now: Vec<&str> = [
        ("urgent", compressing(|traffic| traffic.urgent)),
        ("prefetch", compressing(|traffic| traffic.prefetch)),
        ("write-back", compressing(|traffic| traffic.write_back)),
    ]
    .into_iter()
    .filter_map(|(name, compressing)| compressing.then_some(name))
    .collect();
    let now = match now.len() {
        0 => "off".to_owned(),
        3 => "on".to_owned(),
        _ => format!("on: {}", now.join(", ")),
    };
    format!(
        "wire       {} of pages as {}; {} compressed; now {now}",
        size(sum(|class| class.plain_bytes)),
        size(sum(|class| class.wire_bytes)),
        classes().map(|class| class.pages_compressed).sum::<u64>(),
    )
}

fn nodes(line: &mut impl FnMut(String), nodes: &[NodeNow]) {
    line(format!(
        "{:<4} {:<7} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7}  address",
        "node", "role", "memory", "fetched", "written", "page, us", "tier", "outages"
    ));
    for NodeNow { node, link } in nodes {
        let role = match node.role {
            Role::Compute => "compute",
            Role::Donor => "donor",
        };
        let outages = link.map_or("-".to_owned(), |link| link.outages.to_string());
        let (page, tier) = match (link, &node.path) {
            (Some(link), _) if !link.reachable => ("away".to_owned(), "-"),
            (_, Some(path)) => (micros(path.latency_estimate_us), path.tier.as_str()),
            _ => ("-".to_owned(), "-"),
        };
        line(format!(
            "{:<4} {role:<7} {:>9} {:>9} {:>9} {page:>9} {tier:>8} {outages:>7}  {}",
            node.id,
            size(node.memory_bytes),
            node.pages_fetched,
            node.pages_written_back,
            node.address.as_deref().unwrap_or("-"),
        ));
    }
}

/// Adds a line for a kind of fault, and one for each of its stages with a duration.
fn fault_rows(line: &mut impl FnMut(String), name: &str, kind: &FaultKind) {
    line(row(
        name,
        &kind.count.to_string(),
        columns(&kind.latency_us),
    ));
    let stages = &kind.stages;
    for (stage, times) in [
        ("  queue", &stages.queue),
        ("  fetch", &stages.fetch),
        ("  install", &stages.install),
    ] {
        if times.max > 0.0 {
            line(row(stage, "", columns(times)));
        }
    }
}

fn columns(times: &Percentiles) -> [String; 4] {
    [times.p50, times.p90, times.p99, times.max].map(micros)
}

fn row<T: AsRef<str>>(name: &str, count: &str, times: [T; 4]) -> String {
    let mut line = format!("{name:<14} {count:>10}");
    for time in times {
        // Writing to a string does not fail.
        let _ = write!(line, " {:>11}", time.as_ref());
    }
    line
}

/// Formats a node in several lines.
#[must_use]
pub fn node(status: &NodeStatus) -> String {
    let counters = &status.counters;
    let rdma = &counters.rdma;
    let connections = match rdma.connections.in_use {
        0 => String::new(),
        count => format!("; {count} RDMA connections"),
    };
    format!(
        "node (process {}): up {}, listens on {}\n\
         lends {} of {} to {} VM(s); {} leases granted, {} expired\n\
         {} pages read, {} written{connections}\n{}",
        status.pid,
        duration(status.uptime_s),
        counters.listen,
        size(counters.lent_bytes),
        size(counters.memory_bytes),
        counters.leases,
        counters.leases_granted,
        counters.leases_expired,
        counters.pages_read,
        counters.pages_written,
        rdma::lines(&rdma.used),
    )
}

fn size(bytes: u64) -> String {
    ByteSize::from_bytes(bytes).rounded()
}

fn micros(us: f64) -> String {
    format!("{us:.1}")
}

/// Formats a duration.
pub(crate) fn duration(seconds: f64) -> String {
    if seconds < 120.0 {
        return format!("{seconds:.1} s");
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and no process runs for 2^64 minutes"
    )]
    let minutes = (seconds / 60.0) as u64;
    if minutes < 120 {
        format!("{minutes} min")
    } else {
        format!("{} h {} min", minutes / 60, minutes % 60)
    }
}
