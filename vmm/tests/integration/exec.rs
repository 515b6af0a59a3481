//! `ssi-hv run --exec`, `--timeout` and `--console` with tiny guests, which send on the serial
//! ports what a kernel and the init would.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use crate::support;
use crate::support::LIMIT;
use crate::terminal::Terminal;
use serde_json::Value;

/// Any file is accepted as an initial RAM disk; with one, no shell of this host is needed.
const INITRD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

/// A directory with a kernel for runs.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new(guest: &[u8]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        fs::write(directory.path().join("kernel"), tiny_guests::elf(guest)).expect("is written");
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns a run with further flags.
    fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
        command
            .args(["run", "--memory", "64M", "--initrd", INITRD, "--kernel"])
            .arg(self.path("kernel"))
            .arg("--report")
            .arg(self.path("report.json"))
            .args(more)
            .env("SSI_HV_RUNTIME_DIR", self.path("sockets"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, more: &[&str]) -> Output {
        let begin = Instant::now();
        let output = self.command(more).output().expect("it starts");
        assert!(begin.elapsed() < LIMIT, "it took {:?}", begin.elapsed());
        output
    }

    fn report(&self) -> Value {
        let text = fs::read(self.path("report.json")).expect("a report");
        serde_json::from_slice(&text).expect("is JSON")
    }
}

/// Returns the single line with the error.
#[track_caller]
fn error(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("ssi-hv: error: "))
        .collect();
    assert_eq!(lines.len(), 1, "{text}");
    lines[0].to_owned()
}

#[test]
fn output_errors_and_exit_code_are_those_of_the_command() {
    if !support::kvm_is_there() {
        return;
    }
    for guest in [
        tiny_guests::exec_result::code(),
        tiny_guests::exec_and_stay::code(),
    ] {
        let place = Place::new(guest);
        let output = place.run(&["--exec", "any"]);
        assert_eq!(output.stdout, b"a\0\xff");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "b\n");
        assert_eq!(output.status.code(), Some(42));
        let report = place.report();
        let expected = serde_json::json!({
            "command": "any", "exit_status": 42, "stdout_bytes": 3, "stderr_bytes": 2,
        });
        assert_eq!(report["exec"], expected);
        assert_eq!(report["outcome"], "shutdown");
        assert_eq!(report["exit_code"], 42);
    }
}

#[test]
fn a_bar_shows_the_boot_and_is_gone_before_the_command_says_anything() {
    if !support::kvm_is_there() {
        return;
    }
    for (guest, last) in [
        (tiny_guests::exec_result::code(), "ab"),
        (tiny_guests::hello::code(), "before the command had begun"),
    ] {
        let place = Place::new(guest);
        let mut terminal = Terminal::new(24, 80);
        let end = || terminal.program.try_clone().expect("a descriptor");
        let mut command = place.command(&["--exec", "any"]);
        command.env("TERM", "xterm").stdout(end()).stderr(end());
        command.status().expect("it starts");
        terminal.finish();
        let written = String::from_utf8_lossy(&terminal.written);
        assert!(written.contains("booting ["), "{written}");
        let screen = terminal.screen.screen().contents();
        let one_line = screen.replace(|c: char| !c.is_ascii_graphic() && c != ' ', "");
        assert!(one_line.contains(last), "{screen}");
        assert!(!screen.contains("booting"), "{screen}");
    }
}

#[test]
fn without_a_result_it_is_125_and_the_error_says_why() {
    if !support::kvm_is_there() {
        return;
    }
    for (guest, outcome, part) in [
        (
            tiny_guests::hello::code(),
            "host-error",
            "switched itself off before the command had begun; its console says: hello",
        ),
        (
            tiny_guests::init_reached::code(),
            "host-error",
            "no driver for the second serial port",
        ),
        (
            tiny_guests::reset_register::code(),
            "reboot",
            "restarted before the command had begun, as a kernel does that panics; its console is empty",
        ),
        (tiny_guests::triple_fault::code(), "crash", "triple fault"),
        (
            tiny_guests::panics::code(),
            "crash",
            "its console says: Kernel panic - not syncing: boom",
        ),
        (tiny_guests::exec_garbled::code(), "host-error", "kind 0x3f"),
    ] {
        let place = Place::new(guest);
        let output = place.run(&["--exec", "any"]);
        let error = error(&output);
        assert!(error.contains(part), "{error}");
        assert_eq!(output.status.code(), Some(125), "{error}");
        assert_eq!(output.stdout, b"");
        let report = place.report();
        assert_eq!(report["outcome"], outcome);
        assert_eq!(report["exit_code"], 125);
        assert_eq!(report["exec"]["exit_status"], Value::Null);
    }
}

#[test]
fn output_that_nobody_reads_stops_the_guest() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new(tiny_guests::exec_and_stay::code());
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    let mut command = place.command(&["--exec", "any"]);
    let child = command
        .stdout(full.expect("/dev/full"))
        .stderr(Stdio::piped());
    let output = child.output().expect("it starts");
    assert_eq!(output.status.code(), Some(125));
    assert!(error(&output).contains("standard output: No space left"));
}

#[test]
fn a_guest_that_does_not_end_is_stopped_after_its_time() {
    if !support::kvm_is_there() {
        return;
    }
    for more in [
        &["--timeout", "1"][..],
        &["--timeout", "1", "--exec", "any"],
    ] {
        let place = Place::new(tiny_guests::halt_for_ever::code());
        let output = place.run(more);
        assert_eq!(output.status.code(), Some(124));
        assert!(error(&output).contains("has not ended within --timeout 1"));
        assert_eq!(place.report()["outcome"], "timed-out");
    }
}

#[test]
fn the_console_goes_to_a_file() {
    if !support::kvm_is_there() {
        return;
    }
    for (more, code) in [(&[][..], 0), (&["--exec", "any"], 125)] {
        let place = Place::new(tiny_guests::hello::code());
        let log = place.path("console.log");
        let log_name = log.to_str().expect("UTF-8");
        let output = place.run(&[more, &["--console", log_name]].concat());
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(output.stdout, b"");
        assert_eq!(fs::read(&log).expect("a console"), b"hello\n");
    }
}

#[test]
fn what_is_wrong_with_a_run_of_a_command_is_125_too() {
    for (more, part) in [
        (&["--exec", ""][..], "--exec has no command"),
        (&["--exec", "x", "--cpus", "255"], "--cpus 255 is outside"),
        (&["--exec", "x", "--memry", "1G"], "'--memory'"),
        (&["--exec=x", "--timeout", "0"], "--timeout 0 is outside"),
        (
            &["--exec", "x", "--console", "/no/such/log"],
            "cannot write --console /no/such/log; name a file",
        ),
    ] {
        let place = Place::new(tiny_guests::hello::code());
        let output = place.run(more);
        let error = error(&output);
        assert!(error.contains(part), "{error}");
        assert_eq!(output.status.code(), Some(125), "{error}");
    }
    let place = Place::new(tiny_guests::hello::code());
    let output = place.run(&["--timeout", "0"]);
    assert_eq!(output.status.code(), Some(2));
}
