//! Metrics of a node that lends memory.

use super::families::{Families, float};
use ssi_hv_api::status::NodeStatus;

/// Formats all metrics of a node.
#[must_use]
pub fn node(status: &NodeStatus) -> String {
    let counters = &status.counters;
    let mut all = Families::of_process(status.uptime_s);
    for (name, help, value) in [
        (
            "ssi_hv_node_memory_bytes",
            "Memory that the node can lend.",
            counters.memory_bytes,
        ),
        (
            "ssi_hv_node_lent_bytes",
            "Memory that it has lent.",
            counters.lent_bytes,
        ),
        (
            "ssi_hv_node_leases",
            "Current leases.",
            u64::try_from(counters.leases).unwrap_or(u64::MAX),
        ),
        (
            "ssi_hv_node_rdma_connections",
            "RDMA connections of VMs.",
            counters.rdma.connections.in_use,
        ),
    ] {
        all.gauge(name, help, float(value));
    }
    let limit = counters.rdma.connections.limit;
    all.gauges(
        "ssi_hv_node_rdma_connections_limit",
        "Limit of simultaneous RDMA connections; absent without RDMA.",
        limit.map(|limit| (Vec::new(), float(limit))),
    );
    for (name, help, value) in [
        (
            "ssi_hv_node_leases_granted_total",
            "Leases that were granted.",
            counters.leases_granted,
        ),
        (
            "ssi_hv_node_leases_expired_total",
            "Leases that were not renewed in time.",
            counters.leases_expired,
        ),
        (
            "ssi_hv_node_pages_read_total",
            "Pages sent to VMs; pages read by RDMA are not counted here.",
            counters.pages_read,
        ),
        (
            "ssi_hv_node_pages_written_total",
            "Pages stored for VMs.",
            counters.pages_written,
        ),
        (
            "ssi_hv_node_pages_dropped_total",
            "Pages dropped because guests had freed them.",
            counters.pages_dropped,
        ),
    ] {
        all.counter(name, help, value);
    }
    all.add_rdma(&counters.rdma.used);
    all.text()
}
