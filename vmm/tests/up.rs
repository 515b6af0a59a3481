//! `ssi-hv up` as a user meets it: what it starts, how it fails, and that nothing stays behind,
//! whenever and however it is ended.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "tiny_guest/guests.rs"]
mod guests;
#[allow(dead_code, reason = "other tests use the rest")]
mod running;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "tiny_guest/support.rs"]
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use ssi_hv::exit::ExitCode;

use running::{LIMIT, Place, count};

/// Stands for ssh: it gives its last word to a shell, as sshd does.
const SSH: &str = "#!/bin/sh\nfor last; do :; done\nexec sh -c \"$last\"\n";

/// What is seen of `ssi-hv up` from outside, in the order in which it comes.
#[derive(Debug, PartialEq)]
enum Seen {
    Line(String),
    Console(u8),
    Closed,
}

/// A running `ssi-hv up`, in a process group of its own.
struct Up {
    child: Child,
    seen: Receiver<Seen>,
    lines: Vec<String>,
}

fn pump(stream: impl Read + Send + 'static, seen: Sender<Seen>, of_console: bool) {
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        loop {
            let mut line = String::new();
            let mut byte = [0];
            let next = if of_console {
                stream
                    .read_exact(&mut byte)
                    .map(|()| Seen::Console(byte[0]))
            } else {
                stream.read_line(&mut line).map(|read| {
                    if read == 0 {
                        Seen::Closed
                    } else {
                        Seen::Line(line)
                    }
                })
            };
            let Ok(next) = next else { return };
            let last = next == Seen::Closed;
            if seen.send(next).is_err() || last {
                return;
            }
        }
    });
}

impl Up {
    fn start(place: &Place, arguments: &[&str]) -> Self {
        let mut command = place.command(&[&["up"], arguments].concat());
        command.process_group(0);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let (sender, seen) = mpsc::channel();
        pump(child.stdout.take().expect("a pipe"), sender.clone(), true);
        pump(child.stderr.take().expect("a pipe"), sender, false);
        Self {
            child,
            seen,
            lines: Vec::new(),
        }
    }

    fn next(&mut self) -> Seen {
        let seen = self.seen.recv_timeout(LIMIT);
        let seen = seen.unwrap_or_else(|error| panic!("{error}: {:#?}", self.lines));
        if let Seen::Line(line) = &seen {
            self.lines.push(line.clone());
        }
        seen
    }

    /// Waits until a step is told of: a part of a line, or `console` for what the guest says.
    fn wait_for(&mut self, step: &str) {
        loop {
            match self.next() {
                Seen::Console(b'r') if step == "console" => return,
                Seen::Line(line) if line.contains(step) => return,
                Seen::Closed => panic!("no {step:?}: {:#?}", self.lines),
                _ => {}
            }
        }
    }

    fn signal(&self, signal: i32, group: bool) {
        let pid = i32::try_from(self.child.id()).expect("a process id");
        let target = if group { -pid } else { pid };
        // SAFETY: a signal to a child that was not waited for, or to the group that it leads.
        assert_eq!(unsafe { libc::kill(target, signal) }, 0);
    }

    /// Its exit code and all that it has said on stderr.
    fn end(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().expect("it ends").code();
        while self.next() != Seen::Closed {}
        (code, self.lines.concat())
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes that were started with the place's directory for sockets: `up` and all below it.
fn processes(place: &Place) -> Vec<String> {
    let variable = format!("SSI_HV_RUNTIME_DIR={}", place.sockets().display());
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let ours = entries.filter(|entry| {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        environment
            .split(|&byte| byte == 0)
            .any(|one| one == variable.as_bytes())
    });
    ours.map(|entry| {
        let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).replace('\0', " ")
    })
    .collect()
}

/// The network interfaces of this host that processes of a number have made.
fn interfaces(pid: u32) -> Vec<String> {
    let start = format!("ssi{pid}-");
    let all = fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten();
    let names = all.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&start)).collect()
}

/// Waits until nothing is left of a process: no other one, no socket, no interface, no file.
fn nothing_is_left(place: &Place, pid: u32, files: &[PathBuf], when: &str) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let (processes, interfaces) = (processes(place), interfaces(pid));
        if processes.is_empty() && interfaces.is_empty() {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{when}: {processes:#?} {interfaces:?}"
        );
        std::thread::yield_now();
    }
    let left: Vec<_> = fs::read_dir(place.sockets())
        .into_iter()
        .flatten()
        .collect();
    assert!(left.is_empty(), "{when}: {left:?}");
    assert_eq!(all_files(place), files, "{when}");
}

fn all_files(place: &Place) -> Vec<PathBuf> {
    let entries = fs::read_dir(place.directory.path()).expect("a directory");
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| *path != place.sockets());
    paths.sort();
    paths
}

/// Writes a file of a cluster with a guest of 64 MiB, 16 MiB of it here, and gives its path.
fn cluster(place: &Place, code: &[u8], vm: &str, nodes: &str) -> String {
    let directory = place.directory.path();
    let (kernel, ssh) = (directory.join("kernel"), directory.join("ssh"));
    fs::write(&kernel, support::elf(code)).expect("is written");
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

/// A node here, and one that a stand-in for ssh starts.
const TWO: &str = "
[[node]]
name = 'near'
memory = '64M'
[[node]]
name = 'far'
ssh = 'somebody@somewhere'
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
    let guest = guests::walk_until_power_button::code();
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
        "node far: starts on somebody@somewhere",
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
fn killed_at_any_step_it_leaves_nothing_behind() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let vsock = format!(
        "name = 'web'\nvsock = 'cid=3,path={}'",
        place.directory.path().join("v.sock").display()
    );
    let file = cluster(&place, guests::walk_for_ever::code(), &vsock, TWO);
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
            // As a terminal does.
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
            // It may have ended by itself, with the code of either.
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
fn a_node_ends_with_its_standard_input_and_with_its_silence() {
    let place = Place::new();
    let arguments = ["node", "--listen", "127.0.0.1:0", "--memory", "1M"];
    let supervised = ["-v", "--end-with-stdin", "--lease-seconds", "1"];
    for silent in [false, true] {
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
        let output = node.wait_with_output().expect("it ends");
        drop(held);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let why = if silent { "is silent" } else { "has ended" };
        assert!(said.contains(&format!("standard input {why}")), "{said}");
        assert_eq!(place.files(), 0, "its socket is there");
    }
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
    let file = cluster(&place, guests::walk_for_ever::code(), "name = 'web'", nodes);
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
    let guest = guests::walk_until_power_button::code();
    let file = cluster(&place, guest, "name = 'web'\ntransport = 'udp'", TWO);
    let mut up = Up::start(&place, &["--log-format", "json", &file]);
    up.wait_for("VM: starts");
    // It is about to: the process follows.
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
        plan.contains("node far: on somebody@somewhere, lends 64 MiB"),
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
    let guest = guests::walk_for_ever::code();
    let vm = running::vm_with(&place, guest, &["--cluster", &file]);
    let node = place.json(&["status", "--json"]);
    assert_eq!(count(&node, "/nodes/0/leases"), 1);
    assert_eq!(vm.end(libc::SIGTERM), code(ExitCode::Terminated));
    let etcd = ["run", "--kernel", "k", "--cluster", "etcd://h:2379"];
    let line = place.failed(&etcd, ExitCode::Usage);
    assert!(line.contains("is not there yet in this build"), "{line}");
}
