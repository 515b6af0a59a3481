//! `ssi-hv top` on a terminal, with a VM that pages.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "tiny_guest/guests.rs"]
mod guests;
#[allow(dead_code, reason = "other tests use the rest")]
mod running;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "tiny_guest/support.rs"]
mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use ssi_hv::exit::ExitCode;

use running::{LIMIT, Place, node, vm};

/// A pseudo-terminal (pty(7)), and what a program has drawn on it.
struct Terminal {
    keys: File,
    /// What the program's end is; kept open, so that its modes can be looked at afterwards.
    program: OwnedFd,
    output: mpsc::Receiver<Vec<u8>>,
    screen: vt100::Parser,
}

impl Terminal {
    /// The end of somebody who types, and that of a program.
    fn open(rows: u16, columns: u16) -> (File, OwnedFd) {
        let (mut keys, mut program) = (-1, -1);
        let size = libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the first two point to integers that it sets, the last to a size that it reads;
        // null stands for no name and for the modes that there are.
        let result = unsafe {
            libc::openpty(
                &raw mut keys,
                &raw mut program,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            )
        };
        assert_eq!(result, 0, "no pseudo-terminal");
        // No program holds the other end of its own terminal.
        // SAFETY: fcntl on a descriptor that was just opened.
        let result = unsafe { libc::fcntl(keys, libc::F_SETFD, libc::FD_CLOEXEC) };
        assert_eq!(result, 0, "no flag");
        // SAFETY: both are descriptors that were just opened, and nobody else has them.
        let (keys, program) =
            unsafe { (OwnedFd::from_raw_fd(keys), OwnedFd::from_raw_fd(program)) };
        (File::from(keys), program)
    }

    fn new(rows: u16, columns: u16) -> Self {
        let (keys, program) = Self::open(rows, columns);
        let mut reader = keys.try_clone().expect("a descriptor");
        let (sender, output) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            keys,
            program,
            output,
            screen: vt100::Parser::new(rows, columns, 0),
        }
    }

    fn start(&self, place: &Place, arguments: &[&str]) -> Top {
        Top::start(&self.program, place, arguments)
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("is taken");
    }

    /// Waits until the screen is like that.
    fn wait_for(&mut self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let contents = self.screen.screen().contents();
            if is_so(&contents) {
                return contents;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.screen.process(&bytes),
                Err(error) => panic!("{what}: {error}, and the screen is\n{contents}"),
            }
        }
    }

    /// Takes what the program has said to its end.
    fn finish(&mut self) {
        loop {
            match self.output.recv_timeout(Duration::from_millis(200)) {
                Ok(bytes) => self.screen.process(&bytes),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// How the terminal treats input and output (termios(3)).
    fn modes(&self) -> [libc::tcflag_t; 4] {
        let mut modes = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: the descriptor is open, and the call fills the structure if it succeeds.
        let modes = unsafe {
            assert_eq!(
                libc::tcgetattr(self.program.as_raw_fd(), modes.as_mut_ptr()),
                0
            );
            modes.assume_init()
        };
        [modes.c_iflag, modes.c_oflag, modes.c_cflag, modes.c_lflag]
    }
}

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
    let mut top = terminal.start(&place, &["top"]);
    assert_eq!(top.end().code(), Some(1));
    terminal.wait_for("an error", |screen| {
        screen.contains("no VM of this user runs here")
    });
    let (node, _) = node(&place, &[]);
    let mut top = terminal.start(&place, &["top", &node.pid()]);
    assert_eq!(top.end().code(), Some(1));
    terminal.wait_for("an error", |screen| screen.contains("is a node"));
}

/// The number in the second column of the line of remote faults: faults a second.
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

    // It draws, and the numbers move.
    let mut top = terminal.start(&place, &["top", "--interval", "0.2"]);
    let first = terminal.wait_for("faults", |screen| {
        rate(screen).is_some_and(|rate| rate > 0.0)
    });
    assert!(
        first.starts_with(&format!("web ({}) running", vm_running.pid())),
        "{first}"
    );
    assert!(
        first.contains("by loopback") && first.contains("q quit"),
        "{first}"
    );
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

    // By Ctrl-C, which is a key there; and by a signal.
    for signal in [None, Some(libc::SIGTERM)] {
        let mut top = terminal.start(&place, &["top", "web"]);
        terminal.wait_for("a picture", |screen| screen.contains("q quit"));
        let code = match signal {
            None => {
                terminal.press("\x03");
                ExitCode::Success
            }
            Some(signal) => {
                let pid = i32::try_from(top.0.id()).expect("a process id");
                // SAFETY: a signal to a child that was not waited for.
                assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
                ExitCode::Terminated
            }
        };
        assert_eq!(top.end().code(), Some(code.code().into()));
        terminal.finish();
        assert_eq!(terminal.modes(), modes);
        assert!(!terminal.screen.screen().alternate_screen());
    }

    // A terminal that is gone, of which no signal tells.
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

    // A VM that ends leaves its last numbers.
    let mut top = terminal.start(&place, &["top", "web", "--interval", "0.2"]);
    terminal.wait_for("faults", |screen| {
        rate(screen).is_some_and(|rate| rate > 0.0)
    });
    assert_eq!(vm_running.end(libc::SIGTERM), Some(143));
    let last = terminal.wait_for("the end", |screen| screen.contains("The VM has ended"));
    assert!(
        last.contains(") ended") && last.contains("remote"),
        "{last}"
    );
    terminal.press("\x1b");
    assert_eq!(top.end().code(), Some(0));
    terminal.finish();
    assert_eq!(terminal.modes(), modes);
}
