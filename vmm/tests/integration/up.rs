//! `ssi-hv up` as a user sees it: what it starts, how it fails, and that nothing remains, whenever
//! and however it ends.

mod process;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use ssi_hv::exit::ExitCode;

use crate::running;
use crate::running::{LIMIT, Place, count, end};
use crate::support;
use process::{Up, all_files, interfaces, nothing_is_left, processes};

/// Replaces ssh: passes its last argument to a shell, as sshd does.
const SSH: &str = "#!/bin/sh\nfor last; do :; done\nexec sh -c \"$last\"\n";

/// Writes a cluster file with a guest of 64 MiB, 16 MiB of it local, and returns its path.
fn cluster(place: &Place, code: &[u8], vm: &str, nodes: &str) -> String {
    let directory = place.directory.path();
    let (kernel, ssh) = (directory.join("kernel"), directory.join("ssh"));
    fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
    fs::write(&ssh, SSH).expect("is written");
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).expect("is changed");
    let nodes = nodes
        .replace("SSH", ssh.to_str().expect("UTF-8"))
        .replace("PROGRAM", env!("CARGO_BIN_EXE_ssi-hv"));
    let text = format!(
        "[vm]\nkernel = \"{}\"\nmemory = \"64M\"\nlocal-memory = \"16M\"\n{vm}\n{nodes}",
        kernel.display()
    );
    let path = directory.join("cluster.toml");
    fs::write(&path, text).expect("is written");
    path.to_str().expect("UTF-8").to_owned()
}

/// A node here, and one that the replacement of ssh starts.
const TWO: &str = "
[[node]]
name = 'near'
memory = '64M'
[[node]]
name = 'far'
ssh = 'user@somewhere'
ssh-program = 'SSH'
program = 'PROGRAM'
listen = '127.0.0.1:0'
memory = '64M'
lease-seconds = 20
";

fn code(exit: ExitCode) -> Option<i32> {
    Some(exit.code().into())
}

#[test]
fn nodes_and_vm_start_and_all_of_it_ends_with_the_vm() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let guest = tiny_guests::walk_until_power_button::code();
    let file = cluster(&place, guest, "name = 'web'", TWO);
    let files = all_files(&place);
    let mut up = Up::start(&place, &[&file]);
    let pid = up.child.id();
    up.wait_for("console");
    let status = place.json(&["status", "--json"]);
    assert_eq!(status["nodes"].as_array().map(Vec::len), Some(2));
    let deadline = Instant::now() + LIMIT;
    while count(
        &place.json(&["status", "--json"]),
        "/vms/0/faults/remote/count",
    ) < 10
    {
        assert!(Instant::now() < deadline, "no remote faults");
    }
    let lent = |now: &serde_json::Value, node: usize| count(now, &format!("/nodes/{node}/leases"));
    let now = place.json(&["status", "--json"]);
    assert_eq!((lent(&now, 0), lent(&now, 1)), (1, 1));

    let second = place.failed(&["up", &file], ExitCode::Usage);
    assert!(
        second.contains("is up already, by another `ssi-hv up`"),
        "{second}"
    );
    let copy = place.directory.path().join("copy.toml");
    fs::copy(&file, &copy).expect("is copied");
    let copy = copy.to_str().expect("UTF-8");
    let second = place.failed(&["up", copy], ExitCode::Usage);
    assert!(second.contains("a VM named web runs already"), "{second}");
    fs::remove_file(copy).expect("is removed");

    place.printed(&["shutdown", "web"]);
    let (exit, said) = up.end();
    assert_eq!(exit, code(ExitCode::Success), "{said}");
    for part in [
        "node far: starts on user@somewhere",
        "node near: lends 64 MiB on 127.0.0.1:",
        "VM: starts, with 2 node(s)",
        "VM: ended with exit code 0",
        "stopping node(s) near, far",
        "node far: ended with exit code 0",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    assert!(
        !said.contains('\x1b') && !said.contains("[=") && !said.contains('\r'),
        "{said}"
    );
    nothing_is_left(&place, pid, &files, "at the end");
}

#[test]
fn a_node_with_cpus_runs_vcpus_of_the_vm() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let guest = tiny_guests::second_cpu::code();
    let node = TWO.replacen(
        "memory = '64M'",
        "memory = '64M'\ncpus = 1\nfrom = 'start'",
        1,
    );
    let (near, _) = node.split_at(node.rfind("[[node]]").expect("two nodes"));
    let report = place.directory.path().join("report.json");
    let report = report.to_str().expect("UTF-8");
    let keys = format!("name = 'two'\ncpus = 2\nreport = '{report}'");
    let file = cluster(&place, guest, &keys, near);
    let text = fs::read_to_string(&file).expect("is read");
    fs::write(&file, text.replace("local-memory = \"16M\"\n", "")).expect("is written");
    let files = all_files(&place);
    let up = Up::start(&place, &[&file]);
    let pid = up.child.id();
    let (exit, said) = up.end();
    assert_eq!(exit, code(ExitCode::Success), "{said}");
    let part = "node near: lends 64 MiB and 1 vCPU(s) on 127.0.0.1:";
    assert!(said.contains(part), "{said}");
    let written = fs::read_to_string(report).expect("a report");
    let written: serde_json::Value = serde_json::from_str(&written).expect("JSON");
    assert_eq!(written["nodes"][1]["cpus"], serde_json::json!([1]));
    assert!(count(&written, "/nodes/1/transfers/faults") > 0);
    fs::remove_file(report).expect("is removed");
    nothing_is_left(&place, pid, &files, "at the end");
}

#[test]
fn killed_at_any_step_it_leaves_nothing_behind() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let vsock = format!(
        "name = 'web'\nvsock = 'cid=3,path={}'",
        place.directory.path().join("v.sock").display()
    );
    let file = cluster(&place, tiny_guests::walk_for_ever::code(), &vsock, TWO);
    let files = all_files(&place);
    let by_signal = |signal| match signal {
        libc::SIGKILL => None,
        libc::SIGINT => code(ExitCode::Interrupted),
        _ => code(ExitCode::Terminated),
    };
    for step in [
        "node near: starts",
        "node far: starts",
        "lends 64 MiB",
        "VM: starts",
        "on 2 donor(s)",
        "console",
    ] {
        for (signal, group) in [
            (libc::SIGKILL, false),
            (libc::SIGTERM, false),
            (libc::SIGINT, false),
            // As a terminal does: to the whole process group.
            (libc::SIGINT, true),
        ] {
            let when = format!("signal {signal} after {step:?}, to the group: {group}");
            let mut up = Up::start(&place, &[&file]);
            let pid = up.child.id();
            up.wait_for(step);
            up.signal(signal, group);
            let (exit, said) = up.end();
            assert_eq!(exit, by_signal(signal), "{when}: {said}");
            nothing_is_left(&place, pid, &files, &when);
        }
    }
    for (first, step) in [
        (libc::SIGTERM, "VM: is stopped"),
        (libc::SIGTERM, "VM: ended with"),
        (libc::SIGTERM, "stopping node(s)"),
        (libc::SIGTERM, "node near: ended with"),
    ] {
        for signal in [libc::SIGKILL, libc::SIGINT] {
            let when = format!("signal {signal} after {step:?}");
            let mut up = Up::start(&place, &[&file]);
            let pid = up.child.id();
            up.wait_for("console");
            up.signal(first, false);
            up.wait_for(step);
            up.signal(signal, false);
            // It may have ended by itself, with either code.
            up.end();
            nothing_is_left(&place, pid, &files, &when);
        }
    }
}

#[test]
fn a_node_that_does_not_start_is_named_with_its_last_words_and_the_others_are_stopped() {
    let place = Place::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address");
    let more = format!("{TWO}[[node]]\nname = 'third'\nlisten = '{address}'\nmemory = '1M'\n");
    let refused = |nodes: &str| {
        let file = cluster(&place, &[], "", nodes);
        let files = all_files(&place);
        let up = Up::start(&place, &["--quiet", &file]);
        let pid = up.child.id();
        let (exit, said) = up.end();
        assert_eq!(exit, code(ExitCode::DonorUnavailable), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        nothing_is_left(&place, pid, &files, &said);
        said
    };
    let said = refused(&more);
    assert!(
        said.contains("node third ended with exit code 1 and has not"),
        "{said}"
    );
    assert!(said.contains(&address.to_string()), "{said}");
    assert!(said.contains("Address already in use"), "{said}");

    let said = refused(&TWO.replace("PROGRAM", "/no/such/ssi-hv"));
    assert!(said.contains("node far ended with exit code 127"), "{said}");
    assert!(said.contains("/no/such/ssi-hv"), "{said}");

    let said = refused(&TWO.replace("SSH", "/no/such/ssh"));
    assert!(
        said.contains("cannot start node far: cannot start /no/such/ssh"),
        "{said}"
    );
    assert!(said.contains("No such file"), "{said}");
}

#[test]
fn the_command_of_a_vm_in_a_file_of_its_own_has_the_exit_code_of_commands() {
    let place = Place::new();
    let file = cluster(&place, &[], "exec = 'true'", TWO);
    let text = fs::read_to_string(&file).expect("is read");
    let (vm, nodes) = text.split_at(text.find("[[node]]").expect("nodes"));
    let of_vm = place.path("vm.toml");
    fs::write(&of_vm, vm.strip_prefix("[vm]").expect("the VM")).expect("is written");
    let nodes = nodes.replace(env!("CARGO_BIN_EXE_ssi-hv"), "/no/such/ssi-hv");
    fs::write(&file, format!("vm = '{of_vm}'\n{nodes}")).expect("is written");
    let (exit, said) = Up::start(&place, &[&file]).end();
    assert_eq!(exit, Some(125), "{said}");
    assert!(said.contains("/no/such/ssi-hv"), "{said}");
    // Messages do not interleave with what a command says.
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_node_ends_with_its_standard_input_and_with_its_silence() {
    let place = Place::new();
    let arguments = ["node", "--listen", "127.0.0.1:0", "--memory", "1M"];
    // A node may take some seconds to start, and must not miss signs of life during that time.
    // What the kernel sends a node whose starter was killed is no second order to stop.
    let cases = [
        (false, false, "60"),
        (false, true, "60"),
        (true, false, "5"),
    ];
    for (silent, signalled, lease_seconds) in cases {
        let supervised = ["-v", "--end-with-stdin", "--lease-seconds", lease_seconds];
        let mut command = place.command(&[&arguments[..], &supervised].concat());
        command.stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut node = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut stdin = node.stdin.take().expect("a pipe");
        let mut line = String::new();
        let mut stdout = BufReader::new(node.stdout.take().expect("a pipe"));
        stdout.read_line(&mut line).expect("it prints");
        assert!(line.starts_with("lending 1 MiB on "), "{line}");
        // A sign of life does not end it.
        stdin.write_all(b"\n").expect("it reads");
        let held = silent.then_some(stdin);
        if signalled {
            running::signal(node.id(), libc::SIGTERM);
        }
        let output = end::rest_of(node, LIMIT);
        drop(held);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let why = if silent { "is silent" } else { "has ended" };
        // The signal may have come first.
        let is_said = said.contains(&format!("standard input {why}"));
        assert!(is_said || signalled, "{said}");
        assert_eq!(place.files(), 0, "its socket is there");
    }
}

#[test]
fn a_file_that_another_one_is_about_to_leave_is_waited_for() {
    let place = Place::new();
    let guest = tiny_guests::walk_until_power_button::code();
    let file = cluster(&place, guest, "name = 'web'", TWO);
    let held = fs::File::open(&file).expect("it was written");
    // SAFETY: the descriptor is open; the call takes two integers.
    assert_eq!(unsafe { libc::flock(held.as_raw_fd(), libc::LOCK_EX) }, 0);
    let mut up = Up::start(&place, &[&file]);
    let descriptors = format!("/proc/{}/fd", up.child.id());
    let is_open = || {
        let all = fs::read_dir(&descriptors).expect("its descriptors");
        all.flatten()
            .any(|one| fs::read_link(one.path()).is_ok_and(|path| path == Path::new(&file)))
    };
    let deadline = Instant::now() + LIMIT;
    while !is_open() {
        let ended = up.child.try_wait().expect("it is ours");
        assert!(ended.is_none() && Instant::now() < deadline, "{ended:?}");
    }
    drop(held);
    up.wait_for("node near: starts");
    up.signal(libc::SIGTERM, false);
    let (ended, said) = up.end();
    assert_eq!(ended, code(ExitCode::Terminated), "{said}");
}

#[test]
fn a_node_in_a_namespace_is_reached_by_a_cable_that_goes_with_it() {
    // SAFETY: the call has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: namespaces need root");
        return;
    }
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let nodes = "[[node]]\nname = 'a'\nmemory = '64M'\nnamespace = true\n\
                 [[node]]\nname = 'b'\nmemory = '64M'\nnamespace = true\n";
    let file = cluster(
        &place,
        tiny_guests::walk_for_ever::code(),
        "name = 'web'",
        nodes,
    );
    let files = all_files(&place);
    let own = fs::read_link("/proc/self/ns/net").expect("a namespace");
    for (step, signal) in [
        ("node a: starts", libc::SIGKILL),
        ("node b: starts", libc::SIGKILL),
        ("lends 64 MiB on 198.1", libc::SIGKILL),
        ("console", libc::SIGKILL),
        ("console", libc::SIGTERM),
    ] {
        let mut up = Up::start(&place, &[&file]);
        let pid = up.child.id();
        up.wait_for(step);
        if step == "console" {
            let nodes = place.json(&["status", "--json"])["nodes"].clone();
            let mut namespaces: Vec<_> = nodes
                .as_array()
                .expect("nodes")
                .iter()
                .map(|node| {
                    let path = format!("/proc/{}/ns/net", node["pid"]);
                    fs::read_link(Path::new(&path)).expect("a namespace")
                })
                .chain([own.clone()])
                .collect();
            namespaces.sort();
            namespaces.dedup();
            assert_eq!(namespaces.len(), 3, "each has its own");
            assert_eq!(interfaces(pid).len(), 2);
            let status = || place.json(&["status", "--json"]);
            let deadline = Instant::now() + LIMIT;
            while count(&status(), "/vms/0/faults/remote/count") < 10 {
                assert!(Instant::now() < deadline, "no remote faults");
            }
        }
        up.signal(signal, false);
        up.end();
        nothing_is_left(&place, pid, &files, step);
    }
}

#[test]
fn messages_in_json_are_objects_and_udp_has_the_fingerprint_of_the_node() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let guest = tiny_guests::walk_until_power_button::code();
    let file = cluster(&place, guest, "name = 'web'\ntransport = 'udp'", TWO);
    let mut up = Up::start(&place, &["--log-format", "json", &file]);
    up.wait_for("VM: starts");
    // It is starting: the process follows.
    let deadline = Instant::now() + LIMIT;
    let vm = loop {
        let mut running = processes(&place).into_iter();
        if let Some(vm) = running.find(|words| words.contains(" run ")) {
            break vm;
        }
        assert!(Instant::now() < deadline, "no VM");
    };
    assert_eq!(vm.matches(",fingerprint=").count(), 2, "{vm}");
    up.wait_for("console");
    let status = place.printed(&["status", "web", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    let path = &status["vms"][0]["nodes"][1]["path"];
    assert_eq!(
        (&path["faults"], &path["bulk"]),
        (&"udp".into(), &"udp".into()),
        "{path}"
    );
    assert!(path["tcp"].is_null(), "{path}");
    assert!(path["udp"]["page_us"].as_f64() > Some(0.0), "{path}");
    place.printed(&["shutdown", "web"]);
    let (exit, said) = up.end();
    assert_eq!(exit, Some(0), "{said}");
    for line in said.lines() {
        let parsed = serde_json::from_str::<serde_json::Value>(line);
        assert!(
            parsed.is_ok_and(|value| value["level"].is_string()),
            "{line}"
        );
    }
}

#[test]
fn check_and_print_config_start_nothing() {
    let place = Place::new();
    let file = cluster(&place, b"x", "", TWO);
    let plan = place.printed(&["up", "--check", &file]);
    assert!(
        plan.contains("node near: here, lends 64 MiB on 127.0.0.1:0\n"),
        "{plan}"
    );
    assert!(
        plan.contains("node far: on user@somewhere, lends 64 MiB"),
        "{plan}"
    );
    assert!(
        plan.contains("VM: 64 MiB of memory, 1 CPU(s), boots "),
        "{plan}"
    );
    let printed = place.printed(&["up", "--print-config", &file]);
    let again = place.directory.path().join("again.toml");
    fs::write(&again, &printed).expect("is written");
    let again = again.to_str().expect("UTF-8");
    assert_eq!(place.printed(&["up", "--print-config", again]), printed);
    assert!(!place.sockets().exists());
    let wrong = cluster(&place, b"x", "memroy = 1", TWO);
    let line = place.failed(&["up", &wrong], ExitCode::Usage);
    assert!(line.contains("did you mean `memory`?"), "{line}");
    let line = place.failed(&["up", "/no/such.toml"], ExitCode::Usage);
    assert!(
        line.contains("cannot read the cluster's file /no/such.toml"),
        "{line}"
    );
}

#[test]
fn run_takes_nodes_of_the_file_that_run_already() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (_node, address) = running::node(&place, &[]);
    let nodes = format!("[[node]]\nlisten = '{address}'\nmemory = '64M'\n");
    let file = cluster(&place, b"x", "", &nodes);
    let guest = tiny_guests::walk_for_ever::code();
    let vm = running::vm_with(&place, guest, &["--cluster", &file]);
    let node = place.json(&["status", "--json"]);
    assert_eq!(count(&node, "/nodes/0/leases"), 1);
    assert_eq!(vm.end(libc::SIGTERM), code(ExitCode::Terminated));
    let etcd = ["run", "--kernel", "k", "--cluster", "etcd://h"];
    let line = place.failed(&etcd, ExitCode::Usage);
    assert!(line.contains("`h` is not HOST:PORT"), "{line}");
}
