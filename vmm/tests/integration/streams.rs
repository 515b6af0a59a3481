//! Standard output, standard error and reports whose reader is stopped or closed.

use std::ffi::CString;
use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write as _};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ssi_hv::exit::ExitCode;

use crate::running::{LIMIT, Place, Running, count, end, until};
use crate::sandbox::of_threads;
use crate::support;

/// Interval of polls where no event is available.
const PAUSE: Duration = Duration::from_millis(20);

/// A process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Killed {
    fn signal(&self, signal: libc::c_int) {
        let pid = i32::try_from(self.0.id()).expect("a process id");
        // SAFETY: sends a signal to a child that has not been reaped.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    /// Fails unless SIGTERM ends it soon; calls `meanwhile` repeatedly.
    fn is_terminated(&mut self, meanwhile: impl Fn(&Self)) {
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.0.try_wait().expect("it is ours") {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            meanwhile(self);
            thread::sleep(PAUSE);
        };
        assert_eq!(status.code(), Some(ExitCode::Terminated.code().into()));
    }
}

/// Starts a guest that prints continuously and pages, and returns the pipe for its output and the
/// monitor's.
fn talker(place: &Place) -> (Killed, PipeReader, PipeWriter) {
    let kernel = place.directory.path().join("kernel");
    fs::write(
        &kernel,
        tiny_guests::elf(tiny_guests::talk_and_walk::code()),
    )
    .expect("is written");
    let (mut reader, writer) = io::pipe().expect("a pipe");
    let mut command = place.command(&["run", "--memory", "64M", "--local-memory", "16M"]);
    command
        .args(["--transport", "loopback", "--prefetch", "off", "--kernel"])
        .arg(kernel)
        .stdout(writer.try_clone().expect("a descriptor"))
        .stderr(writer.try_clone().expect("a descriptor"));
    let vm = Killed(command.spawn().expect("it starts"));
    let mut said = [0];
    while said != *b"r" {
        reader.read_exact(&mut said).expect("the guest talks");
    }
    (vm, reader, writer)
}

fn faults(place: &Place) -> u64 {
    let status = place.json(&["status", "--json"]);
    count(&status, "/vms/0/faults/remote/count")
}

#[test]
fn a_guest_goes_on_when_nobody_hears_it_any_more() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (mut vm, reader, _) = talker(&place);
    drop(reader);
    let deadline = Instant::now() + LIMIT;
    let before = faults(&place);
    // It prints more than the console's buffer holds.
    while faults(&place) < before + 5000 {
        assert!(Instant::now() < deadline, "the guest makes no progress");
        thread::sleep(PAUSE);
    }
    vm.signal(libc::SIGTERM);
    vm.is_terminated(|_| {});
}

/// Returns whether a pipe has room.
fn has_room(pipe: &PipeWriter) -> bool {
    let mut wanted = libc::pollfd {
        fd: pipe.as_raw_fd(),
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: `wanted` is one pollfd, and lives through the call.
    unsafe { libc::poll(&raw mut wanted, 1, 0) == 1 }
}

#[test]
fn who_does_not_read_keeps_no_vm_from_ending() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (mut vm, _reader, writer) = talker(&place);
    let deadline = Instant::now() + LIMIT;
    while has_room(&writer) {
        assert!(Instant::now() < deadline, "the pipe does not fill");
        thread::sleep(PAUSE);
    }
    vm.signal(libc::SIGTERM);
    vm.is_terminated(|_| {});
}

/// Creates a named pipe without a reader.
fn pipe_without_reader(place: &Place) -> PathBuf {
    let path = place.directory.path().join("pipe");
    let name = CString::new(path.as_os_str().as_bytes()).expect("no zero in it");
    // SAFETY: the name ends with a zero and lives through the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    path
}

/// The command of a VM whose donor accepts connections and sends nothing.
fn of_silent_donor(place: &Place) -> (Command, TcpListener) {
    let kernel = place.path("kernel");
    fs::write(&kernel, tiny_guests::elf(tiny_guests::hello::code())).expect("is written");
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address").to_string();
    let mut command = place.command(&["run", "--memory", "64M", "--local-memory", "16M"]);
    command.args(["--transport", "tcp", "--donor", &address]);
    command.args(["--kernel", &kernel]);
    (command, silent)
}

#[test]
fn a_report_that_nobody_reads_keeps_no_vm_from_ending() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (mut command, _silent) = of_silent_donor(&place);
    command
        .arg("--report")
        .arg(pipe_without_reader(&place))
        .stderr(Stdio::null());
    let mut vm = Killed(command.spawn().expect("it starts"));
    let deadline = Instant::now() + LIMIT;
    while place.files() == 0 {
        assert!(Instant::now() < deadline, "it does not start");
        thread::sleep(PAUSE);
    }
    vm.signal(libc::SIGTERM);
    vm.is_terminated(|_| {});
    assert_eq!(place.files(), 0, "its socket is left");
}

#[test]
fn messages_that_nobody_reads_keep_no_report_from_being_written() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (mut command, silent) = of_silent_donor(&place);
    let (_reader, mut writer) = io::pipe().expect("a pipe");
    while has_room(&writer) {
        writer.write_all(&[b'x'; 4096]).expect("there is room");
    }
    let report = place.path("report.json");
    command.args(["-v", "--report", &report]).stderr(writer);
    let mut vm = Killed(command.spawn().expect("it starts"));
    // It waits for the donor, and is ended by force.
    assert!(end::is_readable(&silent, LIMIT), "it does not connect");
    vm.signal(libc::SIGTERM);
    vm.is_terminated(|_| {});
    let written = fs::read_to_string(&report).expect("a report");
    let written: serde_json::Value = serde_json::from_str(&written).expect("JSON");
    assert_eq!(written["exit_code"], 143, "{written}");
}

/// `nohup` has the process start with SIGHUP ignored.
#[test]
fn a_vm_that_is_to_outlive_its_terminal_does() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let kernel = place.path("kernel");
    let code = tiny_guests::walk_for_ever::code();
    fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
    let mut command = Command::new("nohup");
    command
        .arg(env!("CARGO_BIN_EXE_ssi-hv"))
        .args(["run", "--memory", "64M", "--local-memory", "16M"])
        .args(["--transport", "loopback", "--kernel", &kernel])
        .env("SSI_HV_RUNTIME_DIR", place.sockets())
        .stdin(Stdio::null());
    let vm = Running::start(&mut command);
    vm.speaks();
    for ignored in of_threads(&vm.pid(), "SigIgn") {
        let ignored = u64::from_str_radix(&ignored, 16).expect("a mask");
        assert_ne!(ignored & 1 << (libc::SIGHUP - 1), 0, "{ignored:#x}");
    }
    vm.signal(libc::SIGHUP);
    let before = faults(&place);
    until(|| match faults(&place) {
        now if now > before + 5000 => Ok(()),
        now => Err(format!("{before} faults before, {now} now")),
    });
    assert_eq!(vm.end(libc::SIGTERM), Some(143));
}

#[test]
fn a_second_signal_ends_a_node_at_once_whatever_it_does() {
    let place = Place::new();
    let mut command = place.command(&["node", "--listen", "127.0.0.1:0", "--memory", "64M"]);
    command.arg("--report").arg(pipe_without_reader(&place));
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut node = Killed(command.spawn().expect("it starts"));
    let mut said = [0];
    let stdout = node.0.stdout.as_mut().expect("a pipe");
    stdout.read_exact(&mut said).expect("it listens");
    // It waits a limited time for a reader of the report.
    node.signal(libc::SIGUSR1);
    node.is_terminated(|node| node.signal(libc::SIGTERM));
}
