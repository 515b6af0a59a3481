//! Metrics of the memory that nodes with vCPUs share.

mod hot;
mod policy;

use super::families::{Families, Labels, flag, float};
use ssi_hv_api::report::{Distribution, NodeClock, NodeState, Role, Transfers};
use ssi_hv_api::status::{NodeNow, VcpuState, VmStatus};

/// Durations that a compute node has measured.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeTimes {
    /// The node.
    pub node: u32,
    /// How long its requests took.
    pub requests: Distribution,
    /// How long it held pages.
    pub holds: Distribution,
    /// How long its RDMA WRITEs to other nodes took; empty without RDMA.
    pub ring_writes: Distribution,
}

const STATES: [(VcpuState, &str); 6] = [
    (VcpuState::Running, "running"),
    (VcpuState::Halted, "halted"),
    (VcpuState::Offline, "offline"),
    (VcpuState::Page, "page"),
    (VcpuState::Paused, "paused"),
    (VcpuState::Unknown, "unknown"),
];

fn label(node: u32) -> (&'static str, String) {
    ("node", node.to_string())
}

/// Adds the metrics of a VM whose vCPUs are on several nodes; nothing for another one.
pub(super) fn add(all: &mut Families, status: &VmStatus, times: &[NodeTimes]) {
    let Some(coherence) = &status.coherence else {
        return;
    };
    let is_compute = |now: &&NodeNow| now.node.role == Role::Compute;
    let nodes: Vec<&NodeNow> = status.nodes.iter().filter(is_compute).collect();
    all.gauges(
        "ssi_hv_compute_info",
        "A node that runs vCPUs: always 1, with its address as a label.",
        nodes.iter().map(|now| {
            let address = now.node.address.clone();
            let address = address.unwrap_or_else(|| "here".to_owned());
            let labels = vec![label(now.node.id), ("address", address)];
            (labels, 1.0)
        }),
    );
    all.gauges(
        "ssi_hv_compute_up",
        "Whether the node reports: 1 or 0.",
        each(&nodes, |now| {
            Some(flag(now.node.state == Some(NodeState::Up)))
        }),
    );
    all.gauges(
        "ssi_hv_compute_round_trip_seconds",
        "Its shortest round trip to node 0 in the last second; absent for node 0.",
        each(&nodes, |now| Some(now.node.round_trip_us? / 1e6)),
    );
    add_clocks(all, &nodes);
    let peers = nodes.iter().flat_map(|now| {
        now.node.peers.iter().map(|peer| {
            let labels = vec![label(now.node.id), ("peer", peer.node.to_string())];
            (labels, peer)
        })
    });
    let peers: Vec<_> = peers.collect();
    all.gauges(
        "ssi_hv_compute_peer_info",
        "How memory travels from the node to another one: always 1, with the transport as a label.",
        peers.iter().map(|(labels, peer)| {
            let transport = ("transport", peer.transport.name().to_owned());
            ([&labels[..], &[transport]].concat(), 1.0)
        }),
    );
    all.counters(
        "ssi_hv_compute_peer_connections_total",
        "Connections for that; more than one after others broke.",
        peers
            .iter()
            .map(|(labels, peer)| (labels.clone(), peer.connections.into())),
    );
    all.counters(
        "ssi_hv_compute_peer_pages_received_total",
        "Pages that the node got from the other one.",
        peers
            .iter()
            .map(|(labels, peer)| (labels.clone(), peer.pages_received)),
    );
    let vcpus = nodes.iter().flat_map(|now| {
        STATES.map(|(state, name)| {
            let of_node = status.vcpus.iter().filter(|cpu| cpu.node == now.node.id);
            let count = of_node.filter(|cpu| cpu.state == state).count();
            let labels = vec![label(now.node.id), ("state", name.to_owned())];
            (labels, float(count as u64))
        })
    });
    all.gauges(
        "ssi_hv_compute_vcpus",
        "Virtual CPUs on the node, by what they do or wait for.",
        vcpus,
    );
    if let Some(used) = &status.vcpu_policy {
        policy::add(all, used);
    }
    add_transfers(all, &nodes);
    hot::add(all, &coherence.hottest);
    let of = |time: fn(&NodeTimes) -> &Distribution| {
        let samples = times.iter();
        samples.map(move |of| (vec![label(of.node)], time(of)))
    };
    all.histograms(
        "ssi_hv_compute_request_seconds",
        "How long requests for pages took that another node took part in.",
        of(|times| &times.requests),
    );
    all.histograms(
        "ssi_hv_compute_hold_seconds",
        "How long pages were held for their vCPU.",
        of(|times| &times.holds),
    );
    let by_rdma = times.iter().filter(|of| !of.ring_writes.is_empty());
    all.histograms(
        "ssi_hv_compute_rdma_write_seconds",
        "How long RDMA WRITEs to other nodes took, from posting them until their completion.",
        by_rdma.map(|of| (vec![label(of.node)], &of.ring_writes)),
    );
}

/// A sample for each node that has this value.
fn each<'a, T>(
    nodes: &'a [&NodeNow],
    value: impl Fn(&NodeNow) -> Option<T> + 'a,
) -> impl Iterator<Item = (Labels, T)> + 'a {
    nodes
        .iter()
        .filter_map(move |now| Some((vec![label(now.node.id)], value(now)?)))
}

/// How the time of each node follows that of node 0. A node reports this, so it may be anything.
fn add_clocks(all: &mut Families, nodes: &[&NodeNow]) {
    type Of = fn(&NodeClock) -> Option<f64>;
    let gauges: [(&str, &str, Of); 6] = [
        (
            "ssi_hv_compute_clock_offset_seconds",
            "What is added to the counter of the node's host to get that of node 0.",
            |clock| Some(clock.offset_us / 1e6),
        ),
        (
            "ssi_hv_compute_clock_error_seconds",
            "How far the time of the node's vCPUs may be from that of node 0.",
            |clock| Some(clock.error_us_max / 1e6),
        ),
        (
            "ssi_hv_compute_clock_rate_ratio",
            "How much faster the counter of node 0 is, as a share; absent until two comparisons agree.",
            |clock| Some(clock.rate_ppm? / 1e6),
        ),
        (
            "ssi_hv_compute_clock_rate_error_ratio",
            "By how much that may be wrong if the rates have not changed.",
            |clock| Some(clock.rate_ppm_error_max? / 1e6),
        ),
        (
            "ssi_hv_compute_clock_scaled",
            "Whether KVM scales the counter, because the hosts' nominal rates differ: 1 or 0.",
            |clock| Some(flag(clock.scaled)),
        ),
        (
            "ssi_hv_compute_clock_stepped_seconds",
            "The sum of the steps by which that time was corrected; steps back are negative.",
            |clock| Some(clock.steps_us / 1e6),
        ),
    ];
    for (name, help, of) in gauges {
        let value = move |now: &NodeNow| of(now.node.clock.as_ref()?);
        let finite = move |now: &NodeNow| value(now).filter(|value| value.is_finite());
        all.gauges(name, help, each(nodes, finite));
    }
    all.counters(
        "ssi_hv_compute_clock_steps_total",
        "How often the time of all the node's vCPUs was corrected at once.",
        each(nodes, |now| Some(now.node.clock?.steps)),
    );
}

fn add_transfers(all: &mut Families, nodes: &[&NodeNow]) {
    type Of = fn(&Transfers) -> u64;
    let by_kind = |name: &'static str, kinds: [(&'static str, Of); 3]| {
        let samples = nodes.iter().flat_map(move |now| {
            let transfers = now.node.transfers.into_iter();
            transfers.flat_map(move |transfers| {
                kinds.map(|(kind, of)| {
                    let labels = vec![label(now.node.id), (name, kind.to_owned())];
                    (labels, of(&transfers))
                })
            })
        });
        samples.collect::<Vec<_>>()
    };
    all.counters(
        "ssi_hv_compute_requests_total",
        "Pages that the node asked for, by what for.",
        by_kind(
            "kind",
            [
                ("read", |t| t.reads),
                ("write", |t| t.writes),
                ("upgrade", |t| t.upgrades),
            ],
        ),
    );
    all.counters(
        "ssi_hv_compute_pages_received_total",
        "Pages that the node got, by where they came from; those of zeroes do not travel.",
        by_kind(
            "from",
            [
                ("node", |t| t.pages_received),
                ("home", |t| t.pages_from_home),
                ("zeroes", |t| t.pages_zero),
            ],
        ),
    );
    let counters: [(&str, &str, Of); 13] = [
        (
            "ssi_hv_compute_faults_total",
            "Faults of the node, also of those that needed no other node.",
            |t| t.faults,
        ),
        (
            "ssi_hv_compute_pages_sent_total",
            "Pages sent to another node.",
            |t| t.pages_sent,
        ),
        (
            "ssi_hv_compute_invalidations_total",
            "Copies given up because another node writes.",
            |t| t.invalidations,
        ),
        (
            "ssi_hv_compute_holds_total",
            "Pages that were held for their vCPU.",
            |t| t.holds,
        ),
        (
            "ssi_hv_compute_early_losses_total",
            "Pages that a vCPU lost before it progressed.",
            |t| t.early_losses,
        ),
        (
            "ssi_hv_compute_requested_ahead_total",
            "Pages requested ahead of their fault, together with others that a vCPU lost.",
            |t| t.requested_ahead,
        ),
        (
            "ssi_hv_compute_tokens_total",
            "Starvation tokens received.",
            |t| t.tokens,
        ),
        (
            "ssi_hv_compute_blocks_split_total",
            "Blocks of the node that were split.",
            |t| t.blocks_split,
        ),
        (
            "ssi_hv_compute_evictions_total",
            "Pages evicted by the node.",
            |t| t.evictions,
        ),
        (
            "ssi_hv_compute_write_backs_total",
            "Of these, pages that were written to their home.",
            |t| t.write_backs,
        ),
        (
            "ssi_hv_compute_memory_stalls_total",
            "Faults that waited until memory of the node was free.",
            |t| t.stalled_for_memory,
        ),
        (
            "ssi_hv_compute_table_changes_total",
            "Changes of merged page tables that the node's vCPUs made.",
            |t| t.table_changes,
        ),
        (
            "ssi_hv_compute_held_for_tables_total",
            "Messages that waited until such changes were made everywhere.",
            |t| t.held_for_tables,
        ),
    ];
    for (name, help, of) in counters {
        let samples = each(nodes, move |now| now.node.transfers.as_ref().map(of));
        all.counters(name, help, samples);
    }
    all.gauges(
        "ssi_hv_compute_split_blocks",
        "Blocks in the node's directory that are split now.",
        each(nodes, |now| {
            Some(float(now.node.transfers.as_ref()?.split_blocks))
        }),
    );
    all.gauges(
        "ssi_hv_compute_merged_tables",
        "Page tables that the node has and other nodes can write as well.",
        each(nodes, |now| {
            Some(float(now.node.transfers.as_ref()?.merged_tables))
        }),
    );
}

#[cfg(test)]
mod tests;
