//! Tests of what is shown.

use super::heat::{BlockStatus, ExtentStatus};
use super::*;
use crate::report::{FaultKind, PathUsed, Percentiles, Role, Stages, Traffic, TrafficClass};

fn kind(count: u64, p50: f64) -> FaultKind {
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
            faults,
            traffic: (id > 0).then_some(Traffic {
                urgent: traffic(100, 100, false),
                prefetch: traffic(20, 15, id == 2),
                write_back: traffic(30, 10, true),
            }),
            rdma: None,
            path: (id > 0).then(|| PathUsed {
                tier: "fast-tcp".into(),
                latency_estimate_us: 61.4,
                ..PathUsed::default()
            }),
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

pub(crate) fn node_status() -> NodeStatus {
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

#[test]
fn a_node_tells_of_its_connections_and_what_they_take() {
    let text = screen::node(&node_status());
    for part in [
        "7 pages read, 8 written; 1 RDMA connections\n",
        "rdma       rxe0: in use 4 of 1048576 queue pairs, 4 of 1048576 completion queues,\n",
        "           2 of 524287 regions, 1 domains; 5 MiB pinned\n",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let quiet = NodeStatus {
        counters: NodeCounters {
            rdma: rdma::NodeRdma::default(),
            ..node_status().counters
        },
        ..node_status()
    };
    assert!(!screen::node(&quiet).to_lowercase().contains("rdma"));
}

#[test]
fn a_node_of_an_older_release_is_understood() {
    let mut value = serde_json::to_value(node_status()).expect("is JSON");
    value.as_object_mut().expect("an object").remove("rdma");
    let node: NodeStatus = serde_json::from_value(value).expect("is a status");
    assert_eq!(node.counters.rdma, rdma::NodeRdma::default());
}

pub(crate) fn status() -> VmStatus {
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
            hotplug: Some(crate::report::HotplugUsed {
                max_bytes: 2 << 30,
                requested_bytes: 512 << 20,
                plugged_bytes: 256 << 20,
            }),
            home_here_bytes: 64 << 20,
            cache_bytes: 256 << 20,
            cached_bytes: 128 << 20,
            resident_bytes: 130 << 20,
            huge_bytes: Some(2 << 20),
        },
        nodes: vec![node(0, None), node(1, Some(kind(7, 9.0))), node(2, None)],
        faults: Faults {
            remote: kind(1234, 31.7),
            ..Faults::default()
        },
        evictions: Evictions {
            total: 99,
            clean: 41,
            zero: 17,
            cancelled: 5,
        },
        stalled_for_memory: 4,
        prefetch: Prefetch {
            issued: 640,
            used: 512,
            wasted: 32,
            late: 3,
        },
        rdma: resources(),
        errors_total: 1,
        errors: vec!["donor node 2 cannot be reached".into()],
        heat: None,
    }
}

#[test]
fn a_screen_has_what_matters_and_fits_80_columns() {
    let text = screen::vm(&status());
    assert!(text.lines().all(|line| line.len() <= 84), "{text}");
    assert!(text.lines().count() <= 30, "{text}");
    for part in [
        "VM web (process 17): running, up 2 h 1 min",
        "init after 8.2 s; transport tcp, tier slow",
        "pinned     each vCPU to a CPU of the host, in order: 3,1\n",
        "cache 128 MiB of 256 MiB",
        "130 MiB in memory here, 2 MiB of it in huge pages",
        "evictions  99:",
        "4 faults waited",
        "ahead      640 pages fetched: 512 used, 32 wasted; 3 touched on their way",
        "wire       300 MiB of pages as 250 MiB; 50 compressed; now on: prefetch, write-back",
        "rdma       rxe0: in use 4 of 1048576 queue pairs",
        "61.4 fast-tcp       3  10.0.0.1:7000",
        "away",
        "from node 1",
        "error: donor node 2 cannot be reached",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let remote = text.lines().find(|line| line.starts_with("remote"));
    let words: Vec<_> = remote.expect("a line").split_whitespace().collect();
    assert_eq!(words, ["remote", "1234", "31.7", "63.4", "95.1", "158.5"]);
}

#[test]
fn pinning_is_shown_where_there_is_some_and_cut_where_it_is_long() {
    let pinned = |cpus: Option<Vec<u32>>| {
        let mut status = status();
        status.guest.cpu_pinning = cpus;
        screen::vm(&status)
    };
    assert!(!pinned(None).contains("each vCPU"));
    assert!(pinned(Some((8..72).collect())).contains("in order: 8-71\n"));
    let text = pinned(Some((0..254).map(|cpu| cpu * 2 % 251).collect()));
    assert!(text.lines().all(|line| line.len() <= 84), "{text}");
    assert!(text.contains("in order: 0,2,4,") && text.contains(",...\n"));
}

#[test]
fn a_vm_of_an_older_release_tells_of_no_pinning() {
    let mut value = serde_json::to_value(status()).expect("is JSON");
    let guest = value["guest"].as_object_mut().expect("an object");
    guest.remove("cpu_pinning").expect("a field");
    let status: VmStatus = serde_json::from_value(value).expect("is a status");
    assert_eq!(status.guest.cpu_pinning, None);
}

#[test]
fn what_is_shown_travels_as_json() {
    let before = status();
    let text = serde_json::to_string(&before).expect("is JSON");
    let after: VmStatus = serde_json::from_str(&text).expect("is a status");
    assert_eq!(after, before);
}

/// The names of all fields in a value, at any depth.
fn field_names(value: &serde_json::Value, names: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                names.push(name.clone());
                field_names(value, names);
            }
        }
        serde_json::Value::Array(values) => {
            values.iter().for_each(|value| field_names(value, names));
        }
        _ => {}
    }
}

#[test]
fn the_document_has_every_field() {
    let heat = heat::HeatStatus {
        block_pages: 64,
        pages: 64,
        pages_looked_at: 64,
        extents: vec![ExtentStatus {
            first_page: 0,
            pages: 64,
            home: 1,
            blocks: vec![block(1, 2, 3, 4)],
        }],
    };
    let all = Everything {
        schema: SCHEMA,
        vms: vec![VmStatus {
            heat: Some(heat),
            ..status()
        }],
        nodes: vec![node_status()],
    };
    let value = serde_json::to_value(all).expect("is JSON");
    let mut names = Vec::new();
    field_names(&value, &mut names);
    assert!(names.iter().any(|name| name == "recent_faults"));
    assert!(names.iter().any(|name| name == "protection_domains"));
    let document = include_str!("../../../docs/report.md");
    for name in names {
        assert!(document.contains(&name), "{name} is not in docs/report.md");
    }
}

fn block(here: u32, remote: u32, untouched: u32, recent_faults: u32) -> BlockStatus {
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

#[test]
fn a_character_tells_what_part_of_a_block_is_here() {
    for (block, character) in [
        (block(0, 0, 64, 0), '.'),
        (block(0, 1, 63, 0), '-'),
        (block(1, 63, 0, 0), '1'),
        (block(32, 32, 0, 0), '5'),
        (block(63, 1, 0, 0), '9'),
        (block(1, 0, 63, 0), '#'),
        (block(64, 0, 0, 15), '#'),
        (block(10, 54, 0, 16), '*'),
        (block(0, 64, 0, 99), '-'),
    ] {
        assert_eq!(screen::heat::character(&block), character, "{block:?}");
    }
}

#[test]
fn a_heat_map_has_rows_by_address_and_says_what_was_looked_at() {
    let blocks = vec![block(64, 0, 0, 3); 70];
    let mut heat = heat::HeatStatus {
        block_pages: 64,
        pages: 70 * 64,
        pages_looked_at: 70 * 64,
        extents: vec![ExtentStatus {
            first_page: 0x100,
            pages: 70 * 64,
            home: 1,
            blocks,
        }],
    };
    let text = screen::heat::map(&heat, false);
    assert!(
        text.contains("a character is 256 KiB; every page was looked at"),
        "{text}"
    );
    assert!(text.contains("17.5 MiB at home on node 1"), "{text}");
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with("0x")).collect();
    assert_eq!(rows[0], format!("0x0000000100000  {}", "#".repeat(64)));
    assert_eq!(rows[1], format!("0x0000001100000  {}", "#".repeat(6)));
    assert!(text.lines().all(|line| line.len() <= 81), "{text}");
    assert!(screen::heat::map(&heat, true).contains("\x1b[33m#\x1b[0m"));
    heat.pages_looked_at = 64;
    assert!(screen::heat::map(&heat, false).contains("64 of 4480 pages were looked at"));
}
