//! `ssi-hv bench` through the real binary. Needs userfaultfd.

use std::process::Command;

use serde_json::Value;

fn bench(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_ssi-hv"))
        .arg("bench")
        .args(arguments)
        .arg("--json")
        .output()
        .expect("the binary runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).expect("JSON")
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
        let ratio = result["scan"][scan]["ratio_to_stream"].as_f64();
        assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{result}");
    }
    assert!(result["threads"].is_null() && result["growth"].is_null());
    // In five rounds a stream and two scans, and a scan before them.
    assert_eq!(result["verified_bytes"], 16 * (64_u64 << 20));
    assert_eq!(result["corrupt_bytes"], 0);
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
