//! Describes how pages travel: in a line at the start, and in the report.

use crate::config::RunConfig;
use crate::report::{PathMeasured, PathUsed, TransportUsed};
use crate::size::ByteSize;
use memory_fabric::fabric::{Fabric, PathKind, Tier};
use memory_fabric::link::path::PathStats;
use memory_fabric::page::PAGE_SHIFT;
use memory_fabric::{BLOCK_BYTES, Measured};

/// Describes the locations of the guest's memory and their transports. Nodes keep `by_nodes` bytes at
/// donors themselves.
pub fn describe(fabric: &Fabric, by_nodes: u64, config: &RunConfig) -> String {
    let plan = fabric.plan();
    let size = |pages: u64| ByteSize::from_bytes(pages << PAGE_SHIFT);
    let more = config
        .hotplug_memory
        .map_or(String::new(), |size| format!("; up to {size} can be added"));
    if fabric.nodes().len() == 1 {
        return format!("memory {}, all of it local{more}", config.memory);
    }
    let transport = transport_used(fabric);
    let bulk = if transport.bulk == transport.kind {
        String::new()
    } else {
        format!(" with {} for what is fetched ahead", transport.bulk)
    };
    let page = fabric.round_trip().map_or(String::new(), |time| {
        format!(", a page takes {} us", time.as_micros())
    });
    let refusal = fabric
        .rdma_refusals()
        .first()
        .map_or(String::new(), |reason| format!(" ({reason})"));
    if !config.nodes.is_empty() {
        let of_nodes = config.nodes.iter().map(|node| node.memory.bytes()).sum();
        let donors = fabric.nodes().into_iter().skip(1);
        let at_donors: u64 = donors.map(|donor| donor.memory_bytes).sum();
        return format!(
            "memory {} of {} hosts with vCPUs: {} lent here, {} by others, {} of it on {} donor(s); \
             transport {}, tier {}{page}{refusal}{more}",
            config.memory,
            config.nodes.len() + 1,
            config.local_memory,
            ByteSize::from_bytes(of_nodes),
            ByteSize::from_bytes(at_donors + by_nodes),
            fabric.nodes().len() - 1,
            transport.kind,
            transport.tier,
        );
    }
    let all = plan.homes.ram_pages();
    format!(
        "memory {}: {} at home here, {} on {} donor(s) with a cache of {}; transport {}{bulk}, tier {}{page}{refusal}{more}",
        config.memory,
        size(plan.home_here_pages),
        size(all - plan.home_here_pages),
        fabric.nodes().len() - 1,
        size(plan.cache_pages),
        transport.kind,
        transport.tier,
    )
}

/// Returns the transports at the start, and the tier of the slowest link.
pub fn transport_used(fabric: &Fabric) -> TransportUsed {
    TransportUsed {
        kind: fabric.path().name().to_owned(),
        tier: fabric.tier().map_or("none", Tier::name).to_owned(),
        bulk: fabric.bulk_path().name().to_owned(),
    }
}

/// Describes donors that were named but hold nothing, or next to nothing. Nodes keep `by_nodes` bytes
/// there themselves.
pub fn unused(fabric: &Fabric, by_nodes: u64, config: &RunConfig) -> Option<String> {
    let (local, count) = (config.local_memory, config.donors.len());
    if count == 0 {
        return None;
    }
    let donors = fabric.nodes().into_iter().skip(1);
    if config.nodes.is_empty() {
        return (donors.count() == 0).then(|| {
            format!(
                "--local-memory {local} is all that the guest has, so that none of the {count} donor(s) \
                 is used; lower it, or omit --donor"
            )
        });
    }
    let held: u64 = donors.map(|donor| donor.memory_bytes).sum();
    // Each lends a block at least.
    (held + by_nodes <= count as u64 * BLOCK_BYTES).then(|| {
        let by_nodes = config.nodes.iter().map(|node| node.memory.bytes()).sum();
        format!(
            "--local-memory {local} and the nodes with vCPUs, which lend {}, are all of the guest's {}, so \
             that the {count} donor(s) hold next to nothing; give each --node less with memory=SIZE, \
             or omit --donor",
            ByteSize::from_bytes(by_nodes),
            config.shared_memory(),
        )
    })
}

/// Suggests how to make a slow link faster, if there is one.
pub fn advice(fabric: &Fabric) -> Option<String> {
    let (tier, time) = (fabric.tier()?, fabric.round_trip()?);
    if tier != Tier::Slow {
        return None;
    }
    let paths = fabric.view().paths();
    let slowest = paths
        .into_iter()
        .flatten()
        .max_by_key(|path| path.latency_estimate())?;
    Some(format!(
        "a page takes {} us, which is slow, and the guest waits for it: {}; see docs/hardware.md",
        time.as_micros(),
        remedy(fabric.path(), slowest.tcp.or(slowest.udp).as_ref())
    ))
}

/// Largest ratio of a page's time to that of a small request at which bandwidth is not the
/// bottleneck.
const PAGE_TO_SMALL_MAX: u32 = 3;

fn remedy(path: PathKind, tcp: Option<&Measured>) -> &'static str {
    let narrow = tcp.is_some_and(|tcp| tcp.page > tcp.small * PAGE_TO_SMALL_MAX);
    match path {
        PathKind::Rdma | PathKind::Mixed => {
            "RDMA adapters instead of SoftRoCE, a larger MTU, or a lossless network would help"
        }
        _ if narrow => "a network with more bandwidth would help, and so would RDMA adapters",
        _ => "RDMA adapters on both hosts, or hosts on one switch that do little else, would help",
    }
}

/// Returns the speed of the path to a donor.
pub fn path_used(path: &PathStats) -> PathUsed {
    let measured = |measured: &Measured| PathMeasured {
        small_us: measured.small.as_secs_f64() * 1e6,
        page_us: measured.page.as_secs_f64() * 1e6,
        stream_bytes_per_second: measured.stream_bytes_per_second,
    };
    PathUsed {
        faults: path.selection.faults.name().to_owned(),
        bulk: path.selection.bulk.name().to_owned(),
        tier: path.tier().name().to_owned(),
        tier_changes: path.tier_changes.get(),
        latency_estimate_us: path.latency_estimate().as_secs_f64() * 1e6,
        tcp: path.tcp.as_ref().map(measured),
        udp: path.udp.as_ref().map(measured),
        rdma: path.rdma.as_ref().map(measured),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_remedy_is_for_what_is_missing() {
        let tcp = |small, page| Measured {
            small: Duration::from_micros(small),
            page: Duration::from_micros(page),
            stream_bytes_per_second: 1e9,
        };
        assert!(remedy(PathKind::Rdma, None).contains("SoftRoCE"));
        let narrow = tcp(100, 301);
        assert!(remedy(PathKind::Tcp, Some(&narrow)).contains("bandwidth"));
        let far = tcp(100, 300);
        assert!(remedy(PathKind::Tcp, Some(&far)).contains("switch"));
        assert!(remedy(PathKind::Tcp, None).contains("switch"));
    }
}
