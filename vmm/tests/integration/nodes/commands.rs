//! `ssi-hv node --cpus` and `ssi-hv run --node`.

use std::fs;
use std::io::Read as _;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use ssi_hv::exit::ExitCode;
use tiny_guests::{halt_for_ever, second_cpu};

use crate::running::{Place, Running, end, node};
use crate::support::kvm_is_there;

/// Time between two looks at a node's status, which has no event.
const PAUSE: Duration = Duration::from_millis(20);

/// Starts a VM with 2 vCPUs, the second of them on the node.
fn start(place: &Place, node: &str, code: &[u8], more: &[&str]) -> Child {
    let kernel = place.directory.path().join("kernel");
    fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let cpu = format!("{node},cpus=1");
    let arguments = [
        &[
            "run", "--kernel", kernel, "--memory", "64M", "--name", "two",
        ],
        &["--cpus", "2", "--node", &cpu][..],
        more,
    ];
    let mut command = place.command(&arguments.concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("it starts")
}

/// Starts a VM that runs until it is ended, and waits until its guest runs.
fn halted(place: &Place, node: &str) -> Child {
    let mut vm = start(place, node, halt_for_ever::code(), &[]);
    let console = vm.stdout.as_mut().expect("a pipe");
    assert!(end::is_readable(console, end::LIMIT), "the guest is silent");
    let mut said = [0];
    if console.read_exact(&mut said).is_err() {
        panic!("{:?}", end::rest_of(vm, end::LIMIT));
    }
    assert_eq!(&said, b"h");
    vm
}

/// The processes that a process has started.
fn children_of(pid: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").expect("/proc");
    let names = processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_child = |process: &String| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        after_name.split_whitespace().nth(1) == Some(pid)
    };
    names.filter(is_child).collect()
}

fn signal(pid: &str, signal: libc::c_int) {
    let pid = pid.parse().expect("a process id");
    // SAFETY: sends a signal to a process that this test has started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Waits until a node has nothing of a VM any more.
fn is_left_alone(place: &Place, node: &Running) {
    let deadline = Instant::now() + end::LIMIT;
    let lent = || {
        let status = place.json(&["status", "--json"]);
        let nodes = status["nodes"].as_array().expect("nodes").clone();
        let lent = nodes.iter().map(|node| node["lent_bytes"].as_u64());
        lent.collect::<Option<Vec<_>>>().expect("bytes")
    };
    while !children_of(&node.pid()).is_empty() || lent() != [0] {
        assert!(Instant::now() < deadline, "the VM is still on its node");
        std::thread::sleep(PAUSE);
    }
}

fn code_of(output: &Output) -> Option<i32> {
    output.status.code()
}

fn code(code: ExitCode) -> Option<i32> {
    Some(code.code().into())
}

#[test]
fn a_guest_starts_its_second_cpu_on_a_node() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let report = place.directory.path().join("report");
    let report = report.to_str().expect("UTF-8");
    let vm = start(&place, &address, second_cpu::code(), &["--report", report]);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "AB");
    let report = fs::read_to_string(report).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["guest"]["irqchip"], "user");
    is_left_alone(&place, &node);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

/// Sends a signal to the process of a VM on its node: the VM ends, names the node and says `why`, and
/// nothing of it is left there.
fn is_lost_after(how: libc::c_int, why: &str) {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let vm = halted(&place, &address);
    let [process] = &children_of(&node.pid())[..] else {
        panic!("the VM has one process on its node")
    };
    signal(process, how);
    let output = end::rest_of(vm, end::LIMIT);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(code_of(&output), code(ExitCode::NodeLost), "{stderr}");
    assert!(stderr.contains(&format!("node {address}")), "{stderr}");
    assert!(stderr.contains(why), "{stderr}");
    is_left_alone(&place, &node);
}

#[test]
fn a_vm_whose_process_on_a_node_is_killed_ends_and_names_the_node() {
    is_lost_after(libc::SIGKILL, "signal 9");
}

#[test]
fn a_frozen_node_is_lost_after_its_silence() {
    is_lost_after(libc::SIGSTOP, "silent for 10 s");
}

#[test]
fn a_vm_whose_node_is_killed_or_stops_ends_and_names_it() {
    if !kvm_is_there() {
        return;
    }
    for how in [libc::SIGKILL, libc::SIGTERM] {
        let place = Place::new();
        let (node, address) = node(&place, &["--cpus", "1"]);
        let vm = halted(&place, &address);
        // Readable once the process has ended.
        let open = |pid: &String| {
            let pid = Pid::from_raw(pid.parse().expect("a number")).expect("a process id");
            pidfd_open(pid, PidfdFlags::empty()).expect("a running process")
        };
        let of_vm: Vec<_> = children_of(&node.pid()).iter().map(open).collect();
        assert_eq!(of_vm.len(), 1, "the VM has one process on its node");
        node.end(how);
        let output = end::rest_of(vm, end::LIMIT);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(code_of(&output), code(ExitCode::NodeLost), "{stderr}");
        assert!(stderr.contains(&format!("node {address}")), "{stderr}");
        for process in &of_vm {
            let has_ended = end::is_readable(process, end::LIMIT);
            assert!(has_ended, "the VM's process is left behind");
        }
    }
}

#[test]
fn a_vm_that_is_killed_or_interrupted_leaves_nothing_on_its_node() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let ends = [
        (libc::SIGKILL, None),
        (libc::SIGINT, code(ExitCode::Interrupted)),
    ];
    for (how, expected) in ends {
        let vm = halted(&place, &address);
        signal(&vm.id().to_string(), how);
        let output = end::rest_of(vm, end::LIMIT);
        assert_eq!(code_of(&output), expected, "{output:?}");
        is_left_alone(&place, &node);
    }
}

#[test]
fn a_node_that_cannot_run_the_vcpus_is_named_with_what_it_has() {
    let place = Place::new();
    let kernel = place.directory.path().join("kernel");
    fs::write(&kernel, tiny_guests::elf(halt_for_ever::code())).expect("is written");
    let fails = |address: &str, cpus: u32, memory: &str, text: &str| {
        let node = format!("{address},cpus={cpus}");
        let cpus = (cpus + 1).to_string();
        let kernel = kernel.to_str().expect("UTF-8");
        let arguments = ["run", "--kernel", kernel, "--memory", memory];
        let arguments = [&arguments[..], &["--cpus", &cpus, "--node", &node]].concat();
        let line = place.failed(&arguments, ExitCode::NodeUnavailable);
        assert!(line.contains(&format!("node {address}")), "{line}");
        assert!(line.contains(text), "{line}");
    };
    let (without, address) = node(&place, &[]);
    let text = "this node lends memory only; start it with --cpus";
    fails(&address, 1, "64M", text);
    drop(without);
    let (few, address) = node(&place, &["--cpus", "1"]);
    fails(&address, 2, "64M", "2 vCPUs asked, 1 of 1 are free");
    fails(&address, 1, "66M", "67108864 are free; lower --memory");
    drop(few);
    fails(&address, 1, "64M", "is `ssi-hv node` running there");
}
