//! The NUMA nodes that the guest is told of.

use memory_fabric::fabric::Fabric;
use memory_fabric::layout::NodeId;
use memory_fabric::page::PAGE_SHIFT;
use ssi_hv::config::{Numa, RunConfig};
use ssi_hv::machine::NumaNode;
use ssi_hv::memory_speed;

/// This node and every donor that gives memory, in order; none for a guest that is to see one
/// kind of memory, or has it.
pub fn nodes(config: &RunConfig, fabric: &Fabric) -> Vec<NumaNode> {
    let layout = &fabric.plan().layout;
    if config.numa == Numa::Flat || fabric.plan().cache_pages == 0 {
        return Vec::new();
    }
    let memory_of = |node| {
        layout
            .extents_at(node)
            .map(|extent| {
                let start = u64::from(extent.pages.first.number()) << PAGE_SHIFT;
                (start, extent.pages.bytes())
            })
            .collect()
    };
    let near = memory_speed::measure();
    let here = NumaNode {
        memory: memory_of(NodeId::COMPUTE),
        latency: near.latency,
        bandwidth_mb_s: Some(near.bandwidth_mb_s),
    };
    let donors = (1..).zip(fabric.view().links()).map(|(number, link)| {
        NumaNode {
            memory: memory_of(NodeId(number)),
            // The slab of the loopback transport is memory of this host.
            latency: link.map_or(near.latency, |link| link.round_trip_min()),
            bandwidth_mb_s: link.is_none().then_some(near.bandwidth_mb_s),
        }
    });
    let donors = donors.filter(|donor| !donor.memory.is_empty());
    std::iter::once(here).chain(donors).collect()
}
