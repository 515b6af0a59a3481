//! Compares the metrics with the documents.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::families::BUCKETS_SECONDS;
use super::*;
use ssi_hv_api::fixtures::{drain, node_status, rebalance, status, status_of_nodes};
use ssi_hv_api::report::RdmaUsed;
use ssi_hv_api::status::{NodeStatus, VmStatus};

const MANUAL: &str = include_str!("../../../docs/metrics.md");
const DASHBOARD: &str = include_str!("../../../docs/grafana-dashboard.json");
const ALERTS: &str = include_str!("../../../docs/alerts.yml");

/// A VM whose status yields every metric.
fn full_vm() -> VmStatus {
    let mut status = status();
    status.memory.drain = Some(drain());
    status.memory.rebalance = Some(rebalance());
    status.memory.moved_by_heat_bytes = 4 << 20;
    status.rdma.pinned_bytes.limit = Some(8 << 20);
    for now in &mut status.nodes[1..] {
        now.node.rdma = Some(RdmaUsed {
            pages_read: 5,
            pages_written: 6,
            connections: 3,
            failures: 1,
        });
    }
    status
}

fn times(kind: &'static str, stage: Option<&'static str>) -> FaultTimes {
    FaultTimes {
        kind,
        stage,
        // Upper bounds of buckets of the pager's histograms, in microseconds.
        times: vec![(9.9, 3), (10.2, 1), (63.0, 2), (20e6, 1)],
    }
}

fn vm_text(status: &VmStatus) -> String {
    let times = [times("remote", None), times("remote", Some("fetch"))];
    let of_donor = |node, fetch, write| DonorTimes { node, fetch, write };
    let donors = [
        of_donor(1, vec![(80.0, 2)], Vec::new()),
        of_donor(2, vec![(12.0, 3), (40.0, 1)], vec![(25.0, 2), (900.0, 5)]),
    ];
    vm(status, &times, &donors, &[])
}

/// The metrics of a VM whose vCPUs are on several nodes.
fn nodes_text() -> String {
    let of_node = |node| NodeTimes {
        node,
        requests: vec![(9.9, 3), (63.0, 2)],
        holds: vec![(63.0, 1)],
        ring_writes: (0..node).map(|_| (31.0, 3)).collect(),
    };
    let nodes = [0, 1].map(of_node);
    vm(&status_of_nodes(), &[times("remote", None)], &[], &nodes)
}

fn node_text() -> String {
    let mut status: NodeStatus = node_status();
    status.counters.rdma.connections.limit = Some(1024);
    status.counters.rdma.used.pinned_bytes.limit = Some(8 << 20);
    node(&status)
}

/// A family: its type, its labels and its help.
type Family = (String, BTreeSet<String>, String);

/// Parses the subset of the text format that is used, and fails on any other line.
fn families(text: &str) -> BTreeMap<String, Family> {
    let mut all: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a help");
            current = name.to_owned();
            let family = (String::new(), BTreeSet::new(), help.to_owned());
            assert!(
                all.insert(current.clone(), family).is_none(),
                "{name} twice"
            );
            continue;
        }
        let family = all.get_mut(&current).expect("a help comes first");
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert_eq!(name, current);
            kind.clone_into(&mut family.0);
            continue;
        }
        let (series, value) = line.rsplit_once(' ').expect("a value");
        assert!(value.parse::<f64>().is_ok(), "{line}");
        let (name, labels) = match series.split_once('{') {
            Some((name, rest)) => (name, rest.strip_suffix('}').expect("an end")),
            None => (series, ""),
        };
        let base = match family.0.as_str() {
            "histogram" => ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|suffix| name.strip_suffix(suffix))
                .expect("a part of a histogram"),
            _ => name,
        };
        assert_eq!(base, current);
        for label in labels.split(',').filter(|label| !label.is_empty()) {
            let (label, value) = label.split_once('=').expect("a label");
            assert!(value.starts_with('"') && value.ends_with('"'), "{line}");
            if label != "le" {
                family.1.insert(label.to_owned());
            }
        }
    }
    all
}

/// Returns every metric, and whether VMs or nodes have it.
fn all() -> BTreeMap<String, (Family, BTreeSet<&'static str>)> {
    let mut all: BTreeMap<String, (Family, BTreeSet<_>)> = BTreeMap::new();
    let texts = [
        ("VM", vm_text(&full_vm())),
        ("VM", nodes_text()),
        ("node", node_text()),
    ];
    for (who, text) in texts {
        for (name, family) in families(&text) {
            let (known, by) = all.entry(name).or_insert((family.clone(), BTreeSet::new()));
            assert_eq!(*known, family, "the same in all");
            by.insert(who);
        }
    }
    all
}

fn value(text: &str, series: &str) -> f64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{series} ")));
    line.unwrap_or_else(|| panic!("no {series} in {text}"))
        .parse()
        .expect("a number")
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    for (name, ((kind, labels, help), _)) in all() {
        assert!(name.starts_with("ssi_hv_"), "{name}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
        assert!(
            ["counter", "gauge", "histogram"].contains(&kind.as_str()),
            "{name}"
        );
        assert!(help.ends_with('.') && help.len() > 10, "{name}: {help}");
        for unit in ["_us", "_ms", "_microseconds", "_mib", "_kib", "_percent"] {
            assert!(
                !name.ends_with(unit) && !name.contains(&format!("{unit}_")),
                "{name}"
            );
        }
        let known = [
            "version",
            "vm",
            "transport",
            "bulk",
            "state",
            "kind",
            "stage",
            "node",
            "address",
            "tier",
            "class",
            "device",
            "resource",
            "from",
            "reason",
            "member",
            "peer",
            "rank",
        ];
        assert!(
            labels.iter().all(|label| known.contains(&label.as_str())),
            "{name}"
        );
    }
}

#[test]
fn values_are_those_of_the_status_in_base_units() {
    let status = full_vm();
    let text = vm_text(&status);
    for (series, expected) in [
        ("ssi_hv_uptime_seconds", 7300.0),
        ("ssi_hv_vm_state{state=\"running\"}", 1.0),
        ("ssi_hv_vm_state{state=\"paused\"}", 0.0),
        (
            "ssi_hv_vm_info{vm=\"web\",transport=\"tcp\",bulk=\"tcp\"}",
            1.0,
        ),
        ("ssi_hv_vm_init_seconds", 8.2),
        ("ssi_hv_guest_memory_bytes", 1_073_741_824.0),
        ("ssi_hv_home_here_bytes", 67_108_864.0),
        ("ssi_hv_cache_limit_bytes", 268_435_456.0),
        ("ssi_hv_cached_bytes", 134_217_728.0),
        ("ssi_hv_resident_bytes", 136_314_880.0),
        ("ssi_hv_pages_sealed_total", 6.0),
        ("ssi_hv_pages_opened_total", 5.0),
        ("ssi_hv_pages_rejected_total", 1.0),
        (
            "ssi_hv_certificate_expiry_timestamp_seconds",
            1_800_000_001.0,
        ),
        ("ssi_hv_donor_sealed{node=\"2\"}", 1.0),
        ("ssi_hv_replicated_bytes", 201_326_592.0),
        ("ssi_hv_degraded_bytes", 50_331_648.0),
        ("ssi_hv_in_one_zone_bytes", 8_388_608.0),
        ("ssi_hv_repaired_bytes_total", 16_777_216.0),
        ("ssi_hv_donor_losses_total", 1.0),
        ("ssi_hv_wrong_pieces_total", 3.0),
        ("ssi_hv_drain_bytes{node=\"1\"}", 100_663_296.0),
        ("ssi_hv_drain_moved_bytes{node=\"1\"}", 25_165_824.0),
        ("ssi_hv_rebalance_bytes", 67_108_864.0),
        ("ssi_hv_rebalance_moved_bytes", 16_777_216.0),
        ("ssi_hv_moved_by_heat_bytes_total", 4_194_304.0),
        ("ssi_hv_evictions_total", 99.0),
        ("ssi_hv_evictions_clean_total", 41.0),
        ("ssi_hv_evictions_zero_total", 17.0),
        ("ssi_hv_evictions_unchanged_total", 23.0),
        ("ssi_hv_evictions_cancelled_total", 5.0),
        ("ssi_hv_memory_stalls_total", 4.0),
        ("ssi_hv_device_throttled_total{device=\"disk0\"}", 12.0),
        ("ssi_hv_vm_errors_total", 1.0),
        ("ssi_hv_donor_reachable{node=\"1\"}", 1.0),
        ("ssi_hv_donor_reachable{node=\"2\"}", 0.0),
        ("ssi_hv_donor_round_trip_seconds{node=\"1\"}", 0.000_08),
        ("ssi_hv_donor_page_seconds{node=\"1\"}", 0.000_061_4),
        ("ssi_hv_donor_tier{node=\"1\",tier=\"fast-tcp\"}", 1.0),
        ("ssi_hv_donor_tier{node=\"1\",tier=\"slow\"}", 0.0),
        ("ssi_hv_donor_faults_total{node=\"1\"}", 7.0),
        (
            "ssi_hv_donor_wire_bytes_total{node=\"2\",class=\"prefetch\"}",
            15_728_640.0,
        ),
        ("ssi_hv_donor_fetch_seconds_count{node=\"2\"}", 4.0),
        ("ssi_hv_donor_rdma_failures_total{node=\"2\"}", 1.0),
        ("ssi_hv_donor_rdma_write_seconds_count{node=\"2\"}", 7.0),
        (
            "ssi_hv_rdma_resources{device=\"rxe0\",resource=\"queue_pairs\"}",
            4.0,
        ),
    ] {
        assert!((value(&text, series) - expected).abs() < 1e-9, "{series}");
    }
    // The compute node is not a donor, and a donor that has served nothing has no count.
    assert!(!text.contains("node=\"0\""));
    assert!(!text.contains("ssi_hv_donor_faults_total{node=\"2\"}"));
    assert!(!text.contains("ssi_hv_donor_rdma_write_seconds_count{node=\"1\"}"));
    let text = nodes_text();
    for (series, expected) in [
        ("ssi_hv_compute_info{node=\"0\",address=\"here\"}", 1.0),
        ("ssi_hv_compute_up{node=\"1\"}", 1.0),
        ("ssi_hv_compute_up{node=\"2\"}", 0.0),
        ("ssi_hv_compute_round_trip_seconds{node=\"1\"}", 0.000_052),
        ("ssi_hv_compute_clock_offset_seconds{node=\"1\"}", 7500.0),
        (
            "ssi_hv_compute_clock_error_seconds{node=\"2\"}",
            0.000_062_5,
        ),
        ("ssi_hv_compute_clock_rate_ratio{node=\"1\"}", -0.000_003_5),
        (
            "ssi_hv_compute_clock_rate_error_ratio{node=\"2\"}",
            0.000_000_5,
        ),
        ("ssi_hv_compute_clock_scaled{node=\"1\"}", 0.0),
        ("ssi_hv_compute_clock_scaled{node=\"2\"}", 1.0),
        ("ssi_hv_compute_clock_steps_total{node=\"2\"}", 80.0),
        ("ssi_hv_compute_clock_stepped_seconds{node=\"2\"}", -0.0025),
        ("ssi_hv_vcpu_policy_info{kind=\"follow\"}", 1.0),
        ("ssi_hv_vcpu_policy_moves_total", 1.0),
        ("ssi_hv_vcpu_policy_moves_failed_total", 2.0),
        ("ssi_hv_vcpu_policy_staying{reason=\"little\"}", 2.0),
        ("ssi_hv_vcpu_policy_staying{reason=\"moved\"}", 1.0),
        ("ssi_hv_vcpu_policy_staying{reason=\"full\"}", 0.0),
        ("ssi_hv_compute_vcpus{node=\"0\",state=\"page\"}", 1.0),
        ("ssi_hv_compute_vcpus{node=\"2\",state=\"running\"}", 0.0),
        (
            "ssi_hv_compute_requests_total{node=\"1\",kind=\"upgrade\"}",
            600.0,
        ),
        (
            "ssi_hv_compute_pages_received_total{node=\"0\",from=\"home\"}",
            5.0,
        ),
        ("ssi_hv_compute_early_losses_total{node=\"0\"}", 10.0),
        ("ssi_hv_compute_requested_ahead_total{node=\"0\"}", 18.0),
        ("ssi_hv_compute_split_blocks{node=\"2\"}", 14.0),
        ("ssi_hv_compute_merged_tables{node=\"0\"}", 19.0),
        ("ssi_hv_compute_request_seconds_count{node=\"1\"}", 5.0),
        ("ssi_hv_compute_hold_seconds_count{node=\"1\"}", 1.0),
        ("ssi_hv_compute_rdma_write_seconds_count{node=\"1\"}", 3.0),
    ] {
        assert!((value(&text, series) - expected).abs() < 1e-12, "{series}");
    }
    assert!(!text.contains("ssi_hv_donor_"), "no node is a donor");
    assert!(!text.contains("ssi_hv_compute_round_trip_seconds{node=\"0\"}"));
    assert!(!text.contains("_clock_offset_seconds{node=\"0\"}"));
    assert!(!text.contains("rdma_write_seconds_count{node=\"0\"}"));
    let text = node_text();
    for (series, expected) in [
        ("ssi_hv_node_lent_bytes", 67_108_864.0),
        ("ssi_hv_node_leases_granted_total", 2.0),
        ("ssi_hv_node_pages_written_total", 8.0),
        ("ssi_hv_node_rdma_connections", 1.0),
        ("ssi_hv_rdma_pinned_limit_bytes", 8_388_608.0),
        ("ssi_hv_node_connections{state=\"waiting\"}", 1.0),
        ("ssi_hv_node_connections{state=\"established\"}", 5.0),
        ("ssi_hv_node_resting_connections", 3.0),
        ("ssi_hv_node_buffers_bytes", 2_097_152.0),
        ("ssi_hv_node_buffers_limit_bytes", 3_221_225_472.0),
        (
            "ssi_hv_node_connections_dropped_total{reason=\"handshake\"}",
            4.0,
        ),
        ("ssi_hv_node_member_bytes{member=\"vm/web\"}", 67_108_864.0),
        ("ssi_hv_node_member_connections{member=\"vm/web\"}", 5.0),
        (
            "ssi_hv_certificate_expiry_timestamp_seconds",
            1_800_000_000.0,
        ),
    ] {
        assert!((value(&text, series) - expected).abs() < 1e-9, "{series}");
    }
}

#[test]
fn a_histogram_has_cumulative_buckets_and_a_sum_within_two_percent() {
    let text = vm_text(&status());
    let bucket = |le: &str| {
        value(
            &text,
            &format!("ssi_hv_fault_seconds_bucket{{kind=\"remote\",le=\"{le}\"}}"),
        )
    };
    for (le, count) in [
        ("0.000005", 0.0),
        ("0.00001", 3.0),
        ("0.000025", 4.0),
        ("0.00005", 4.0),
        ("0.0001", 6.0),
        ("10", 6.0),
        ("+Inf", 7.0),
    ] {
        assert!((bucket(le) - count).abs() < 0.5, "{le}: {}", bucket(le));
    }
    assert_eq!(
        text.matches("ssi_hv_fault_seconds_bucket").count(),
        BUCKETS_SECONDS.len() + 1
    );
    assert!((value(&text, "ssi_hv_fault_seconds_count{kind=\"remote\"}") - 7.0).abs() < 0.5);
    let sum = value(&text, "ssi_hv_fault_seconds_sum{kind=\"remote\"}");
    let largest = 3.0 * 9.9e-6 + 10.2e-6 + 2.0 * 63e-6 + 20.0;
    assert!(sum < largest && sum > largest * 0.968, "{sum}");
}

#[test]
fn a_vm_that_starts_says_so_and_hostile_names_stay_inside_their_quotes() {
    let text = starting(0.5);
    assert!((value(&text, "ssi_hv_vm_state{state=\"starting\"}") - 1.0).abs() < 1e-9);
    assert_eq!(families(&text).len(), 3);
    let mut status = status();
    status.transport.kind = "a\"b\\c\nd".into();
    let text = vm_text(&status);
    assert!(text.contains("transport=\"a\\\"b\\\\c\\nd\""), "{text}");
}

/// Returns the cells of the manual's table rows that start with a metric.
fn documented() -> BTreeMap<String, Vec<String>> {
    let rows = MANUAL.lines().filter_map(|line| {
        let row = line.strip_prefix("| `ssi_hv_")?;
        let cells: Vec<String> = row
            .split(" | ")
            .map(|cell| cell.trim_matches(['|', ' ']).to_owned())
            .collect();
        Some((format!("ssi_hv_{}", cells[0].trim_end_matches('`')), cells))
    });
    let mut all = BTreeMap::new();
    for (name, cells) in rows {
        assert!(
            all.insert(name.clone(), cells).is_none(),
            "{name} is there twice"
        );
    }
    all
}

#[test]
fn the_manual_has_every_metric_with_its_type_labels_and_help_and_no_other() {
    let (made, documented) = (all(), documented());
    let names = |of: Vec<&String>| of.into_iter().cloned().collect::<Vec<_>>();
    assert_eq!(
        names(documented.keys().collect()),
        names(made.keys().collect())
    );
    for (name, ((kind, labels, help), by)) in made {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let by: Vec<_> = by.into_iter().collect();
        let expected = [by.join(", "), kind, labels.join(", "), help];
        assert_eq!(
            documented[&name][1..],
            expected,
            "{name} in docs/metrics.md"
        );
    }
}

/// Returns every word of a text that could be one of our metrics.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words
        .filter(|word| word.starts_with("ssi_hv_"))
        .map(str::to_owned)
        .collect()
}

/// Returns the name of the metric without the suffix of a histogram's series.
fn base(name: &str, made: &BTreeMap<String, (Family, BTreeSet<&'static str>)>) -> Option<String> {
    if made.contains_key(name) {
        return Some(name.to_owned());
    }
    let base = ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|end| name.strip_suffix(end))?;
    let is_histogram = made
        .get(base)
        .is_some_and(|((kind, ..), _)| kind == "histogram");
    is_histogram.then(|| base.to_owned())
}

#[test]
fn dashboard_and_alerts_name_metrics_that_exist() {
    let made = all();
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let mut expressions = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        assert!(!panel["title"].as_str().unwrap_or_default().is_empty());
        for target in panel["targets"].as_array().into_iter().flatten() {
            expressions.push(target["expr"].as_str().expect("an expression").to_owned());
        }
    }
    assert!(expressions.len() > 10, "{expressions:?}");
    for text in expressions.iter().map(String::as_str).chain([ALERTS]) {
        let found = named(text);
        assert!(!found.is_empty(), "{text}");
        for name in found {
            assert!(base(&name, &made).is_some(), "{name} in {text}");
        }
    }
    // Every alert has a summary and an instruction.
    let alerts = ALERTS.matches("- alert: ").count();
    assert!(alerts >= 8, "{alerts} alerts");
    for part in ["summary: ", "description: ", "severity: "] {
        assert_eq!(ALERTS.matches(part).count(), alerts, "{part}");
    }
    for name in ALERTS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
    {
        assert!(
            MANUAL.contains(&format!("`{name}`")),
            "{name} is not in docs/metrics.md"
        );
    }
}

#[test]
fn a_donor_that_has_left_has_counts_and_no_link() {
    let mut status = full_vm();
    let left = status.nodes.last_mut().expect("a donor");
    left.link = None;
    let node = format!("node=\"{}\"", left.node.id);
    let text = vm_text(&status);
    let of_left: BTreeSet<_> = text
        .lines()
        .filter(|line| line.contains(&node))
        .filter_map(|line| line.split('{').next())
        .collect();
    assert!(of_left.contains("ssi_hv_donor_pages_fetched_total"));
    for name in ["reachable", "page_seconds", "tier", "tier_changes_total"] {
        let name = format!("ssi_hv_donor_{name}");
        assert!(!of_left.contains(&*name), "{name}");
    }
}
