//! A running `ssi-hv up`, its visible effects, and what remains of it.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use crate::running::{LIMIT, Place, end};

/// Observed events of `ssi-hv up`, in order.
#[derive(Debug, PartialEq)]
pub enum Seen {
    Line(String),
    Console(u8),
    Closed,
}

/// A running `ssi-hv up`, in a process group of its own.
pub struct Up {
    pub child: Child,
    pub seen: Receiver<Seen>,
    pub lines: Vec<String>,
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
    pub fn start(place: &Place, arguments: &[&str]) -> Self {
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

    pub fn next(&mut self) -> Seen {
        let seen = self.seen.recv_timeout(LIMIT);
        let seen = seen.unwrap_or_else(|error| panic!("{error}: {:#?}", self.lines));
        if let Seen::Line(line) = &seen {
            self.lines.push(line.clone());
        }
        seen
    }

    /// Waits for an event: a part of a line, or `console` for output of the guest.
    pub fn wait_for(&mut self, step: &str) {
        loop {
            match self.next() {
                Seen::Console(b'r') if step == "console" => return,
                Seen::Line(line) if line.contains(step) => return,
                Seen::Closed => panic!("no {step:?}: {:#?}", self.lines),
                _ => {}
            }
        }
    }

    pub fn signal(&self, signal: i32, group: bool) {
        let pid = i32::try_from(self.child.id()).expect("a process id");
        let target = if group { -pid } else { pid };
        // SAFETY: sends a signal to a child that has not been reaped, or to the group that it
        // leads.
        assert_eq!(unsafe { libc::kill(target, signal) }, 0);
    }

    /// Waits for its end; returns its exit code and its standard error.
    #[track_caller]
    pub fn end(mut self) -> (Option<i32>, String) {
        let status = end::end_within(&mut self.child, LIMIT);
        while self.next() != Seen::Closed {}
        let said = self.lines.concat();
        let status = status.unwrap_or_else(|| panic!("no end within {LIMIT:?}: {said}"));
        (status.code(), said)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the processes with the place's socket directory: `up` and all its descendants.
pub fn processes(place: &Place) -> Vec<String> {
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

/// Returns the host's network interfaces that a process with this id created.
pub fn interfaces(pid: u32) -> Vec<String> {
    let start = format!("ssi{pid}-");
    let all = fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten();
    let names = all.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&start)).collect()
}

/// Waits until nothing of a process remains: no other process, socket, interface or file.
pub fn nothing_is_left(place: &Place, pid: u32, files: &[PathBuf], when: &str) {
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

pub fn all_files(place: &Place) -> Vec<PathBuf> {
    let entries = fs::read_dir(place.directory.path()).expect("a directory");
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| *path != place.sockets());
    paths.sort();
    paths
}
