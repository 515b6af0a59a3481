//! `ssi-hv move`.

use std::io::Read as _;
use std::process::{Child, Output};

use serde_json::json;
use ssi_hv::exit::ExitCode;
use tiny_guests::halt_for_ever;
use tiny_guests::nodes::work_on_two_nodes;

use super::commands::{children_of, code, code_of, halted, signal, start};
use crate::running::{Place, end, node};
use crate::support::kvm_is_there;

/// Waits until a guest has written a byte.
fn wait_for(vm: &mut Child, byte: u8) {
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
