//! Child processes of `ssi-hv up`, and their output.
//!
//! Each of them ends when this process does, in two ways. It holds one end of a pipe whose only
//! other end is here; and the kernel sends it SIGTERM when the thread that started it ends. The
//! kernel clears this signal for a program with capabilities of its own, and it does not reach
//! another host; the pipe does not reach a program that does not read it.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::before_exec;
use super::events::{Event, EventSender};

/// Longest line that is read in one piece.
const LINE_BYTES_MAX: u64 = 4096;
/// How long to wait for the remaining output of a process after its end. A child of it that is
/// still running may hold the pipe open.
const LAST_LINES_TIME_MAX: Duration = Duration::from_secs(1);

/// Handling of a process's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// Each line is an event.
    Events,
    /// They are inherited from this process.
    Shared,
}

/// A process that was started and has not been reaped.
#[derive(Debug)]
pub struct Running(Child);

impl Running {
    /// Starts a process. Call it on a thread that lives as long as the process may: the main one.
    pub fn start(
        command: &mut Command,
        outputs: Outputs,
        index: usize,
        events: &EventSender,
    ) -> io::Result<Self> {
        if outputs == Outputs::Events {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        before_exec::end_with_this_thread(command);
        let mut child = command.spawn()?;
        let (open, closed) = mpsc::channel::<()>();
        if let Some(stdout) = child.stdout.take() {
            let (events, open) = (events.clone(), open.clone());
            read_lines("stdout", stdout, open, move |line| {
                events.send(Event::Said(index, line))
            })?;
        }
        if let Some(stderr) = child.stderr.take() {
            let (events, open) = (events.clone(), open.clone());
            read_lines("stderr", stderr, open, move |line| {
                events.send(Event::Complained(index, line))
            })?;
        }
        drop(open);
        let (pid, events) = (Pid::from_child(&child), events.clone());
        thread::Builder::new().name("wait".into()).spawn(move || {
            wait_without_reaping(pid);
            // Disconnected when both readers have finished.
            let _ = closed.recv_timeout(LAST_LINES_TIME_MAX);
            // Best effort: a closed receiver is about to exit.
            events.send(Event::Ended(index));
        })?;
        Ok(Self(child))
    }

    /// Takes the pipe to its standard input, if there is one.
    pub fn take_stdin(&mut self) -> Option<OwnedFd> {
        self.0.stdin.take().map(OwnedFd::from)
    }

    /// Returns its exit status, after [`Event::Ended`].
    pub fn status(&mut self) -> io::Result<ExitStatus> {
        self.0.wait()
    }

    /// Kills it.
    pub fn kill(&mut self) {
        // Best effort: there is no further means.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Describes an exit status.
pub fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no exit code".to_owned(),
    }
}

/// Calls `pass` with each line while it returns true. Invalid UTF-8 is replaced.
fn read_lines(
    name: &str,
    pipe: impl Read + Send + 'static,
    open: Sender<()>,
    pass: impl Fn(String) -> bool + Send + 'static,
) -> io::Result<()> {
    thread::Builder::new().name(name.into()).spawn(move || {
        let _open = open;
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        loop {
            line.clear();
            match (&mut pipe)
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut line)
            {
                Ok(read) if read > 0 => {}
                _ => return,
            }
            let text = String::from_utf8_lossy(&line);
            if !pass(text.trim_end().to_owned()) {
                return;
            }
        }
    })?;
    Ok(())
}

/// Waits for the end of a child without reaping it, so that its id stays valid.
fn wait_without_reaping(child: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while waitid(WaitId::Pid(child), options).is_err_and(|error| error == Errno::INTR) {}
}
