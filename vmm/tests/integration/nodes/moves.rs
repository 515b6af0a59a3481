//! `ssi-hv move`.

use std::io::{Read as _, Write as _};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use devices::{BOOT_TIMER_INIT_REACHED, BOOT_TIMER_READY};
use serde_json::json;
use ssi_hv::exit::ExitCode;
use tiny_guests::halt_for_ever;
use tiny_guests::moves::user_program;
use tiny_guests::nodes::{init_on_two_nodes, share_on_two_nodes, work_on_two_nodes};

use super::commands::{children_of, code, code_of, halted, on_two_nodes, signal, start};
use crate::running::{Place, end, node};
use crate::support::kvm_is_there;

/// Waits until a guest has written a byte.
pub(super) fn wait_for(vm: &mut Child, byte: u8) {
    let console = vm.stdout.as_mut().expect("a pipe");
    let mut said = [0];
    while said != [byte] {
        assert!(
            end::is_readable(console, end::LIMIT),
            "it only said {said:?}"
        );
        console.read_exact(&mut said).expect("the VM runs");
    }
}

fn run(place: &Place, arguments: &[&str]) -> Output {
    place.command(arguments).output().expect("it runs")
}

fn refused(place: &Place, cpu: &str, to: &str, text: &str) {
    let output = run(place, &["move", "two", "--cpu", cpu, "--to", to]);
    assert_eq!(code_of(&output), Some(1), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains(text), "{error}");
}

/// The node of each vCPU, as the status has it.
fn nodes_of_vcpus(place: &Place) -> Vec<u64> {
    let status = place.json(&["status", "two", "--json"]);
    let vcpus = status["vms"][0]["vcpus"].as_array().expect("vCPUs").clone();
    let nodes = vcpus.iter().map(|vcpu| vcpu["node"].as_u64());
    nodes.collect::<Option<_>>().expect("numbers")
}

/// Time between two looks at a status, which has no event.
const PAUSE: Duration = Duration::from_millis(20);

/// Runs a guest that reports an event of its boot, and whose second vCPU then moves or stays.
/// Returns what was said on standard error.
fn reports(from: &str, event: u8, moves: bool) -> String {
    boots(init_on_two_nodes::code(), from, event, moves, b"b")
}

/// The same of a guest that boots when it gets this byte, and `says` something then.
fn boots(code: &[u8], from: &str, event: u8, moves: bool, says: &[u8]) -> String {
    let place = Place::new();
    let (_node, address) = node(&place, &["--cpus", "1"]);
    let late = format!("{address},from={from}");
    let mut vm = on_two_nodes(&place, &late, code, &[]);
    let mut vm = vm.stdin(Stdio::piped()).spawn().expect("it starts");
    let mut keyboard = vm.stdin.take().expect("a pipe");
    wait_for(&mut vm, b'a');
    assert_eq!(nodes_of_vcpus(&place), [0, 0], "before the event");
    keyboard.write_all(&[event]).expect("is read");
    for byte in says {
        wait_for(&mut vm, *byte);
    }
    let deadline = Instant::now() + end::LIMIT;
    while moves && nodes_of_vcpus(&place) != [0, 1] {
        assert!(Instant::now() < deadline, "it does not move");
        std::thread::sleep(PAUSE);
    }
    assert_eq!(nodes_of_vcpus(&place), [0, u64::from(moves)]);
    keyboard.write_all(b"y").expect("is read");
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "k");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("begin on this host"), "{said}");
    assert_eq!(said.contains("stayed on this host"), !moves, "{said}");
    said
}

#[test]
fn a_vcpu_goes_to_its_node_when_the_guests_init_runs() {
    if kvm_is_there() {
        let said = reports("init", BOOT_TIMER_INIT_REACHED, true);
        assert!(said.contains("or writes 0x7b"), "{said}");
    }
}

#[test]
fn a_vcpu_goes_to_its_node_when_the_guest_has_booted() {
    if kvm_is_there() {
        let said = reports("ready", BOOT_TIMER_READY, true);
        assert!(said.contains("or writes 0x7c"), "{said}");
    }
}

#[test]
fn a_vcpu_that_waits_for_the_guests_boot_does_not_go_with_its_init() {
    if kvm_is_there() {
        let said = reports("ready", BOOT_TIMER_INIT_REACHED, false);
        assert!(said.contains("with from=ready stayed"), "{said}");
    }
}

/// Pages that node 1 has received, as the status has it.
fn received(place: &Place) -> u64 {
    let status = place.json(&["status", "two", "--json"]);
    let received = &status["vms"][0]["nodes"][1]["transfers"]["pages_received"];
    received.as_u64().unwrap_or_default()
}

#[test]
fn a_vcpu_follows_the_pages_that_it_waits_for() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_node, address) = node(&place, &["--cpus", "1"]);
    let policy = ["--vcpu-policy", "follow"];
    let mut vm = on_two_nodes(&place, &address, share_on_two_nodes::code(), &policy);
    let mut vm = vm.stdin(Stdio::piped()).spawn().expect("it starts");
    let mut keyboard = vm.stdin.take().expect("a pipe");
    wait_for(&mut vm, b'a');
    let deadline = Instant::now() + end::LIMIT;
    let mut were_apart = 0;
    while nodes_of_vcpus(&place) != [0, 0] {
        were_apart = were_apart.max(received(&place));
        assert!(Instant::now() < deadline, "it does not move: {were_apart}");
        std::thread::sleep(PAUSE);
    }
    assert!(were_apart > 100, "{were_apart} pages");
    // The move counts once it has been answered, in the look that ordered it.
    let policy = loop {
        let status = place.json(&["status", "two", "--json"]);
        let policy = status["vms"][0]["vcpu_policy"].clone();
        if policy["moves"] == 1 {
            break policy;
        }
        assert!(Instant::now() < deadline, "no move counts: {policy}");
        std::thread::sleep(PAUSE);
    };
    assert_eq!(
        (&policy["kind"], &policy["moves_failed"]),
        (&json!("follow"), &json!(0))
    );
    let moves = [0, 1].map(|cpu: usize| &policy["vcpus"][cpu]["moves"]);
    assert_eq!(moves, [&json!(0), &json!(1)], "{policy}");
    keyboard.write_all(b"y").expect("is read");
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "k");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("has followed the pages"), "{said}");
}

#[test]
fn a_guest_that_runs_no_program_keeps_its_vcpus_and_the_user_is_told() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_node, address) = node(&place, &["--cpus", "1"]);
    let late = format!("{address},from=init");
    let mut vm = start(&place, &late, work_on_two_nodes::code(), &[]);
    wait_for(&mut vm, b'b');
    assert_eq!(nodes_of_vcpus(&place), [0, 0]);
    assert_eq!(code_of(&run(&place, &["shutdown", "two"])), Some(0));
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "lk");
    let said = String::from_utf8_lossy(&output.stderr);
    let stayed = format!("node {address} (number 1) with from=init stayed on this host");
    assert!(said.contains(&stayed), "{said}");
    assert!(said.contains("the guest has not run a program"), "{said}");
}

#[test]
fn a_vcpu_goes_to_its_node_when_the_guest_runs_a_program_and_reports_nothing() {
    if kvm_is_there() {
        // Neither event has this number.
        let said = boots(user_program::code(), "init", b'x', true, b"");
        assert!(
            said.contains("the guest's init runs: a vCPU moves cpu=1 node=1"),
            "{said}"
        );
    }
}

#[test]
fn a_vcpu_moves_by_a_command_and_the_status_shows_where_it_is() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_node, address) = node(&place, &["--cpus", "1"]);
    let mut vm = start(&place, &address, work_on_two_nodes::code(), &[]);
    // Its CPU 1 waits for the power button, and CPU 0 for CPU 1.
    wait_for(&mut vm, b'b');
    let where_they_are = || {
        let status = place.json(&["status", "two", "--json"]);
        let status = status["vms"][0].clone();
        let vcpus = status["vcpus"].as_array().expect("vCPUs").clone();
        let cpus = [0, 1].map(|node: usize| status["nodes"][node]["cpus"].clone());
        let nodes: Vec<_> = vcpus.iter().map(|vcpu| vcpu["node"].clone()).collect();
        (nodes, cpus)
    };
    assert_eq!(
        where_they_are(),
        (vec![json!(0), json!(1)], [json!([0]), json!([1])])
    );
    refused(
        &place,
        "0",
        "1",
        "node 1 lends 1 CPUs and runs as many vCPUs",
    );
    refused(&place, "2", "0", "there is no vCPU 2: the VM has 2");
    refused(&place, "1", "2", "there is no node 2: the VM has 2");
    let names = format!("no node \"b:1\": the VM has 0 (primary), 1 ({address})");
    refused(&place, "1", "b:1", &names);

    let moved = |cpu, to: &str, said: String| {
        let output = run(&place, &["move", "two", "--cpu", cpu, "--to", to]);
        assert_eq!(code_of(&output), Some(0), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), said);
    };
    moved(
        "1",
        "primary",
        "two: vCPU 1 runs on node 0 (primary)\n".to_owned(),
    );
    assert_eq!(
        where_they_are(),
        (vec![json!(0); 2], [json!([0, 1]), json!([])])
    );
    let said = format!("two: vCPU 0 runs on node 1 ({address})\n");
    moved("0", &address, said);
    assert_eq!(
        where_they_are(),
        (vec![json!(1), json!(0)], [json!([1]), json!([0])])
    );

    assert_eq!(code_of(&run(&place, &["shutdown", "two"])), Some(0));
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "lk");
}

#[test]
fn a_node_that_freezes_before_its_vcpu_leaves_ends_the_vm() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let vm = halted(&place, &address);
    let process = children_of(&node.pid()).pop().expect("its process");
    signal(&process, libc::SIGSTOP);
    let output = run(&place, &["move", "two", "--cpu", "1", "--to", "primary"]);
    assert_eq!(code_of(&output), Some(1), "{output:?}");
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), code(ExitCode::NodeLost), "{output:?}");
    signal(&process, libc::SIGCONT);
}

/// Orders a vCPU to go to a node twice at once, and waits until one order is refused since the other is
/// carried out. Returns the command of that one.
fn in_the_middle_of_a_move(place: &Place, to: &str) -> Child {
    let order = || {
        let mut command = place.command(&["move", "two", "--cpu", "1", "--to", to]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("it starts")
    };
    let mut orders = vec![order(), order()];
    let deadline = Instant::now() + end::LIMIT;
    let refused = loop {
        let has_ended = |order: &mut Child| order.try_wait().expect("is a child").is_some();
        if let Some(ended) = orders.iter_mut().position(has_ended) {
            break orders.remove(ended);
        }
        assert!(Instant::now() < deadline, "both orders are carried out");
        std::thread::sleep(PAUSE);
    };
    let refused = end::rest_of(refused, end::LIMIT);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(error.contains("is under way"), "{error}");
    orders.remove(0)
}

#[test]
fn a_node_that_is_killed_in_the_middle_of_a_move_ends_the_vm_by_its_name() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    for to in ["1", "primary"] {
        let mut vm = start(&place, &address, work_on_two_nodes::code(), &[]);
        wait_for(&mut vm, b'b');
        if to == "1" {
            let output = run(&place, &["move", "two", "--cpu", "1", "--to", "primary"]);
            assert_eq!(code_of(&output), Some(0), "{output:?}");
        }
        let process = children_of(&node.pid()).pop().expect("its process");
        // It neither answers that the vCPU comes, nor gives it away.
        signal(&process, libc::SIGSTOP);
        let order = in_the_middle_of_a_move(&place, to);
        signal(&process, libc::SIGKILL);
        let output = end::rest_of(vm, end::LIMIT);
        assert_eq!(code_of(&output), code(ExitCode::NodeLost), "{output:?}");
        let error = String::from_utf8_lossy(&output.stderr);
        let lost = format!("node {address} (number 1) is lost");
        assert!(error.contains(&lost), "{error}");
        let order = end::rest_of(order, end::LIMIT);
        assert_eq!(code_of(&order), Some(1), "{order:?}");
    }
}

#[test]
fn a_vm_on_one_host_has_no_vcpus_to_move() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let mut vm = super::commands::alone(&place, halt_for_ever::code());
    wait_for(&mut vm, b'h');
    refused(&place, "0", "primary", "start it with --node");
    assert_eq!(code_of(&run(&place, &["kill", "two"])), Some(0));
    end::rest_of(vm, end::LIMIT);
}
