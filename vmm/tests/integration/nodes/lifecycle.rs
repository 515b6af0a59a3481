//! What a user does with a VM whose vCPUs are on two nodes, and how its guest ends it.

use std::fs;
use std::io::Write as _;
use std::process::{Child, Output, Stdio};

use devices::BOOT_TIMER_INIT_REACHED;
use serde_json::Value;
use ssi_hv::exit::ExitCode;
use tiny_guests::nodes::{init_on_two_nodes, work_on_two_nodes};
use tiny_guests::{exec_result, panics, reboot_until_c, reset_register, triple_fault};

use super::commands::{code, code_of, halted, is_left_alone, on_two_nodes, signal, start};
use super::moves::wait_for;
use crate::running::{Place, Running, count, end, node, until};
use crate::support::kvm_is_there;

/// The rest of what a VM says; its node has nothing of it any more.
fn rest_of(vm: Child, place: &Place, node: &Running) -> Output {
    let output = end::rest_of(vm, end::LIMIT);
    is_left_alone(place, node);
    output
}

fn errors_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until each vCPU has this state.
fn are_all(place: &Place, state: &str) {
    until(|| {
        let status = place.json(&["status", "two", "--json"]);
        let vcpus = status["vms"][0]["vcpus"].as_array().expect("vCPUs").clone();
        let states: Vec<_> = vcpus.iter().map(|vcpu| vcpu["state"].clone()).collect();
        let is_so = states.len() == 2 && states.iter().all(|one| one == state);
        is_so.then_some(()).ok_or(format!("{states:?}"))
    });
}

#[test]
fn a_vm_on_two_nodes_is_paused_on_both_and_goes_on() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let mut vm = on_two_nodes(&place, &address, init_on_two_nodes::code(), &[]);
    let mut vm = vm.stdin(Stdio::piped()).spawn().expect("it starts");
    let mut keyboard = vm.stdin.take().expect("a pipe");
    wait_for(&mut vm, b'a');
    for _ in 0..3 {
        place.printed(&["pause", "two"]);
        are_all(&place, "paused");
        let status = place.json(&["status", "two", "--json"]);
        assert_eq!(status["vms"][0]["state"], "paused", "{status}");
        place.printed(&["resume", "two"]);
    }
    // Both hand a word to and fro, and are paused meanwhile.
    keyboard
        .write_all(&[BOOT_TIMER_INIT_REACHED])
        .expect("is read");
    for _ in 0..3 {
        place.printed(&["pause", "two"]);
        place.printed(&["resume", "two"]);
    }
    wait_for(&mut vm, b'b');
    keyboard.write_all(b".").expect("is read");
    let output = rest_of(vm, &place, &node);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(output.stdout, b"k", "{output:?}");
}

#[test]
fn the_power_button_is_pressed_on_a_vm_on_two_nodes() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let mut vm = start(&place, &address, work_on_two_nodes::code(), &[]);
    wait_for(&mut vm, b'b');
    place.printed(&["shutdown", "two"]);
    let output = rest_of(vm, &place, &node);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(output.stdout, b"lk", "{output:?}");
}

#[test]
fn a_vm_on_two_nodes_is_killed_running_and_paused() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let ends = [false, true].map(|is_paused| {
        let vm = halted(&place, &address);
        if is_paused {
            place.printed(&["pause", "two"]);
        }
        place.printed(&["kill", "two"]);
        code_of(&rest_of(vm, &place, &node))
    });
    assert_eq!(ends, [code(ExitCode::Terminated); 2]);
}

#[test]
fn a_guest_on_two_nodes_that_reboots_is_booted_again_on_both() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let (image, report) = (place.path("disk.img"), place.path("report.json"));
    fs::write(&image, "a".repeat(512)).expect("is written");
    let disk = format!("path={image}");
    let more = [
        &["--balloon", "off", "--rng", "off", "--disk", &disk],
        &["--on-reboot", "restart", "--report", &report][..],
    ];
    let vm = start(&place, &address, reboot_until_c::code(), &more.concat());
    let output = rest_of(vm, &place, &node);
    let errors = errors_of(&output);
    assert_eq!(code_of(&output), Some(0), "{errors}");
    assert_eq!(output.stdout, b"abc", "{errors}");
    let report = fs::read_to_string(report).expect("there is a report");
    let report: Value = serde_json::from_str(&report).expect("it is JSON");
    assert_eq!(count(&report, "/boot/restarts"), 2, "{report}");
    assert_eq!(report["nodes"][1]["cpus"], serde_json::json!([1]));
}

#[test]
fn a_guest_on_two_nodes_ends_in_each_way_that_guests_end() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    for (guest, expected, part) in [
        (reset_register::code(), ExitCode::GuestReboot, ""),
        (triple_fault::code(), ExitCode::GuestCrash, "triple fault"),
        (panics::code(), ExitCode::GuestCrash, "boom"),
    ] {
        let output = rest_of(start(&place, &address, guest, &[]), &place, &node);
        let errors = errors_of(&output);
        assert_eq!(code_of(&output), code(expected), "{errors}");
        assert!(errors.contains(part), "{errors}");
    }
}

#[test]
fn a_command_in_a_guest_on_two_nodes_has_its_output_and_exit_code() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let vm = start(&place, &address, exec_result::code(), &["--exec", "any"]);
    let output = rest_of(vm, &place, &node);
    assert_eq!(code_of(&output), Some(42), "{output:?}");
    assert_eq!(output.stdout, b"a\0\xff");
}

#[test]
fn a_primary_that_freezes_loses_its_vm_and_leaves_nothing_on_its_node() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let vm = halted(&place, &address);
    signal(&vm.id().to_string(), libc::SIGSTOP);
    is_left_alone(&place, &node);
    signal(&vm.id().to_string(), libc::SIGCONT);
    let output = end::rest_of(vm, end::LIMIT);
    let errors = errors_of(&output);
    assert_eq!(code_of(&output), code(ExitCode::NodeLost), "{errors}");
    assert!(errors.contains(&format!("node {address}")), "{errors}");
    assert!(errors.contains("; lost with it: "), "{errors}");
}
