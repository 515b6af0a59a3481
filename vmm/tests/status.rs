//! `ssi-hv status` against nothing, against what ended processes left, and against VMs and nodes
//! that run.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "tiny_guest/guests.rs"]
mod guests;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "tiny_guest/support.rs"]
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use ssi_hv::exit::ExitCode;

/// No step of a test takes longer on a host that works, however loaded.
const LIMIT: Duration = Duration::from_secs(60);

/// A directory for sockets, and commands that use it.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        Self { directory }
    }

    fn sockets(&self) -> PathBuf {
        self.directory.path().join("sockets")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
        command
            .args(arguments)
            .env("SSI_HV_RUNTIME_DIR", self.sockets())
            .stdin(Stdio::null());
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("it starts")
    }

    /// What a command that succeeds prints.
    fn printed(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.printed(arguments)).expect("JSON")
    }

    /// The one line of a command that fails with exit code 1.
    fn failed(&self, arguments: &[&str], code: ExitCode) -> String {
        let output = self.output(arguments);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(code.code().into()), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        stderr
    }

    fn files(&self) -> usize {
        fs::read_dir(self.sockets()).map_or(0, Iterator::count)
    }
}

/// A process that is killed when a test ends early.
struct Running {
    child: Child,
    console: BufReader<std::process::ChildStdout>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let console = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, console }
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = i32::try_from(self.child.id()).expect("a process id");
        // SAFETY: a signal to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    fn end(mut self, signal: libc::c_int) -> Option<i32> {
        self.signal(signal);
        self.child.wait().expect("it ends").code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest that walks through 46 MiB with 16 MiB here, once it runs.
fn vm(place: &Place, more: &[&str]) -> Running {
    let kernel = place.directory.path().join("kernel");
    fs::write(&kernel, support::elf(guests::walk_for_ever::code())).expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let mut arguments = vec!["run", "--kernel", kernel, "--memory", "64M"];
    arguments.extend(["--local-memory", "16M", "--transport", "loopback"]);
    arguments.extend(more);
    let mut running = Running::start(&mut place.command(&arguments));
    let mut said = [0];
    running
        .console
        .read_exact(&mut said)
        .expect("the guest talks");
    assert_eq!(&said, b"r");
    running
}

#[test]
fn nothing_running_is_said_and_no_error() {
    let place = Place::new();
    // The directory is not there, and then it is.
    for _ in 0..2 {
        let text = place.printed(&["status"]);
        assert_eq!(text, "no VM and no node of this user runs here\n");
        assert_eq!(
            place.printed(&["status", "--heat"]),
            "no VM of this user runs here\n"
        );
        let json = place.json(&["status", "--json"]);
        assert_eq!(
            json,
            serde_json::json!({"schema": 1, "vms": [], "nodes": []})
        );
        let line = place.failed(&["status", "web"], ExitCode::HostError);
        assert!(line.contains("`web` does not run here"), "{line}");
        if place.files() == 0 {
            fs::create_dir_all(place.sockets()).expect("is made");
            let private = fs::Permissions::from_mode(0o700);
            fs::set_permissions(place.sockets(), private).expect("is changed");
        }
    }
}

#[test]
fn a_directory_of_others_is_not_looked_into() {
    let place = Place::new();
    fs::create_dir(place.sockets()).expect("is made");
    fs::set_permissions(place.sockets(), fs::Permissions::from_mode(0o777)).expect("is changed");
    let line = place.failed(&["status"], ExitCode::HostError);
    assert!(
        line.contains("open to other users") && line.contains("SSI_HV_RUNTIME_DIR"),
        "{line}"
    );
}

#[test]
fn a_process_that_talks_nonsense_is_told_of_and_not_believed() {
    let place = Place::new();
    fs::create_dir(place.sockets()).expect("is made");
    fs::set_permissions(place.sockets(), fs::Permissions::from_mode(0o700)).expect("is changed");
    let path = place.sockets().join("vm-1-bad.sock");
    let listener = UnixListener::bind(path).expect("is bound");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            let _ = (&stream).write_all(b"{\"version\":1,\"answer\":{\"name\":3}}\n");
        }
    });
    let line = place.failed(&["status", "bad"], ExitCode::HostError);
    assert!(line.contains("not understood"), "{line}");
    let output = place.output(&["status"]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("process 1"));
}

#[test]
fn a_node_is_shown_and_ends_without_a_trace() {
    let place = Place::new();
    let mut node =
        Running::start(&mut place.command(&["node", "--listen", "127.0.0.1:0", "--memory", "64M"]));
    let mut line = String::new();
    node.console.read_line(&mut line).expect("it prints");
    let address = line.trim().rsplit(' ').next().expect("an address");
    let text = place.printed(&["status"]);
    assert!(text.contains(&format!("listens on {address}")), "{text}");
    let json = place.json(&["status", &node.pid(), "--json"]);
    assert_eq!(json["nodes"][0]["memory_bytes"], 64 << 20);
    assert_eq!(json["nodes"][0]["lent_bytes"], 0);
    assert_eq!(place.files(), 1);
    assert_eq!(node.end(libc::SIGTERM), Some(0));
    assert_eq!(place.files(), 0);
}

/// The sum of a number over all blocks of the first VM's heat map.
fn sum(json: &Value, key: &str) -> u64 {
    let extents = json["vms"][0]["heat"]["extents"]
        .as_array()
        .expect("extents");
    let blocks = extents
        .iter()
        .flat_map(|extent| extent["blocks"].as_array());
    blocks
        .flatten()
        .map(|block| block[key].as_u64().expect("a number"))
        .sum()
}

fn count(json: &Value, pointer: &str) -> u64 {
    let found = json.pointer(pointer).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no {pointer} in {json}"))
}

#[test]
fn a_vm_is_looked_at_while_it_pages() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let report = place.directory.path().join("report.json");
    let name = report.to_str().expect("UTF-8");
    // It walks straight on: with pages fetched ahead it would hardly take a remote fault.
    let flags = ["--name", "walker", "--prefetch", "off", "--report", name];
    let vm = vm(&place, &flags);

    // It pages: the counts grow from one look to the next.
    let deadline = Instant::now() + LIMIT;
    let first = loop {
        let now = place.json(&["status", "walker", "--json"]);
        if count(&now, "/vms/0/faults/remote/count") > 1000 {
            break now;
        }
        assert!(Instant::now() < deadline, "{now}");
    };
    let vm_now = &first["vms"][0];
    assert_eq!(vm_now["name"], "walker");
    assert_eq!(vm_now["state"], "running");
    assert_eq!(vm_now["pid"].to_string(), vm.pid());
    assert_eq!(count(&first, "/vms/0/memory/cache_bytes"), 16 << 20);
    assert!(count(&first, "/vms/0/memory/cached_bytes") <= 16 << 20);
    assert!(count(&first, "/vms/0/memory/resident_bytes") > 8 << 20);
    assert_eq!(
        count(&first, "/vms/0/nodes/1/faults/count") > 1000,
        count(&first, "/vms/0/nodes/1/pages_fetched") > 1000
    );
    for stage in ["queue", "fetch", "install"] {
        let pointer = format!("/vms/0/faults/remote/stages/{stage}/max");
        let found = first.pointer(&pointer).and_then(Value::as_f64);
        assert!(found.is_some_and(|us| us > 0.0), "{pointer} in {first}");
    }

    let heat = place.json(&["status", &vm.pid(), "--json", "--heat"]);
    assert_eq!(sum(&heat, "looked_at"), (64 << 20) / 4096);
    assert!(sum(&heat, "resident") + sum(&heat, "leaving") <= (16 << 20) / 4096 + 64);
    assert!(sum(&heat, "resident") > 1000, "{heat}");
    assert!(sum(&heat, "remote") > 4000, "{heat}");
    assert!(sum(&heat, "recent_faults") > 500, "{heat}");
    let text = place.printed(&["status", "--heat"]);
    assert!(text.contains("VM walker") && text.contains('*'), "{text}");
    let text = place.printed(&["status"]);
    assert!(
        text.contains("loopback") && text.contains("remote"),
        "{text}"
    );
    println!("{text}");

    // A second VM of that name is refused; hostile clients are not noticed.
    let line = place.failed(
        &[
            "run",
            "--kernel",
            concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
            "--name",
            "walker",
        ],
        ExitCode::Usage,
    );
    assert!(line.contains("taken by the VM of process"), "{line}");
    let socket = place.sockets().join(format!("vm-{}-walker.sock", vm.pid()));
    let silent: Vec<_> = (0..50)
        .map(|_| UnixStream::connect(&socket).expect("it listens"))
        .collect();
    let before = count(&heat, "/vms/0/faults/remote/count");
    drop(silent);
    let after = place.json(&["status", "--json"]);
    assert!(count(&after, "/vms/0/faults/remote/count") > before);

    assert_eq!(vm.end(libc::SIGINT), Some(130));
    assert_eq!(place.files(), 0);
    let text = fs::read_to_string(&report).expect("a report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert!(count(&report, "/faults/remote/count") >= count(&after, "/vms/0/faults/remote/count"));
    assert_eq!(
        count(&report, "/faults/remote/count"),
        count(&report, "/nodes/1/faults/count")
    );
}

#[test]
fn what_a_killed_vm_leaves_is_cleaned_up_and_its_name_is_free() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let killed = vm(&place, &["--name", "same"]);
    assert_eq!(place.files(), 1);
    assert_eq!(killed.end(libc::SIGKILL), None);
    assert_eq!(place.files(), 1, "nobody was there to remove it");
    let again = vm(&place, &["--name", "same"]);
    assert_eq!(place.files(), 1, "the stale socket is gone");
    assert_eq!(again.end(libc::SIGKILL), None);
    assert!(place.printed(&["status"]).starts_with("no VM"));
    assert_eq!(place.files(), 0);
}

#[test]
fn a_vm_runs_where_nobody_can_ask_it() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    // A file is in the way.
    fs::write(place.sockets(), "").expect("is written");
    let vm = vm(&place, &[]);
    assert!(Path::new(&place.sockets()).is_file());
    assert_eq!(vm.end(libc::SIGTERM), Some(143));
}
