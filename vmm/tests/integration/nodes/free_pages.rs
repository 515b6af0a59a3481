//! A guest on two nodes gives memory back.

use std::fs;

use serde_json::Value;
use tiny_guests::nodes::{FREED, free_on_two_nodes};

use super::commands::{code_of, start};
use crate::running::{Place, count, end, node};
use crate::support::kvm_is_there;

/// Pages that the guest reports in each round.
const REPORTED: u64 = 2048;

/// Runs a guest whose vCPUs, on two nodes, take turns in reporting free pages, which both write again.
/// Returns its report.
fn freed(more: &[&str]) -> Option<Value> {
    if !kvm_is_there() {
        return None;
    }
    let place = Place::new();
    let (_node, address) = node(&place, &["--cpus", "1"]);
    let report = place.path("report");
    let more = [&["--report", &report], more].concat();
    let vm = start(&place, &address, free_on_two_nodes::code(), &more);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "k", "{output:?}");
    let report = fs::read_to_string(report).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    println!("{}", report["free_pages"]);
    Some(report)
}

#[test]
fn what_a_guest_on_two_nodes_reports_as_free_is_dropped_and_good_memory_again() {
    let Some(report) = freed(&[]) else {
        return;
    };
    let [rounds, alone, both] = FREED;
    assert_eq!(count(&report, "/free_pages/reported"), rounds * REPORTED);
    // Of the pages that both use the first node may have lost some again, or holds them.
    let dropped = count(&report, "/free_pages/dropped_here");
    let least = rounds * (alone + both / 4);
    assert!(dropped >= least, "{dropped} pages, {least} are the least");
}

#[test]
fn without_a_balloon_a_guest_on_two_nodes_has_no_such_device() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_node, address) = node(&place, &["--cpus", "1"]);
    let vm = start(
        &place,
        &address,
        tiny_guests::report_free_pages::code(),
        &["--balloon", "off", "--rng", "off"],
    );
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "?", "{output:?}");
}
