//! A guest on two nodes gets memory while it runs.

use std::fs;
use std::io::Read as _;
use std::process::Child;

use serde_json::Value;
use ssi_hv::exit::ExitCode;
use tiny_guests::nodes::add_on_two_nodes;

use super::commands::{code_of, start};
use crate::running::{Place, count, end, node};
use crate::support::kvm_is_there;

/// Takes the next byte that the guest says.
#[track_caller]
fn says(vm: &mut Child, byte: u8) {
    let console = vm.stdout.as_mut().expect("a pipe");
    assert!(end::is_readable(console, end::LIMIT), "the guest is silent");
    let mut said = [0];
    console.read_exact(&mut said).expect("the guest talks");
    assert_eq!(char::from(said[0]), char::from(byte));
}

#[test]
fn memory_that_is_plugged_is_that_of_both_nodes_and_so_when_it_is_plugged_again() {
    const ADDED: u64 = 4 << 20;
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_node, address) = node(&place, &["--cpus", "1"]);
    // Together they lend just what the guest can have.
    let lends = format!("{address},memory=34M");
    let report = place.path("report");
    let flags = [
        &["--hotplug-memory", "4M", "--local-memory", "34M"][..],
        &["--balloon", "off", "--rng", "off", "--report", &report],
    ];
    let mut vm = start(&place, &lends, add_on_two_nodes::code(), &flags.concat());
    says(&mut vm, b'b');
    let plug = ["hotplug", "two", "--memory", "4M"];
    let waits = ["--wait", "60"];
    assert_eq!(
        place.printed(&[&plug[..], &waits].concat()),
        "two: 4 MiB plugged of 4 MiB requested, 4 MiB is the limit\n"
    );
    says(&mut vm, b'p');
    let status = place.json(&["status", "two", "--json"]);
    assert_eq!(count(&status, "/vms/0/memory/hotplug/plugged_bytes"), ADDED);
    let donor = [&plug[..], &["--donor", "127.0.0.1:1"]].concat();
    let line = place.failed(&donor, ExitCode::HostError);
    assert!(line.contains("no donor is needed"), "{line}");
    let unplug = ["hotplug", "two", "--memory", "0"];
    assert_eq!(
        place.printed(&[&unplug[..], &waits].concat()),
        "two: 0 B plugged of 0 B requested, 4 MiB is the limit\n"
    );
    says(&mut vm, b'u');
    // The guest may end before this is answered.
    place.output(&plug);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "k", "{output:?}");
    let report = fs::read_to_string(report).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    for bytes in ["max", "requested", "plugged"] {
        let pointer = format!("/memory/hotplug/{bytes}_bytes");
        assert_eq!(count(&report, &pointer), ADDED, "{pointer}");
    }
}
