//! `ssi-hv bench` through the real binary. Needs userfaultfd.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::{Value, json};

use crate::running::end;

/// Timeout of a bench, far longer than on the most loaded host.
const LIMIT: Duration = Duration::from_secs(300);

/// Longest time until the end of a node that is alone. It waits for others much longer.
const NODE_END_TIME_MAX: Duration = Duration::from_secs(5);

fn bench(arguments: &[&str]) -> Value {
    bench_that_says(arguments).0
}

/// Returns the results, and the messages.
fn bench_that_says(arguments: &[&str]) -> (Value, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command.arg("bench").args(arguments).arg("--json");
    let output = end::output_within(&mut command, LIMIT);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    let result = serde_json::from_slice(&output.stdout).expect("JSON");
    (result, error)
}

#[test]
fn four_tib_cost_no_more_than_what_of_them_is_touched() {
    let result = bench(&["start", "--memory", "4T"]);
    let number = |key: &str| {
        let number = result[key].as_f64();
        number.unwrap_or_else(|| panic!("{key} in {result}"))
    };
    assert!(number("start_ms") < 2000.0, "{result}");
    assert!(number("touched_bytes") < f64::from(64 << 20), "{result}");
    // The page map has 8 bytes for each page.
    let metadata = number("metadata_bytes_per_page");
    assert!((8.0..16.0).contains(&metadata), "{result}");
    assert!(number("verified_bytes") >= f64::from(64 << 20), "{result}");
    assert_eq!(result["corrupt_bytes"], 0);
}

#[test]
fn scans_fetch_what_they_read_and_find_every_byte() {
    let result = bench(&["memory", "--measure", "scan", "--memory", "64M"]);
    for scan in ["sequential", "strided"] {
        for ratio in ["ratio_to_stream", "ratio_to_floor"] {
            let ratio = result["scan"][scan][ratio].as_f64();
            assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{result}");
        }
    }
    assert!(result["threads"].is_null() && result["growth"].is_null());
    // Five rounds of a stream, the floor and two scans, and one scan before them.
    assert_eq!(result["verified_bytes"], 21 * (64_u64 << 20));
    assert_eq!(result["corrupt_bytes"], 0);
}

#[test]
fn sealed_faults_are_measured_beside_others_and_find_every_byte() {
    let small = ["fault", "--memory", "48M", "--local-memory", "16M"];
    let sealed = ["--seal", "--transport", "tcp", "--compression", "off"];
    let result = bench(&[&small[..], &sealed].concat());
    let of = |key: &str| result["sealed"][key].as_f64().expect("a number");
    for key in [
        "faults",
        "plain_cpu_us",
        "cpu_us",
        "ratio_p50",
        "ratio_p99",
        "ratio_cpu",
    ] {
        assert!(of(key) > 0.0, "{key}: {result}");
    }
    assert_eq!(result["corrupt_bytes"], 0, "{result}");
    // Both count: a page of each fault was compared.
    let faults = of("faults") + result["faults"].as_f64().expect("a number");
    assert_eq!(
        result["verified_bytes"].as_f64(),
        Some(faults * 4096.0),
        "{result}"
    );
    assert!(bench(&small)["sealed"].is_null());
}

#[test]
fn faults_under_tls_are_measured_beside_others_and_find_every_byte() {
    let memory = ["--memory", "48M", "--local-memory", "16M"];
    let result = bench(&[&["fault", "--tls", "--faults", "5000"][..], &memory].concat());
    assert_eq!(result["transport"], "tcp", "{result}");
    for ratio in ["ratio_p50", "ratio_p99", "ratio_cpu"] {
        assert!(result[ratio].as_f64() > Some(0.0), "{ratio}: {result}");
        let tls = result["tls"][ratio].as_f64();
        assert!(tls > Some(0.0), "{ratio}: {result}");
    }
    assert!(result["tls"]["faults"].as_u64() >= Some(5000), "{result}");
    // Five rounds of 2,000 touches, each of which waits for the donor.
    assert!(
        result["floor"]["latency_us"]["p50"].as_f64() > Some(2.0),
        "{result}"
    );
    assert!(result["faults"].as_u64() >= Some(5000), "{result}");
    let verified = result["verified_bytes"].as_u64();
    assert!(verified >= Some(2 * 5000 * 4096), "{result}");
    assert_eq!(result["corrupt_bytes"], 0);
}

#[test]
fn sealed_faults_have_all_connections_under_tls_with_both() {
    let memory = ["--memory", "48M", "--local-memory", "16M"];
    let both = ["fault", "--tls", "--seal", "--compression", "off"];
    let result = bench(&[&both[..], &memory, &["--faults", "5000"]].concat());
    assert_eq!(result["transport"], "tls", "{result}");
    assert!(
        result["sealed"]["ratio_p50"].as_f64() > Some(0.0),
        "{result}"
    );
    assert!(result["tls"].is_null(), "{result}");
    assert_eq!(result["corrupt_bytes"], 0);
}

/// Returns the number behind a key of what is measured beside one copy.
fn redundant(result: &Value, pointer: &str) -> f64 {
    let number = result["redundant"].pointer(pointer).and_then(Value::as_f64);
    number.unwrap_or_else(|| panic!("{pointer} in {result}"))
}

/// Bytes are counted and not timed: they are those of so many copies, with at most so much more.
fn assert_redundant(flag: &[&str], donors: u64, copies: f64, most: f64) -> Value {
    let small = ["fault", "--memory", "48M", "--local-memory", "16M"];
    let result = bench(&[&small[..], &["--faults", "2000"], flag].concat());
    assert_eq!(result["donors"], donors, "{result}");
    for key in ["/ratio_p50", "/ratio_p99", "/ratio_cpu", "/latency_us/p50"] {
        assert!(redundant(&result, key) > 0.0, "{key}: {result}");
    }
    let ratio = redundant(&result, "/ratio_write_back_bytes");
    assert!((copies..=most).contains(&ratio), "{ratio}: {result}");
    // 32 MiB do not fit into local memory.
    let pages = redundant(&result, "/write_back/pages");
    assert!(pages >= 8192.0, "{result}");
    let of_one = result["write_back"]["bytes_per_page"].as_f64();
    assert!(
        of_one.is_some_and(|bytes| (4096.0..4300.0).contains(&bytes)),
        "{result}"
    );
    let faults = redundant(&result, "/faults") + result["faults"].as_f64().expect("a number");
    assert_eq!(
        result["verified_bytes"].as_f64(),
        Some(faults * 4096.0),
        "{result}"
    );
    assert_eq!(result["corrupt_bytes"], 0, "{result}");
    result
}

#[test]
fn copies_are_measured_beside_one_and_cost_two_write_backs() {
    let flag = ["--replicas", "2", "--compression", "off"];
    let result = assert_redundant(&flag, 2, 1.99, 2.1);
    assert!(result["redundant"]["stripes"].is_null(), "{result}");
}

#[test]
fn stripes_are_measured_beside_one_copy_and_cost_half_a_write_back_more() {
    let flag = ["--redundancy", "4+2", "--compression", "off"];
    let result = assert_redundant(&flag, 6, 1.49, 1.65);
    assert_eq!(result["redundant"]["stripes"], "4+2", "{result}");
}

#[test]
fn three_processes_share_a_memory_and_count_exactly() {
    let arguments = ["coherence", "--nodes", "3", "--seconds", "2", "--tls"];
    let (result, said) = bench_that_says(&arguments);
    // All nodes end in order. A busy host may cause other messages.
    assert!(!said.contains("end of file"), "{said}");
    let transactions = result["transactions"].as_array().expect("a list");
    assert_eq!(transactions.len(), 5, "{result}");
    let under_tls = result["tls"].as_array().expect("a list");
    assert_eq!(under_tls.len(), 4, "{result}");
    for transaction in transactions.iter().chain(under_tls) {
        let ratio = transaction["ratio_p50"].as_f64();
        assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{result}");
    }
    let work = result["work"].as_array().expect("a list");
    for work in work {
        assert_eq!(work["is_exact"], true, "{result}");
        let moved = work["transfers_per_second"].as_f64().unwrap_or_default();
        assert_eq!(moved > 0.0, work["name"] != "private", "{result}");
    }
    assert_eq!((work.len(), &result["wrong_sums"]), (6, &Value::from(0)));
    assert_eq!(result["donor"], Value::from(Vec::<Value>::new()));
    let cost = result["cost"].as_array().expect("a list");
    assert_eq!(cost.len(), 2, "{result}");
    for cost in cost {
        for key in ["two_nodes_cpu_us", "four_nodes_cpu_us", "ratio"] {
            assert!(cost[key].as_f64() > Some(0.1), "{key}: {result}");
        }
    }
}

/// Starts a node of `ssi-hv bench coherence`, the place `me` of two. Returns it with what it says
/// of its ports.
fn coherence_node(me: u8) -> (Child, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command.args(["bench", "coherence-node"]);
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut node = pipes.spawn().expect("it starts");
    let cpus = sched_getaffinity(None).expect("CPUs");
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|&cpu| cpus.is_set(cpu))
        .collect();
    let setup = json!({
        "me": me, "cpus": cpus, "blocks": 2, "secret": vec![7; 32], "tls": false, "rdma": null,
        "donor": null,
    });
    writeln!(node.stdin.as_ref().expect("a pipe"), "{setup}").expect("it reads");
    let output = node.stdout.as_mut().expect("a pipe");
    assert!(
        end::is_readable(&*output, end::LIMIT),
        "node {me} is silent"
    );
    let mut said = BufReader::new(output);
    let mut line = String::new();
    said.read_line(&mut line).expect("a pipe");
    (node, serde_json::from_str(&line).expect("JSON"))
}

#[test]
fn a_node_ends_at_once_with_the_process_that_started_it_whatever_it_waits_for() {
    let [(mut one, ports), (mut other, of_other)] = [0, 1].map(coherence_node);
    let table = [ports, of_other].map(|ports| {
        let at = |port: &str| format!("127.0.0.1:{}", ports["Ports"][port]);
        json!({
            "memory": at("memory"), "vcpus": at("vcpus"), "lent_bytes": 4 << 20,
            "certificate": null,
        })
    });
    // The one that connects waits for the other one, which does not know of it.
    let connect = json!({ "Do": { "Connect": table } });
    let mut input = other.stdin.take().expect("a pipe");
    writeln!(input, "{connect}").expect("it reads");
    drop(input);
    let ended = end::end_within(&mut other, NODE_END_TIME_MAX);
    drop(one.stdin.take());
    let ended_too = end::end_within(&mut one, NODE_END_TIME_MAX);
    assert!(ended.is_some(), "it waits for the other node");
    assert!(ended_too.is_some(), "it waits for commands");
}

#[test]
fn pages_at_a_donor_reach_two_nodes_and_are_right() {
    let (result, said) = bench_that_says(&["coherence", "--seconds", "1", "--donor"]);
    // All nodes end in order. A busy host may cause other messages.
    assert!(!said.contains("end of file"), "{said}");
    let donor = result["donor"].as_array().expect("a list");
    let names: Vec<_> = donor.iter().map(|fetch| &fetch["name"]).collect();
    let wanted = [
        "from its home, node 0",
        "from node 1, by its home",
        "from its home, node 1",
    ];
    assert_eq!(names, wanted, "{result}");
    for fetch in donor {
        for key in ["/ratio_p50", "/floor_us/p50", "/latency_us/p50"] {
            let number = fetch.pointer(key).and_then(Value::as_f64);
            assert!(number > Some(0.0), "{key}: {result}");
        }
    }
    // Each of them reads a block in each of five rounds.
    assert_eq!(result["verified_bytes"], 3 * 5 * (2_u64 << 20), "{result}");
    assert_eq!(result["corrupt_bytes"], 0, "{result}");
}

#[test]
fn writers_lose_nothing_while_memory_is_evicted_under_them() {
    let result = bench(&[
        "memory",
        "--measure",
        "stalls",
        "--memory",
        "64M",
        "--seconds",
        "2",
    ]);
    let stalls = &result["stalls"];
    let number = |pointer: &str| stalls.pointer(pointer).and_then(Value::as_f64);
    assert!(number("/evictions") > Some(1000.0), "{result}");
    assert!(number("/page_us/max") >= number("/page_us/p50"), "{result}");
    assert!(number("/all_local_page_us/p50") > Some(0.0), "{result}");
    assert_eq!(result["corrupt_bytes"], 0);
}

#[test]
fn writes_that_change_nothing_are_dropped_and_others_are_not() {
    let result = bench(&["memory", "--measure", "unchanged", "--memory", "64M"]);
    let unchanged = &result["unchanged"];
    let number = |pointer: &str| unchanged.pointer(pointer).and_then(Value::as_u64);
    let fetched = number("/same/pages_fetched").expect("a number");
    assert!(fetched > 10_000, "{result}");
    // A page that was in use since the memory was filled may go home once.
    assert!(
        number("/same/pages_written_back") < Some(fetched / 20),
        "{result}"
    );
    let dropped = number("/same/evictions_unchanged").expect("a number");
    assert!(dropped > fetched / 2, "{result}");
    assert_eq!(number("/saved_bytes"), Some(dropped * 4096));
    assert!(
        number("/other/pages_written_back") > Some(fetched / 2),
        "{result}"
    );
    let fingerprint = unchanged["fingerprint_ns"].as_f64();
    assert!(fingerprint > Some(0.0), "{result}");
    assert_eq!(result["corrupt_bytes"], 0);
}

fn comparison_becomes_a_page(result: &Value) {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("bench.json");
    std::fs::write(&json, result.to_string()).expect("is written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    let output = end::output_within(command.arg("report").arg(&json), LIMIT);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let page = std::fs::read_to_string(directory.path().join("bench.html")).expect("a page");
    for part in [
        "Throughput by size",
        "tcp read: p50",
        "loopback write: p50",
        "CPU a page",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn no_more_round_trips_are_made_than_allowed() {
    let result = bench(&[
        "transport",
        "--transport",
        "loopback",
        "--seconds",
        "2",
        "--round-trips",
        "50",
    ]);
    let sizes = result["transports"][0]["sizes"].as_array();
    for size in sizes.expect("an array") {
        assert_eq!(size["round_trips"], 50, "{size}");
    }
    assert_eq!(result["transports"][0]["writes"]["round_trips"], 50);
}

#[test]
fn each_transport_is_measured_in_all_sizes_and_every_byte_is_right() {
    let result = bench(&["transport", "--seconds", "2"]);
    comparison_becomes_a_page(&result);
    assert_eq!(result["corrupt_bytes"], 0);
    assert!(
        result["verified_bytes"].as_u64() > Some(16 << 20),
        "{result}"
    );
    let transports = result["transports"].as_array().expect("an array");
    let kinds: Vec<_> = transports.iter().map(|one| one["kind"].as_str()).collect();
    assert!(kinds.contains(&Some("tcp")) && kinds.contains(&Some("loopback")));
    for one in transports {
        let sizes = one["sizes"].as_array().expect("an array");
        let bytes: Vec<_> = sizes
            .iter()
            .filter_map(|size| size["bytes"].as_u64())
            .collect();
        assert_eq!(
            bytes,
            (3..=10).map(|power| 1 << (2 * power)).collect::<Vec<u64>>()
        );
        for size in sizes {
            let number = |pointer: &str| size.pointer(pointer).and_then(Value::as_f64);
            let (p50, p99) = (number("/latency_us/p50"), number("/latency_us/p99"));
            assert!(p50 > Some(0.0) && p99 >= p50, "{size}");
            let jitter = p99.zip(p50).map(|(p99, p50)| p99 / p50);
            let p95 = number("/p95_us");
            assert!(p95 >= p50 && p95 <= p99, "{size}");
            let longest = number("/latency_us/max");
            assert!(
                number("/mean_us") > Some(0.0) && number("/mean_us") <= longest,
                "{size}"
            );
            assert!(number("/cpu_us_per_page") > Some(0.0), "{size}");
            let close = number("/jitter")
                .zip(jitter)
                .is_some_and(|(a, b)| (a - b).abs() < 0.01);
            assert!(close, "{size}");
            let (messages, stream) = (
                number("/messages_per_second"),
                number("/stream_bytes_per_second"),
            );
            let bytes = number("/bytes").expect("a size");
            let ratio = stream
                .zip(messages)
                .map(|(stream, messages)| stream / messages / bytes);
            assert!(
                ratio.is_some_and(|ratio| (ratio - 1.0).abs() < 0.01),
                "{size}"
            );
        }
        let bars = one["page_histogram"].as_array().expect("an array");
        let counted: u64 = bars.iter().filter_map(|bar| bar["count"].as_u64()).sum();
        let page = sizes
            .iter()
            .find(|size| size["bytes"] == 4096)
            .expect("a page");
        assert_eq!(Some(counted), page["round_trips"].as_u64(), "{one}");
        if one["kind"] == "tcp" {
            assert!(
                one["connections"]["others_ms"].as_f64() > Some(0.0),
                "{one}"
            );
            assert!(one["write_bytes_per_second"].as_f64() > Some(0.0), "{one}");
        }
        let (p50, p99) = (
            &one["writes"]["latency_us"]["p50"],
            &one["writes"]["latency_us"]["p99"],
        );
        assert!(
            p50.as_f64() > Some(0.0) && p99.as_f64() >= p50.as_f64(),
            "{one}"
        );
        let pairs = one["page_distribution"].as_array().expect("an array");
        let counted_again: u64 = pairs.iter().filter_map(|pair| pair[1].as_u64()).sum();
        assert_eq!(counted_again, counted, "{one}");
    }
    // A host without RDMA reports why; one with RDMA has measured it.
    let skipped = result["skipped"].as_array().expect("an array");
    let reason = skipped.iter().find(|one| one["kind"] == "rdma");
    assert_eq!(kinds.contains(&Some("rdma")), reason.is_none());
    assert!(reason.is_none_or(|one| {
        one["reason"]
            .as_str()
            .is_some_and(|text| text.contains("RDMA") || text.contains("libibverbs"))
    }));
}

/// Returns what `ssi-hv bench` writes to a terminal, which script(1), part of every Debian,
/// provides.
fn on_a_terminal(arguments: &str) -> String {
    let command = format!("'{}' bench {arguments}", env!("CARGO_BIN_EXE_ssi-hv"));
    let mut script = Command::new("script");
    script
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(std::process::Stdio::null());
    let output = end::output_within(&mut script, LIMIT);
    let written = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments}: {written:?}");
    written
}

#[test]
fn a_bench_shows_a_bar_on_a_terminal_that_goes_before_the_result_is_there() {
    const CLEAR_LINE: &str = "\r\x1b[2K";
    let transport = "transport --transport loopback --seconds 2";
    for (arguments, bar, steps) in [
        (transport, "measuring [", "/8 "),
        ("start --memory 1G", "pages [", "/33280 "),
    ] {
        let written = on_a_terminal(arguments);
        let (bars, result) = written.rsplit_once(CLEAR_LINE).expect("a bar");
        assert!(bars.contains(bar) && bars.contains(steps), "{written:?}");
        assert!(result.contains("0 wrong"), "{written:?}");
        // Echoed input must stay behind the bar, and not on another line.
        let full = |line: &str| line.ends_with("    ");
        assert!(!bars.split(CLEAR_LINE).any(full), "{written:?}");
        let quiet = on_a_terminal(&format!("{arguments} --quiet"));
        assert!(!quiet.contains(bar), "{quiet:?}");
    }
}
