//! `ssi-hv node --cpus` and `ssi-hv run --node`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, getpgid, pidfd_open};
use serde_json::{Value, json};
use ssi_hv::exit::ExitCode;
use tiny_guests::{halt_for_ever, second_cpu};

use crate::running::{self, Place, Running, end, node};
use crate::sandbox::of_threads;
use crate::support::kvm_is_there;

/// Time between two looks at a node's status, which has no event.
const PAUSE: Duration = Duration::from_millis(20);

/// Starts a VM with 2 vCPUs, the second of them on the node, which may have options. It is there from
/// the start, unless `from=` is one of them.
pub(super) fn start(place: &Place, node: &str, code: &[u8], more: &[&str]) -> Child {
    let mut command = on_two_nodes(place, node, code, more);
    command.spawn().expect("it starts")
}

/// The command that does so.
pub(super) fn on_two_nodes(place: &Place, node: &str, code: &[u8], more: &[&str]) -> Command {
    let kernel = place.directory.path().join("kernel");
    fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let from = if node.contains("from=") {
        ""
    } else {
        ",from=start"
    };
    let cpu = format!("{node},cpus=1{from}");
    let arguments = [
        &[
            "run", "--kernel", kernel, "--memory", "64M", "--name", "two",
        ],
        &["--cpus", "2", "--node", &cpu][..],
        more,
    ];
    let mut command = place.command(&arguments.concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts a VM without other nodes.
pub(super) fn alone(place: &Place, code: &[u8]) -> Child {
    let kernel = place.directory.path().join("kernel");
    fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let arguments = [
        "run", "--kernel", kernel, "--memory", "64M", "--name", "two",
    ];
    let mut command = place.command(&arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("it starts")
}

/// Starts a VM that runs until it is ended, and waits until its guest runs.
pub(super) fn halted(place: &Place, node: &str) -> Child {
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
pub(super) fn children_of(pid: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").expect("/proc");
    let names = processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_child = |process: &String| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        after_name.split_whitespace().nth(1) == Some(pid)
    };
    names.filter(is_child).collect()
}

pub(super) fn signal(pid: &str, signal: libc::c_int) {
    running::signal(pid.parse().expect("a process id"), signal);
}

/// Waits until a node has nothing of a VM any more.
pub(super) fn is_left_alone(place: &Place, node: &Running) {
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

pub(super) fn code_of(output: &Output) -> Option<i32> {
    output.status.code()
}

pub(super) fn code(code: ExitCode) -> Option<i32> {
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
    let flags = ["--report", report, "--cmdline", "tsc=unstable"];
    let vm = start(&place, &address, second_cpu::code(), &flags);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "AB");
    let log = String::from_utf8_lossy(&output.stderr);
    let (_, added) = log
        .split_once("kernel parameters for vCPUs on several hosts: ")
        .expect("the log has what the kernel got");
    let added = added.lines().next().unwrap_or_default();
    let khz = added.strip_prefix("tsc_early_khz=");
    let khz = khz.and_then(|rest| rest.split(' ').next()?.parse().ok());
    assert!(khz > Some(100_000_u32), "{added}");
    assert!(added.ends_with(" nohz_full=1 irqaffinity=0"), "{added}");
    let report = fs::read_to_string(report).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["guest"]["irqchip"], "user");
    let nodes = report["nodes"].as_array().expect("nodes");
    let cpus: Vec<_> = nodes.iter().map(|node| &node["cpus"]).collect();
    assert_eq!(cpus, [&json!([0]), &json!([1])]);
    assert_eq!(nodes[1]["address"], address.as_str());
    // The node has reported at its end: what one side got, the other one sent.
    let count = |node: usize, what: &str| nodes[node]["transfers"][what].as_u64().expect(what);
    for node in [0, 1] {
        assert_eq!(nodes[node]["state"], "ended");
        for what in ["faults", "pages_received", "pages_sent", "requests"] {
            assert!(count(node, what) > 0, "{what} of node {node} in {report}");
        }
        let from_other = &nodes[node]["peers"][0]["pages_received"];
        assert_eq!(*from_other, count(node, "pages_received"), "{report}");
    }
    // The last page may be on its way.
    assert!(
        count(0, "pages_received") <= count(1, "pages_sent"),
        "{report}"
    );
    assert!(
        count(1, "pages_received") <= count(0, "pages_sent"),
        "{report}"
    );
    assert!(nodes[1]["round_trip_us"].as_f64().expect("was measured") > 0.0);
    let coherence = &report["coherence"];
    let writes = count(0, "writes") + count(1, "writes");
    assert_eq!(coherence["total"]["writes"], writes);
    let hottest = coherence["hottest"].as_array().expect("pages");
    assert!(!hottest.is_empty() && hottest.len() <= 50);
    let both = |page: &serde_json::Value| page["nodes"].as_array().is_some_and(|of| of.len() == 2);
    assert!(
        hottest.iter().any(both),
        "no page went to and fro: {coherence}"
    );
    is_left_alone(&place, &node);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

/// What the control socket of a VM answers when asked for metrics.
fn metrics_of(place: &Place, vm: &Child) -> String {
    let name = format!("vm-{}-two.sock", vm.id());
    let mut stream = UnixStream::connect(place.sockets().join(name)).expect("it listens");
    let request = b"GET /v1/metrics HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).expect("is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

/// Checks what the status says of the time of a node on this host, which has the same counter as the
/// primary.
fn has_one_clock(status: &Value) {
    assert_eq!(status["nodes"][0]["clock"], Value::Null, "of the primary");
    let clock = &status["nodes"][1]["clock"];
    let number = |name: &str| clock[name].as_f64().unwrap_or(f64::NAN);
    let (offset, error) = (number("offset_us"), number("error_us_max"));
    assert!(error > 0.0 && offset.abs() <= error, "{clock}");
    let (rate, error) = (number("rate_ppm"), number("rate_ppm_error_max"));
    assert!(error > 0.0 && rate.abs() <= error, "{clock}");
    assert_eq!(clock["scaled"], false);
    assert!(clock["steps"].is_u64() && clock["steps_us"].is_f64());
}

#[test]
fn the_status_of_a_vm_has_what_each_vcpu_of_each_node_does() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let vm = halted(&place, &address);
    // The node reports once in a second.
    let deadline = Instant::now() + end::LIMIT;
    // The guest halts its first vCPU, and does not start the second one.
    let expected = json!([
        {"cpu": 0, "node": 0, "state": "halted", "page": null},
        {"cpu": 1, "node": 1, "state": "offline", "page": null},
    ]);
    let status = loop {
        let status = place.json(&["status", "two", "--json"])["vms"][0].clone();
        let age = status["nodes"][1]["counted_s_ago"].as_f64();
        if status["vcpus"] == expected
            && status["nodes"][1]["state"] == "up"
            && age.is_some_and(|seconds| seconds < 3.5)
            && status["nodes"][1]["clock"]["rate_ppm"].is_number()
        {
            break status;
        }
        assert!(
            Instant::now() < deadline,
            "the vCPUs are not there: {status}"
        );
        std::thread::sleep(PAUSE);
    };
    assert!(status["coherence"]["total"].is_object());
    has_one_clock(&status);
    let policy = json!({"kind": "static", "moves": 0, "moves_failed": 0, "vcpus": []});
    assert_eq!(status["vcpu_policy"], policy, "{status}");
    for (node, other) in [(0, 1), (1, 0)] {
        let peers = &status["nodes"][node]["peers"];
        let pages = &status["nodes"][node]["transfers"]["pages_received"];
        let expected = json!([{
            "node": other, "transport": "tcp", "connections": 1, "pages_received": pages,
        }]);
        assert_eq!(*peers, expected, "{status}");
    }
    let text = place.printed(&["status", "two"]);
    assert!(text.contains("\ntravels    tcp\n"), "{text}");
    assert!(text.contains("\ntime       1: within "), "{text}");
    assert!(text.contains("\npolicy     static\n"), "{text}");
    assert!(
        text.contains("vCPUs      0 on 0: halted  1 on 1: offline"),
        "{text}"
    );
    let metrics = metrics_of(&place, &vm);
    for series in [
        "ssi_hv_compute_up{node=\"1\"} 1",
        "ssi_hv_compute_peer_info{node=\"1\",peer=\"0\",transport=\"tcp\"} 1",
        "ssi_hv_compute_vcpus{node=\"1\",state=\"offline\"} 1",
    ] {
        assert!(metrics.contains(series), "{series} in {metrics}");
    }
    signal(&vm.id().to_string(), libc::SIGINT);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), code(ExitCode::Interrupted), "{output:?}");
    is_left_alone(&place, &node);
}

#[test]
fn a_node_lends_what_it_is_asked_for() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let half = format!("{address},memory=32M");
    let mut vm = start(
        &place,
        &half,
        halt_for_ever::code(),
        &["--local-memory", "32M"],
    );
    let console = vm.stdout.as_mut().expect("a pipe");
    assert!(end::is_readable(console, end::LIMIT), "the guest is silent");
    let status = place.json(&["status", "--json"]);
    let lent = &status["nodes"][0]["lent_bytes"];
    assert_eq!(lent.as_u64(), Some(32 << 20), "{status}");
    signal(&vm.id().to_string(), libc::SIGINT);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), code(ExitCode::Interrupted), "{output:?}");
    is_left_alone(&place, &node);
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

/// A terminal that hangs up signals the node's group, and a service manager all its processes.
#[test]
fn what_a_node_is_signalled_does_not_end_vms_with_vcpus_there() {
    if !kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (node, address) = node(&place, &["--cpus", "1"]);
    let vm = halted(&place, &address);
    let [process] = &children_of(&node.pid())[..] else {
        panic!("the VM has one process on its node")
    };
    let group = |pid: &str| {
        let pid = Pid::from_raw(pid.parse().expect("a number"));
        getpgid(pid).expect("a group")
    };
    assert_ne!(group(&node.pid()), group(process));
    let handled = of_threads(process, "SigCgt").remove(0);
    let handled = u64::from_str_radix(&handled, 16).expect("a mask");
    for signalled in [libc::SIGHUP, libc::SIGUSR1] {
        assert_ne!(handled & 1 << (signalled - 1), 0, "signal {signalled}");
        signal(process, signalled);
    }
    signal(&vm.id().to_string(), libc::SIGINT);
    let output = end::rest_of(vm, end::LIMIT);
    assert_eq!(code_of(&output), code(ExitCode::Interrupted), "{output:?}");
    is_left_alone(&place, &node);
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
