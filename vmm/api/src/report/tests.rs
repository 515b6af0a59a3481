//! Tests of the report's fields.

use serde_json::{Value, json};

use super::*;

/// Every field that readers were promised, by its path.
#[test]
fn the_fields_have_the_promised_names() {
    let mut report = Report::new(Host::default());
    report.guest.kernel = Some("vmlinux".into());
    report.nodes.push(Node {
        id: 1,
        role: Role::Donor,
        address: Some("127.0.0.1:7000".into()),
        memory_bytes: 4096,
        pages_fetched: 1,
        pages_written_back: 0,
        faults: Some(FaultKind::default()),
        traffic: Some(Traffic::default()),
        rdma: Some(RdmaUsed::default()),
        path: Some(PathUsed {
            tcp: Some(PathMeasured::default()),
            ..PathUsed::default()
        }),
        state: Some(NodeState::Lost),
        lost: Some(NodeLost {
            only_copy: Extents {
                bytes: 4096,
                ranges: vec![Extent {
                    start: 8192,
                    bytes: 4096,
                }],
                ranges_omitted: 2,
            },
            ..NodeLost::default()
        }),
        clock: Some(NodeClock::default()),
        transfers: Some(Transfers::default()),
        peers: vec![Peer {
            node: 1,
            transport: PeerTransport::Tls,
            connections: 2,
            pages_received: 3,
        }],
        ..Node::default()
    });
    report.coherence = Some(Coherence {
        hottest: vec![HotPage {
            nodes: vec![HotPageNode::default()],
            ..HotPage::default()
        }],
        ..Coherence::default()
    });
    report.vcpu_policy = Some(PolicyUsed {
        kind: PolicyKind::Follow,
        vcpus: vec![VcpuStays {
            cpu: 1,
            moves: 2,
            waited_ms: 3.5,
            reason: StayReason::Moved,
            stays_s: Some(4.5),
        }],
        ..PolicyUsed::default()
    });
    report.distributions = Some(Distributions {
        remote: vec![(12.5, 3)],
        ..Distributions::default()
    });
    report.timeline = Some(Timeline {
        interval_s: 0.25,
        intervals: vec![FaultCounts::default()],
    });
    report.exec = Some(Exec {
        command: "true".into(),
        exit_status: Some(0),
        ..Exec::default()
    });
    let value = serde_json::to_value(&report).expect("is JSON");
    let percentiles = json!({ "p50": 0.0, "p90": 0.0, "p99": 0.0, "p999": 0.0, "max": 0.0 });
    let stages = json!({ "queue": percentiles, "fetch": percentiles, "install": percentiles });
    let kind = json!({ "count": 0, "latency_us": percentiles, "stages": stages });
    let class = json!({
        "plain_bytes": 0,
        "wire_bytes": 0,
        "pages_compressed": 0,
        "compressing": false,
    });
    let transfers = json!({
        "faults": 0,
        "reads": 0,
        "writes": 0,
        "upgrades": 0,
        "pages_received": 0,
        "pages_from_home": 0,
        "pages_zero": 0,
        "pages_sent": 0,
        "invalidations": 0,
        "holds": 0,
        "hold_us": percentiles,
        "early_losses": 0,
        "requested_ahead": 0,
        "tokens": 0,
        "requests": 0,
        "request_us": percentiles,
        "blocks_taken": 0,
        "blocks_split": 0,
        "split_blocks": 0,
        "evictions": 0,
        "write_backs": 0,
        "stalled_for_memory": 0,
        "merged_tables": 0,
        "table_changes": 0,
        "held_for_tables": 0,
    });
    let expected: Value = json!({
        "schema": 1,
        "host": { "virtualization": "emulated", "cpu_model": "", "kernel": "" },
        "guest": { "memory_bytes": 0, "cpus": 0, "cpu_pinning": null, "dedicated_cpus": false, "irqchip": "", "kernel": "vmlinux" },
        "memory": {
            "home_here_bytes": 0,
            "cache_bytes": 0,
            "cached_bytes": 0,
            "resident_bytes": 0,
            "huge_bytes": null,
            "hotplug": null,
            "replicas": null,
            "sealing": null,
            "drain": null,
            "rebalance": null,
            "moved_by_heat_bytes": 0,
            "lost": null,
        },
        "boot": { "to_init_ms": null, "restarts": 0 },
        "transport": { "kind": "", "tier": "", "bulk": "" },
        "nodes": [{
            "id": 1,
            "role": "donor",
            "address": "127.0.0.1:7000",
            "memory_bytes": 4096,
            "pages_fetched": 1,
            "pages_written_back": 0,
            "sealed": false,
            "cpus": [],
            "state": "lost",
            "lost": {
                "only_copy": {
                    "bytes": 4096,
                    "ranges": [{ "start": 8192, "bytes": 4096 }],
                    "ranges_omitted": 2,
                },
                "blocks": 0,
                "in_transit": { "bytes": 0, "ranges": [], "ranges_omitted": 0 },
                "at_home": { "bytes": 0, "ranges": [], "ranges_omitted": 0 },
            },
            "round_trip_us": null,
            "clock": {
                "offset_us": 0.0,
                "error_us_max": 0.0,
                "rate_ppm": null,
                "rate_ppm_error_max": null,
                "scaled": false,
                "steps": 0,
                "steps_us": 0.0,
            },
            "peers": [
                { "node": 1, "transport": "tcp+tls", "connections": 2, "pages_received": 3 },
            ],
            "counted_s_ago": null,
            "transfers": transfers,
            "faults": kind,
            "traffic": { "urgent": class, "prefetch": class, "write_back": class },
            "rdma": { "pages_read": 0, "pages_written": 0, "connections": 0, "failures": 0 },
            "path": {
                "faults": "",
                "bulk": "",
                "tier": "",
                "tier_changes": 0,
                "latency_estimate_us": 0.0,
                "tcp": { "small_us": 0.0, "page_us": 0.0, "stream_bytes_per_second": 0.0 },
                "udp": null,
                "rdma": null,
            },
        }],
        "faults": {
            "remote": kind,
            "zero": kind,
            "minor": kind,
            "write_protect": kind,
            "stages": stages,
        },
        "evictions": 0,
        "evictions_unchanged": 0,
        "free_pages": { "reported": 0, "dropped_here": 0, "dropped_at_home": 0 },
        "prefetch": { "issued": 0, "used": 0, "wasted": 0, "late": 0, "replayed": 0 },
        "coherence": {
            "total": transfers,
            "hottest": [{
                "address": 0,
                "transfers": 0,
                "more_max": 0,
                "nodes": [{ "node": 0, "reads": 0, "writes": 0 }],
            }],
        },
        "vcpu_policy": {
            "kind": "follow",
            "moves": 0,
            "moves_failed": 0,
            "vcpus": [{ "cpu": 1, "moves": 2, "waited_ms": 3.5, "reason": "moved", "stays_s": 4.5 }],
        },
        "distributions": { "remote": [[12.5, 3]], "zero": [], "minor": [], "write_protect": [] },
        "timeline": {
            "interval_s": 0.25,
            "intervals": [{ "remote": 0, "zero": 0, "minor": 0, "write_protect": 0 }],
        },
        "exec": { "command": "true", "exit_status": 0, "stdout_bytes": 0, "stderr_bytes": 0 },
        "errors": [],
        "outcome": "",
        "exit_code": 0,
    });
    assert_eq!(value, expected);
    assert_eq!(
        serde_json::from_value::<Report>(value).expect("is a report"),
        report
    );
}

/// The names of all fields in a value, at any depth.
fn field_names(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| [vec![name.clone()], field_names(value)].concat())
            .collect(),
        Value::Array(values) => values.iter().flat_map(field_names).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_document_has_every_field() {
    let document = include_str!("../../../../docs/report.md");
    let value = serde_json::to_value(Report::new(Host::default())).expect("is JSON");
    for name in field_names(&value) {
        assert!(document.contains(&name), "{name} is not in docs/report.md");
    }
}
