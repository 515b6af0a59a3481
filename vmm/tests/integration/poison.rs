//! `ssi-hv run --on-lost-memory poison`: a donor is lost with the only copy of some pages.

use std::io::Read;
use std::time::Instant;

use ssi_hv::exit::ExitCode;

use crate::running::{LIMIT, Place, count, node, vm_with};
use crate::support;

/// Bytes that the guest prints in one walk: 64 of each page between 2 and 48 MiB.
const WALK: usize = ((46 << 20) >> 12) * 64;

/// The guest goes on until it uses a lost page. It has not enabled machine checks, so that ends it.
#[test]
fn a_guest_without_machine_checks_ends_at_a_lost_page_and_the_report_says_what_was_lost() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (first, first_address) = node(&place, &[]);
    let (_second, second_address) = node(&place, &[]);
    let report = place.directory.path().join("report.json");
    let flags = [
        "--name",
        "loses",
        "--on-lost-memory",
        "poison",
        "--donor",
        &first_address,
        "--donor",
        &second_address,
        "--donor-grace",
        "1",
        "--report",
        report.to_str().expect("UTF-8"),
    ];
    let mut vm = vm_with(&place, tiny_guests::talk_and_walk::code(), &flags);
    let mut walk = vec![0; WALK];
    vm.console.read_exact(&mut walk).expect("the guest walks");
    let before = place.json(&["status", "loses", "--json"]);
    assert!(before["vms"][0]["memory"]["lost"].is_null(), "{before}");
    assert_eq!(first.end(libc::SIGKILL), None);
    let mut rest = Vec::new();
    vm.console.read_to_end(&mut rest).expect("a pipe");
    assert_eq!(vm.code(), Some(ExitCode::DonorLost.code().into()));

    let report = std::fs::read_to_string(report).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    let lost = &report["memory"]["lost"];
    assert_eq!(lost["nodes"], serde_json::json!([1]), "{report}");
    assert_eq!(count(lost, "/machine_checks"), 0, "{lost}");
    assert_eq!(count(lost, "/poisoned"), 1, "{lost}");
    let pages = count(lost, "/pages");
    assert_eq!(count(lost, "/bytes"), pages << 12, "{lost}");
    let ranges = lost["ranges"].as_array().expect("ranges");
    let listed: u64 = ranges.iter().map(|range| count(range, "/bytes")).sum();
    let is_whole = count(lost, "/ranges_omitted") == 0;
    assert!(listed > 0 && (listed == pages << 12) == is_whole, "{lost}");
    // Pages of the other donor, and those that are here, are not lost.
    assert!((1000..WALK as u64 / 64).contains(&pages), "{lost}");
    let errors = report["errors"].as_array().expect("errors");
    let said = |part: &str| {
        let texts = errors.iter().filter_map(|error| error.as_str());
        texts.filter(|text| text.contains(part)).count()
    };
    assert_eq!(said(&format!("{pages} pages")), 1, "{errors:?}");
    assert_eq!(said("CONFIG_X86_MCE"), 1, "{errors:?}");
}

#[test]
fn without_it_the_loss_ends_the_guest() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (first, first_address) = node(&place, &[]);
    let flags = [
        "--name",
        "loses",
        "--donor",
        &first_address,
        "--donor-grace",
        "1",
    ];
    let mut vm = vm_with(&place, tiny_guests::talk_and_walk::code(), &flags);
    let mut walk = vec![0; WALK];
    vm.console.read_exact(&mut walk).expect("the guest walks");
    assert_eq!(first.end(libc::SIGKILL), None);
    let mut rest = Vec::new();
    vm.console.read_to_end(&mut rest).expect("a pipe");
    assert_eq!(vm.code(), Some(ExitCode::DonorLost.code().into()));
}

#[test]
fn what_excludes_it_is_refused_before_anything_starts() {
    let place = Place::new();
    let kernel = place.directory.path().join("kernel");
    let code = tiny_guests::elf(tiny_guests::walk_for_ever::code());
    std::fs::write(&kernel, code).expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let started = Instant::now();
    let run = [
        "run",
        "--kernel",
        kernel,
        "--memory",
        "64M",
        "--local-memory",
        "16M",
    ];
    let two = ["--donor", "127.0.0.1:1", "--donor", "127.0.0.1:2"];
    let more = ["--replicas", "2", "--on-lost-memory", "poison"];
    let line = place.failed(&[&run[..], &two, &more].concat(), ExitCode::Usage);
    assert!(line.contains("remove --replicas 2"), "{line}");
    let wrong = ["--on-lost-memory", "forget"];
    let line = place.failed(&[&run[..], &wrong].concat(), ExitCode::Usage);
    assert!(line.contains("end") && line.contains("poison"), "{line}");
    assert!(started.elapsed() < LIMIT);
}
