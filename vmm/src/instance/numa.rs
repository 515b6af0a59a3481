//! The NUMA nodes that the guest sees.

use std::time::Duration;

use memory_fabric::fabric::{Fabric, OnLostMemory};
use memory_fabric::link::path::PathStats;
use memory_fabric::page::PAGE_SHIFT;

use crate::config::{Numa, RunConfig};
use crate::machine::NumaNode;
use crate::memory_speed;

/// Returns this node and every donor that lends memory, in order; empty for a guest with one kind
/// of memory, or one that sees only one.
pub fn nodes(config: &RunConfig, fabric: &Fabric) -> Vec<NumaNode> {
    let homes = &fabric.plan().homes;
    let alone = fabric.view().paths().is_empty() && homes.added().is_none();
    if config.numa == Numa::Flat || alone {
        return Vec::new();
    }
    let memory_of = |node| {
        homes
            .ram_extents_at(node)
            .map(|extent| {
                let start = u64::from(extent.pages.first.number()) << PAGE_SHIFT;
                (start, extent.pages.bytes())
            })
            .collect()
    };
    let near = memory_speed::measure();
    let here = NumaNode {
        cpus: (0..config.cpus).collect(),
        memory: memory_of(homes.local()),
        hotplug: None,
        is_movable: false,
        latency: near.latency,
        bandwidth_mb_s: Some(near.bandwidth_mb_s),
    };
    let donors = fabric.nodes().into_iter().skip(1);
    let donors = donors.zip(fabric.view().paths()).map(|(donor, path)| {
        let (latency, bandwidth_mb_s) = match &path {
            Some(path) => reach(path),
            // The slab of the loopback transport is memory of this host.
            None => (near.latency, Some(near.bandwidth_mb_s)),
        };
        NumaNode {
            cpus: Vec::new(),
            memory: memory_of(donor.id),
            hotplug: None,
            // What the kernel keeps there would be lost with the donor, and the guest with it.
            is_movable: config.on_lost_memory == OnLostMemory::Poison,
            latency,
            bandwidth_mb_s,
        }
    });
    let donors = donors.filter(|donor| !donor.memory.is_empty());
    let mut nodes: Vec<_> = std::iter::once(here).chain(donors).collect();
    if let Some(added) = homes.added() {
        let farthest = nodes[1..].iter().map(|node| node.latency).max();
        let start = u64::from(added.first.number()) << PAGE_SHIFT;
        nodes.push(NumaNode {
            cpus: Vec::new(),
            memory: Vec::new(),
            hotplug: Some((start, added.bytes())),
            is_movable: false,
            // The donor that will join is not known yet.
            latency: farthest.unwrap_or(JOINER_LATENCY),
            bandwidth_mb_s: None,
        });
    }
    nodes
}

/// One of the hosts that run vCPUs and share their memory: a page from another one is a transfer over
/// the network, whichever of them it is.
pub fn host(place: u8, cpus: Vec<u8>, memory: Vec<(u64, u64)>) -> NumaNode {
    NumaNode {
        cpus,
        memory,
        hotplug: None,
        is_movable: false,
        latency: match place {
            0 => HOST_LATENCY,
            _ => JOINER_LATENCY,
        },
        bandwidth_mb_s: None,
    }
}

/// Latency of a host's memory, where only its ratio to that of a network counts.
const HOST_LATENCY: Duration = Duration::from_nanos(100);

/// Assumed latency of memory that is added later if there is no donor to compare with: a page over
/// a fast network.
const JOINER_LATENCY: Duration = Duration::from_micros(20);

/// Returns the latency of a page from a donor, and the bandwidth of its path, as measured at the
/// start.
fn reach(path: &PathStats) -> (Duration, Option<u64>) {
    let faults = path.measured(path.selection.faults);
    // The estimate is current: it may be the first measurement of an idle link.
    let latency = faults.map_or_else(|| path.latency_estimate(), |measured| measured.page);
    let bulk = path.measured(path.selection.bulk);
    // Rates of links are far below 2^52 bytes a second.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let bandwidth = bulk.map(|measured| (measured.stream_bytes_per_second / 1e6) as u64);
    (latency, bandwidth)
}
