//! Metrics of a node that lends memory.

use super::families::{Families, float};
use ssi_hv_api::status::{MemberUse, NodeConnections, NodeStatus};

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
    add_connections(&mut all, &counters.connections);
    add_members(&mut all, &counters.members);
    all.add_certificate(counters.certificate_not_after);
    all.add_rdma(&counters.rdma.used);
    all.text()
}

fn add_connections(all: &mut Families, connections: &NodeConnections) {
    let (waiting, established) = (connections.waiting, connections.established);
    let states = [("waiting", waiting), ("established", established)];
    all.gauges(
        "ssi_hv_node_connections",
        "Open connections: of leases, and those that have shown no lease yet.",
        states.map(|(state, count)| (vec![("state", state.to_owned())], float(count))),
    );
    all.gauge(
        "ssi_hv_node_resting_connections",
        "Of the established connections, those that only renew leases and have no thread of their own.",
        float(connections.resting),
    );
    all.gauge(
        "ssi_hv_node_buffers_bytes",
        "Bytes that the buffers of all connections may occupy.",
        float(connections.buffers.in_use),
    );
    all.gauges(
        "ssi_hv_node_buffers_limit_bytes",
        "Limit of these bytes: connections for pages beyond it are refused.",
        connections
            .buffers
            .limit
            .map(|limit| (Vec::new(), float(limit))),
    );
    let dropped = &connections.dropped;
    let reasons = [
        ("address", dropped.address),
        ("total", dropped.total),
        ("silent", dropped.silent),
        ("handshake", dropped.handshake),
        ("full", dropped.full),
    ];
    all.counters(
        "ssi_hv_node_connections_dropped_total",
        "Connections dropped before they had shown a lease, by the reason.",
        reasons.map(|(reason, count)| (vec![("reason", reason.to_owned())], count)),
    );
}

fn add_members(all: &mut Families, members: &[MemberUse]) {
    type Value = fn(&MemberUse) -> u64;
    let families: [(&str, &str, Value); 4] = [
        (
            "ssi_hv_node_member_bytes",
            "Memory of the leases of a member; absent without rules.",
            |member| member.bytes,
        ),
        (
            "ssi_hv_node_member_leases",
            "Leases of a member; absent without rules.",
            |member| member.leases,
        ),
        (
            "ssi_hv_node_member_connections",
            "Connections of a member; absent without rules.",
            |member| member.connections,
        ),
        (
            "ssi_hv_node_member_pinned_bytes",
            "Memory of a member that is registered for RDMA; absent without rules.",
            |member| member.pinned_bytes,
        ),
    ];
    for (name, help, value) in families {
        let samples = members.iter().map(|member| {
            let labels = vec![("member", member.identity.clone())];
            (labels, float(value(member)))
        });
        all.gauges(name, help, samples);
    }
}
