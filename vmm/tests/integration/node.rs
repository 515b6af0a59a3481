//! `ssi-hv node`, run by a user and by a service manager.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fabric_transport::control::{ControlError, ControlStream};
use fabric_wire::{FrameKind, LeaseGrant, LeaseRequest, LeaseStatus};
use rustix::process::{Pid, Signal, kill_process};
use ssi_hv::exit::ExitCode;

use crate::running::end;

#[test]
fn a_device_that_is_not_there_is_answered_with_the_flag_of_the_node() {
    let listen = ["node", "--listen", "127.0.0.1:0", "--memory", "1M"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    let output = end::output_of(
        command
            .args(listen)
            .args(["--rdma-device", "no-such-device"])
            .stdin(Stdio::null()),
    );
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let code = i32::from(ExitCode::HostError.code());
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    // With libibverbs, without it, and with other devices.
    assert!(stderr.contains("--rdma-device none"), "{stderr}");
    assert!(!stderr.contains("--transport"), "{stderr}");
}

#[test]
fn a_service_manager_is_told_when_vms_may_come() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("is bound");
    let limit = Duration::from_secs(60);
    socket.set_read_timeout(Some(limit)).expect("is set");
    let mut node = Command::new(env!("CARGO_BIN_EXE_ssi-hv"))
        .args(["node", "--listen", "127.0.0.1:0", "--memory", "1M"])
        .env("NOTIFY_SOCKET", &path)
        .env("SSI_HV_RUNTIME_DIR", directory.path().join("sockets"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the command starts");
    let mut said = [0; 512];
    let received = socket.recv(&mut said);
    node.kill().expect("it runs");
    node.wait().expect("it ends");
    let said = String::from_utf8_lossy(&said[..received.expect("it says so")]).into_owned();
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[0], "READY=1", "{said}");
    assert!(
        lines[1].starts_with("STATUS=lending 1 MiB on 127.0.0.1:"),
        "{said}"
    );
}

/// Number of connections of leases, above the limit: each needs an open file of the node.
const CONNECTIONS: usize = 100;

/// A lease of a page, and its connection.
fn lease(node: SocketAddr, duration_ms: u32) -> (ControlStream, LeaseGrant) {
    let (control, granted) = ask(node, 4096, duration_ms);
    (control, granted.expect("it lends"))
}

/// Asks for a lease.
fn ask(
    node: SocketAddr,
    bytes: u64,
    duration_ms: u32,
) -> (ControlStream, Result<LeaseGrant, ControlError>) {
    let mut control = ControlStream::connect(node).expect("it listens");
    let request = LeaseRequest {
        vm: "vm".into(),
        bytes,
        or_less: false,
        duration_ms,
    };
    let granted = control.call(FrameKind::Lease, &request, FrameKind::Granted);
    (control, granted)
}

#[test]
fn a_low_limit_of_open_files_does_not_limit_connections_of_leases() {
    let directory = tempfile::tempdir().expect("a directory");
    let script = "ulimit -Sn 64; exec \"$0\" node --listen 127.0.0.1:0 --memory 1M";
    let (mut node, address) = listening(
        Command::new("sh")
            .args(["-c", script, env!("CARGO_BIN_EXE_ssi-hv")])
            .env("SSI_HV_RUNTIME_DIR", directory.path())
            .stderr(Stdio::null()),
    );
    let address = address.expect("an address");
    let connected: Vec<_> = (0..CONNECTIONS).map(|_| lease(address, 60_000)).collect();
    let found = fs::read_dir(format!("/proc/{}/fd", node.id())).map_or(0, Iterator::count);
    node.kill().expect("it runs");
    node.wait().expect("it ends");
    drop(connected);
    assert!(found >= CONNECTIONS, "{found} files are open");
}

/// A node that logs what clients do.
fn node_that_logs(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command
        .args(["node", "--listen", "127.0.0.1:0", "--memory", "1M"])
        .args(["--log-level", "info"])
        .env("SSI_HV_RUNTIME_DIR", directory.join("sockets"));
    command
}

/// Starts a node. Returns it and its address, if it says one: the caller ends it first.
fn listening(command: &mut Command) -> (Child, Option<SocketAddr>) {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut node = command.spawn().expect("the command starts");
    let mut line = String::new();
    let stdout = node.stdout.take().expect("a pipe");
    let read = BufReader::new(stdout).read_line(&mut line);
    let address = line.trim().rsplit(' ').next();
    let address = address.filter(|_| read.is_ok());
    (node, address.and_then(|text| text.parse().ok()))
}

/// Times that a client does what is logged.
const REPEATED: usize = 50;

/// Runs `client` against a node. Returns what it returned, the log, and how many lines of a kind
/// that may have.
fn logged<R>(client: impl FnOnce(SocketAddr) -> R) -> (R, String, usize) {
    let directory = tempfile::tempdir().expect("a directory");
    let log = fs::File::create(directory.path().join("log")).expect("a file");
    let (mut node, address) = listening(node_that_logs(directory.path()).stderr(log));
    let started = Instant::now();
    let returned = address.map(client);
    let seconds = usize::try_from(started.elapsed().as_secs()).expect("not long");
    // In order, so that all lines are written.
    kill_process(Pid::from_child(&node), Signal::TERM).expect("it runs");
    end::end_within(&mut node, end::LIMIT).expect("it ends");
    let log = fs::read_to_string(directory.path().join("log")).expect("UTF-8");
    (returned.expect("an address"), log, 1 + seconds / 10)
}

fn check_lines(log: &str, text: &str, most: usize) {
    let lines = log.lines().filter(|line| line.contains(text)).count();
    assert!((1..=most).contains(&lines), "{lines} lines: {log}");
}

#[test]
fn refusals_that_a_client_can_cause_fill_no_log() {
    let (refused, log, most) = logged(|address| {
        let refused = (0..REPEATED).filter(|_| ask(address, 1 << 40, 60_000).1.is_err());
        refused.count()
    });
    assert_eq!(refused, REPEATED);
    check_lines(&log, "refused", most);
}

#[test]
fn leases_that_a_client_takes_in_a_loop_fill_no_log() {
    let ((), log, most) = logged(|address| {
        for _ in 0..REPEATED {
            let (mut control, grant) = lease(address, 60_000);
            let ended: Result<LeaseStatus, _> =
                control.call(FrameKind::Release, &grant.token, FrameKind::Status);
            ended.expect("it has the lease");
        }
        let short: Vec<_> = (0..REPEATED).map(|_| lease(address, 1)).collect();
        // All memory is available again when they have ended.
        let deadline = Instant::now() + Duration::from_secs(60);
        while ask(address, 1 << 20, 60_000).1.is_err() {
            assert!(Instant::now() < deadline, "they are not renewed, and last");
        }
        drop(short);
    });
    for text in ["memory lent", "memory returned", "lease ended"] {
        check_lines(&log, text, most);
    }
}

#[test]
fn a_hangup_does_not_end_a_node_without_credentials() {
    let directory = tempfile::tempdir().expect("a directory");
    let (mut node, address) = listening(node_that_logs(directory.path()).stderr(Stdio::piped()));
    let pid = Pid::from_child(&node);
    kill_process(pid, Signal::HUP).expect("it runs");
    let said = end::said_until(node.stderr.take(), "nothing to read again");
    let serves = address.map(|address| ControlStream::connect(address).is_ok());
    let hung_up = node.try_wait().expect("it was not waited for");
    let _ = kill_process(pid, Signal::TERM);
    let ended = end::end_within(&mut node, end::LIMIT).expect("it ends");
    assert_eq!(hung_up, None, "{said}");
    assert!(said.contains("nothing to read again"), "{said}");
    assert_eq!(serves, Some(true), "{said}");
    assert_eq!(ended.code(), Some(0));
}

#[test]
#[should_panic(expected = "no end within")]
fn a_process_that_does_not_end_fails_its_test() {
    let mut command = Command::new("sleep");
    end::output_within(command.arg("1000"), Duration::from_millis(100));
}
