//! `ssi-hv top` on a terminal, with a VM that pages.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::Instant;

use ssi_hv::exit::ExitCode;

use crate::running::{LIMIT, Place, node, vm};
use crate::support;
use crate::terminal::Terminal;

/// A running `ssi-hv top`.
struct Top(Child);

impl Top {
    fn start(terminal: &OwnedFd, place: &Place, arguments: &[&str]) -> Self {
        let end = || terminal.try_clone().expect("a descriptor");
        let mut command = place.command(arguments);
        command.stdin(end()).stdout(end()).stderr(end());
        Self(command.spawn().expect("it starts"))
    }

    fn end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.0.try_wait().expect("it is ours") {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            thread::yield_now();
        }
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn where_there_is_no_terminal_it_names_status() {
    let place = Place::new();
    let line = place.failed(&["top"], ExitCode::Usage);
    assert!(
        line.contains("needs a terminal") && line.contains("`ssi-hv status`"),
        "{line}"
    );
    let line = place.failed(&["top", "--interval", "0"], ExitCode::Usage);
    assert!(line.contains("outside 0.2 to 60"), "{line}");
}

#[test]
fn without_a_vm_it_says_so_and_leaves_the_terminal_alone() {
    let place = Place::new();
    let mut terminal = Terminal::new(24, 80);
    let mut top = Top::start(&terminal.program, &place, &["top"]);
    assert_eq!(top.end().code(), Some(1));
    terminal.wait_for("an error", |screen| {
        screen.contains("no VM of this user runs here")
    });
    let (node, _) = node(&place, &[]);
    let mut top = Top::start(&terminal.program, &place, &["top", &node.pid()]);
    assert_eq!(top.end().code(), Some(1));
    terminal.wait_for("an error", |screen| screen.contains("is a node"));
}

/// Returns the second column of the line of remote faults: faults per second.
fn rate(screen: &str) -> Option<f64> {
    let line = screen.lines().find(|line| line.starts_with("remote  "))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn it_shows_a_vm_follows_its_keys_and_restores_the_terminal() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let vm_running = vm(&place, &["--name", "web", "--prefetch", "off"]);
    let mut terminal = Terminal::new(24, 80);
    let modes = terminal.modes();

    // It draws, and the numbers change.
    let mut top = Top::start(&terminal.program, &place, &["top", "--interval", "0.2"]);
    // What is written at once may arrive in parts.
    let first = terminal.wait_for("faults", |screen| {
        rate(screen).is_some_and(|rate| rate > 0.0) && screen.contains("q quit")
    });
    assert!(
        first.starts_with(&format!("web ({}) running", vm_running.pid())),
        "{first}"
    );
    assert!(first.contains("by loopback"), "{first}");
    assert_ne!(terminal.modes(), modes, "keys come one by one");
    assert!(terminal.screen.screen().alternate_screen());
    let count = |screen: &str| {
        let line = screen.lines().find(|line| line.starts_with("remote  "));
        line.map(str::to_owned)
    };
    terminal.wait_for("a change", |screen| count(screen) != count(&first));
    terminal.press("h");
    terminal.wait_for("the map", |screen| screen.contains("a character is"));
    terminal.press("h");
    terminal.wait_for("the numbers", |screen| screen.contains("evictions"));
    terminal.press("q");
    assert_eq!(top.end().code(), Some(0));
    terminal.finish();
    assert_eq!(terminal.modes(), modes);
    let screen = terminal.screen.screen();
    assert!(!screen.alternate_screen() && !screen.hide_cursor());

    // Ends by Ctrl-C, which is a key there, and by a signal.
    for signal in [None, Some(libc::SIGTERM)] {
        let mut top = Top::start(&terminal.program, &place, &["top", "web"]);
        terminal.wait_for("a picture", |screen| screen.contains("q quit"));
        let code = match signal {
            None => {
                terminal.press("\x03");
                ExitCode::Success
            }
            Some(signal) => {
                let pid = i32::try_from(top.0.id()).expect("a process id");
                // SAFETY: sends a signal to a child that has not been reaped.
                assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
                ExitCode::Terminated
            }
        };
        assert_eq!(top.end().code(), Some(code.code().into()));
        terminal.finish();
        assert_eq!(terminal.modes(), modes);
        assert!(!terminal.screen.screen().alternate_screen());
    }

    // A closed terminal, which sends no signal here.
    let (mut keys, program) = Terminal::open(24, 80);
    let mut top = Top::start(&program, &place, &["top", "web"]);
    let mut picture = vt100::Parser::new(24, 80, 0);
    while !picture.screen().contents().contains("q quit") {
        let mut bytes = [0; 4096];
        let count = keys.read(&mut bytes).expect("a picture");
        picture.process(&bytes[..count]);
    }
    drop(keys);
    assert_eq!(top.end().code(), Some(ExitCode::Terminated.code().into()));

    // The last numbers of an ended VM stay visible.
    let mut top = Top::start(
        &terminal.program,
        &place,
        &["top", "web", "--interval", "0.2"],
    );
    terminal.wait_for("faults", |screen| {
        rate(screen).is_some_and(|rate| rate > 0.0)
    });
    assert_eq!(vm_running.end(libc::SIGTERM), Some(143));
    terminal.wait_for("the end", |screen| {
        let has = |part| screen.contains(part);
        has("The VM has ended") && has(") ended") && has("remote")
    });
    terminal.press("\x1b");
    assert_eq!(top.end().code(), Some(0));
    terminal.finish();
    assert_eq!(terminal.modes(), modes);
}
