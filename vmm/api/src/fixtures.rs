//! Statuses for tests.

use crate::report::{
    Boot, Coherence, DrainState, DrainUsed, Extent, FaultKind, Faults, Guest, HotPage, HotPageNode,
    LostUsed, MemoryUsed, Node, NodeClock, NodeState, PathUsed, Peer, PeerTransport, Percentiles,
    PolicyKind, PolicyUsed, Prefetch, RateLimited, RebalanceState, RebalanceUsed, ReplicasUsed,
    Role, SealingUsed, Stages, StayReason, Traffic, TrafficClass, Transfers, TransportUsed,
    VcpuStays,
};
use crate::status::heat::BlockStatus;
use crate::status::{
    ClusterNow, ConnectionsDropped, Evictions, LinkNow, MemberUse, NodeConnections, NodeCounters,
    NodeNow, NodeStatus, SCHEMA, VcpuNow, VcpuState, VmState, VmStatus, rdma,
};

/// Faults of one kind, all times from their median.
#[must_use]
pub fn kind(count: u64, p50: f64) -> FaultKind {
    let times = Percentiles {
        p50,
        p90: p50 * 2.0,
        p99: p50 * 3.0,
        p999: p50 * 4.0,
        max: p50 * 5.0,
    };
    FaultKind {
        count,
        latency_us: times,
        stages: Stages {
            queue: times,
            ..Stages::default()
        },
    }
}

fn traffic(plain_mib: u64, wire_mib: u64, compressing: bool) -> TrafficClass {
    TrafficClass {
        plain_bytes: plain_mib << 20,
        wire_bytes: wire_mib << 20,
        pages_compressed: plain_mib - wire_mib,
        compressing,
    }
}

fn node(id: u32, faults: Option<FaultKind>) -> NodeNow {
    NodeNow {
        node: Node {
            id,
            role: if id == 0 { Role::Compute } else { Role::Donor },
            address: (id > 0).then(|| format!("10.0.0.{id}:7000")),
            memory_bytes: 1 << 30,
            pages_fetched: 5,
            pages_written_back: 6,
            sealed: id == 2,
            faults,
            traffic: (id > 0).then_some(Traffic {
                urgent: traffic(100, 100, false),
                prefetch: traffic(20, 15, id == 2),
                write_back: traffic(30, 10, true),
            }),
            rdma: None,
            cpus: if id == 0 { vec![0, 1] } else { Vec::new() },
            path: (id > 0).then(|| PathUsed {
                tier: "fast-tcp".into(),
                latency_estimate_us: 61.4,
                ..PathUsed::default()
            }),
            ..Node::default()
        },
        link: (id > 0).then_some(LinkNow {
            reachable: id == 1,
            round_trip_us: 80.0,
            round_trip_us_min: 52.0,
            outages: 3,
            rdma: false,
        }),
    }
}

fn resources() -> rdma::RdmaResources {
    let in_use = |in_use, limit| rdma::InUse { in_use, limit };
    rdma::RdmaResources {
        pinned_bytes: in_use(5 << 20, None),
        resources: vec![rdma::DeviceInUse {
            device: "rxe0".into(),
            queue_pairs: in_use(4, Some(1_048_576)),
            completion_queues: in_use(4, Some(1_048_576)),
            memory_regions: in_use(2, Some(524_287)),
            protection_domains: in_use(1, None),
        }],
    }
}

/// The status of a node that lends by RDMA.
#[must_use]
pub fn node_status() -> NodeStatus {
    let end = |queue_pair, address: &str| rdma::Endpoint {
        queue_pair,
        address: address.into(),
        lid: 0,
    };
    NodeStatus {
        pid: 18,
        uptime_s: 3.0,
        counters: NodeCounters {
            schema: SCHEMA,
            listen: "10.0.0.1:7000".into(),
            memory_bytes: 1 << 30,
            lent_bytes: 64 << 20,
            leases: 1,
            leases_granted: 2,
            leases_expired: 0,
            pages_read: 7,
            pages_written: 8,
            pages_dropped: 0,
            connections: NodeConnections {
                waiting: 1,
                established: 5,
                resting: 3,
                buffers: rdma::InUse {
                    in_use: 2 << 20,
                    limit: Some(3 << 30),
                },
                dropped: ConnectionsDropped {
                    address: 1,
                    total: 2,
                    silent: 3,
                    handshake: 4,
                    full: 0,
                },
            },
            members: vec![MemberUse {
                identity: "vm/web".into(),
                bytes: 64 << 20,
                leases: 1,
                connections: 5,
                pinned_bytes: 0,
            }],
            certificate_not_after: Some(1_800_000_000),
            rdma: rdma::NodeRdma {
                used: resources(),
                connections: rdma::InUse {
                    in_use: 1,
                    limit: Some(1024),
                },
                endpoints: vec![rdma::Endpoints {
                    vm: "web".into(),
                    class: "urgent".into(),
                    peer: "10.0.0.9:40000".into(),
                    device: "rxe0".into(),
                    here: end(17, "10.0.0.1"),
                    there: end(19, "10.0.0.9"),
                }],
            },
        },
    }
}

/// The status of a VM with two donors, of which one cannot be reached.
#[must_use]
pub fn status() -> VmStatus {
    VmStatus {
        name: "web".into(),
        pid: 17,
        state: VmState::Running,
        paused_by_user: false,
        uptime_s: 7300.0,
        guest: Guest {
            memory_bytes: 1 << 30,
            cpus: 2,
            cpu_pinning: Some(vec![3, 1]),
            dedicated_cpus: false,
            irqchip: "user".into(),
            kernel: None,
        },
        boot: Boot {
            to_init_ms: Some(8200.0),
            restarts: 0,
        },
        transport: TransportUsed {
            kind: "tcp".into(),
            tier: "slow".into(),
            bulk: "tcp".into(),
        },
        memory: MemoryUsed {
            // Such memory has no replicas.
            hotplug: None,
            home_here_bytes: 64 << 20,
            cache_bytes: 256 << 20,
            cached_bytes: 128 << 20,
            resident_bytes: 130 << 20,
            huge_bytes: Some(2 << 20),
            replicas: Some(ReplicasUsed {
                stripes: None,
                bytes: 192 << 20,
                degraded_bytes: 48 << 20,
                in_one_zone_bytes: 8 << 20,
                repaired_bytes: 16 << 20,
                losses: 1,
                wrong_pieces: 3,
                out: vec![2],
            }),
            sealing: Some(SealingUsed {
                pages_sealed: 6,
                pages_opened: 5,
                pages_rejected: 1,
            }),
            // Nor is such memory drained.
            drain: None,
            rebalance: None,
            moved_by_heat_bytes: 0,
            lost: Some(LostUsed {
                nodes: vec![2],
                pages: 32,
                bytes: 32 << 12,
                ranges: vec![Extent {
                    start: 0x0200_0000,
                    bytes: 29 << 12,
                }],
                ranges_omitted: 0,
                poisoned: 31,
                recovered: 3,
                machine_checks: 14,
            }),
        },
        nodes: vec![node(0, None), node(1, Some(kind(7, 9.0))), node(2, None)],
        vcpus: Vec::new(),
        coherence: None,
        vcpu_policy: None,
        faults: Faults {
            remote: kind(1234, 31.7),
            ..Faults::default()
        },
        evictions: Evictions {
            total: 99,
            clean: 41,
            zero: 17,
            unchanged: 23,
            cancelled: 5,
        },
        stalled_for_memory: 4,
        rate_limits: vec![RateLimited {
            device: "disk0".into(),
            bytes_per_second: Some(8 << 20),
            operations_per_second: None,
            throttled: 12,
        }],
        prefetch: Prefetch {
            issued: 640,
            used: 512,
            wasted: 32,
            late: 3,
            replayed: 70,
        },
        rdma: resources(),
        certificate_not_after: Some(1_800_000_001),
        cluster: Some(ClusterNow {
            connected: false,
            since_s: 12.5,
            nodes: 3,
            error: Some("etcd at 10.0.0.1:2379 cannot be asked".into()),
        }),
        errors_total: 1,
        errors: vec!["donor node 2 cannot be reached".into()],
        heat: None,
        placement: None,
    }
}

/// The drain of a donor, of whose memory a quarter has moved.
#[must_use]
pub fn drain() -> DrainUsed {
    DrainUsed {
        node: 1,
        state: DrainState::Moving,
        bytes: 96 << 20,
        moved_bytes: 24 << 20,
        error: None,
    }
}

/// A rebalancing, of which a quarter is done.
#[must_use]
pub fn rebalance() -> RebalanceUsed {
    RebalanceUsed {
        state: RebalanceState::Moving,
        bytes: 64 << 20,
        moved_bytes: 16 << 20,
        error: None,
    }
}

fn transfers(reads: u64) -> Transfers {
    let times = kind(0, 100.0).latency_us;
    Transfers {
        faults: 10 * reads,
        reads,
        writes: 2 * reads,
        upgrades: 3 * reads,
        pages_received: 4 * reads,
        pages_from_home: 5,
        pages_zero: 6,
        pages_sent: 7 * reads,
        invalidations: 8,
        holds: 9,
        hold_us: times,
        early_losses: 10,
        requested_ahead: 18,
        tokens: 11,
        requests: 6 * reads,
        request_us: times,
        blocks_taken: 12,
        blocks_split: 13,
        split_blocks: 14,
        evictions: 15,
        write_backs: 16,
        stalled_for_memory: 17,
        merged_tables: 19,
        table_changes: 20,
        held_for_tables: 21,
    }
}

/// How one of three nodes is connected: the first one by RDMA.
fn peers_of(id: u32) -> Vec<Peer> {
    let others = (0..3).filter(|node| *node != id);
    let peer = others.map(|node| Peer {
        node,
        transport: match node.min(id) {
            0 => PeerTransport::Rdma,
            _ => PeerTransport::Tls,
        },
        connections: 1 + node + id,
        pages_received: u64::from(100 * id + node),
    });
    peer.collect()
}

fn clock(id: u32) -> NodeClock {
    let nth = f64::from(id);
    NodeClock {
        offset_us: 7.5e9 * nth,
        error_us_max: 31.25 * nth,
        rate_ppm: Some(-3.5 * nth),
        rate_ppm_error_max: Some(0.25 * nth),
        scaled: id == 2,
        steps: 40 * u64::from(id),
        steps_us: -1250.0 * nth,
    }
}

/// A policy that has moved vCPU 2.
fn policy() -> PolicyUsed {
    let stays = |cpu, reason| VcpuStays {
        cpu,
        moves: u32::from(cpu == 2),
        waited_ms: 60.5 * f64::from(cpu),
        reason,
        stays_s: (reason == StayReason::Moved).then_some(25.5),
    };
    PolicyUsed {
        kind: PolicyKind::Follow,
        moves: 1,
        moves_failed: 2,
        vcpus: vec![
            stays(0, StayReason::Little),
            stays(1, StayReason::Little),
            stays(2, StayReason::Moved),
            stays(3, StayReason::Watched),
        ],
    }
}

/// The status of a VM with 4 vCPUs on 3 nodes, one of which does not report.
#[must_use]
pub fn status_of_nodes() -> VmStatus {
    let node = |id, cpus: &[u32], state| NodeNow {
        node: Node {
            id,
            role: Role::Compute,
            address: (id > 0).then(|| format!("10.0.0.{id}:7000")),
            memory_bytes: 1 << 30,
            cpus: cpus.to_vec(),
            state: Some(state),
            round_trip_us: (id > 0).then_some(52.0),
            clock: (id > 0).then(|| clock(id)),
            peers: peers_of(id),
            counted_s_ago: (id > 0).then_some(0.4),
            transfers: Some(transfers(100 * u64::from(id + 1))),
            ..Node::default()
        },
        link: None,
    };
    let vcpu = |cpu, node, state| VcpuNow {
        cpu,
        node,
        state,
        page: (state == VcpuState::Page).then_some(0x2a1_0000),
    };
    let got = |node, reads, writes| HotPageNode {
        node,
        reads,
        writes,
    };
    let hot = |address, transfers, nodes: &[HotPageNode]| HotPage {
        address,
        transfers,
        more_max: 2,
        nodes: nodes.to_vec(),
    };
    let mut status = status();
    // No donor has any of its memory.
    status.memory.replicas = None;
    status.guest.cpus = 4;
    status.nodes = vec![
        node(0, &[0, 1], NodeState::Up),
        node(1, &[2], NodeState::Up),
        node(2, &[3], NodeState::Silent),
    ];
    status.vcpus = vec![
        vcpu(0, 0, VcpuState::Running),
        vcpu(1, 0, VcpuState::Page),
        vcpu(2, 1, VcpuState::Halted),
        vcpu(3, 2, VcpuState::Unknown),
    ];
    status.coherence = Some(Coherence {
        total: transfers(600),
        hottest: vec![
            hot(0x2a1_0000, 5898, &[got(0, 20, 2930), got(1, 3, 2945)]),
            hot(0x2a1_5000, 12, &[got(1, 12, 0)]),
        ],
    });
    status.vcpu_policy = Some(policy());
    status
}

/// A block of 64 pages.
#[must_use]
pub fn block(here: u32, remote: u32, untouched: u32, recent_faults: u32) -> BlockStatus {
    BlockStatus {
        pages: 64,
        looked_at: here + remote + untouched,
        resident: here,
        remote,
        untouched,
        recent_faults,
        ..BlockStatus::default()
    }
}
