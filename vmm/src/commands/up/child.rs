//! Processes that `ssi-hv up` has started, and what they tell.
//!
//! Each of them ends when this process does, in two ways. It has one end of a pipe whose other end is
//! here and nowhere else; and the kernel sends it SIGTERM when the thread that started it ends. The latter
//! is cleared for a program with capabilities of its own, and means nothing to another host; the
//! former does not reach a program that does not look.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use super::events::{Event, EventSender};

/// The longest line that is taken in one piece.
const LINE_BYTES_MAX: u64 = 4096;
/// How long what an ended process has written is waited for. A child of it that lives on may hold the
/// pipe open.
const LAST_LINES_TIME_MAX: Duration = Duration::from_secs(1);

/// What is done with the outputs of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// Each line is an event.
    Told,
    /// They are those of this process.
    Shared,
}

/// A process that was started and not waited for.
#[derive(Debug)]
pub struct Running(Child);

impl Running {
    /// Starts it. Has to be called on a thread that lives as long as the process may: the main one.
    pub fn start(
        command: &mut Command,
        outputs: Outputs,
        index: usize,
        events: &EventSender,
    ) -> io::Result<Self> {
        if outputs == Outputs::Told {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        end_with_this_thread(command);
        let mut child = command.spawn()?;
        let (open, closed) = mpsc::channel::<()>();
        if let Some(stdout) = child.stdout.take() {
            let (events, open) = (events.clone(), open.clone());
            read_lines("stdout", stdout, open, move |line| {
                events.tell(Event::Said(index, line))
            })?;
        }
        if let Some(stderr) = child.stderr.take() {
            let (events, open) = (events.clone(), open.clone());
            read_lines("stderr", stderr, open, move |line| {
                events.tell(Event::Complained(index, line))
            })?;
        }
        drop(open);
        let (pid, events) = (child.id(), events.clone());
        thread::Builder::new().name("wait".into()).spawn(move || {
            wait_without_reaping(pid);
            // Disconnected when both readers are done.
            let _ = closed.recv_timeout(LAST_LINES_TIME_MAX);
            // Whoever does not listen any more is about to end.
            events.tell(Event::Ended(index));
        })?;
        Ok(Self(child))
    }

    /// The pipe to its standard input, if there is one.
    pub fn take_stdin(&mut self) -> Option<OwnedFd> {
        self.0.stdin.take().map(OwnedFd::from)
    }

    /// How it ended, after [`Event::Ended`].
    pub fn status(&mut self) -> io::Result<ExitStatus> {
        self.0.wait()
    }

    /// Ends it by force.
    pub fn kill(&mut self) {
        // Nothing is left to be done if that fails.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How a process ended, in words.
pub fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no exit code".to_owned(),
    }
}

/// Has the kernel end the process with SIGTERM when this thread ends.
fn end_with_this_thread(command: &mut Command) {
    // SAFETY: the call has no arguments and cannot fail.
    let parent = unsafe { libc::getpid() };
    let ask = move || {
        // SAFETY: takes two integers.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // Too late for that when the parent has ended before it was asked.
        // SAFETY: the call has no arguments and cannot fail.
        if unsafe { libc::getppid() } != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the closure calls prctl and getppid, which are safe between fork and exec, and allocates
    // nothing.
    unsafe { command.pre_exec(ask) };
}

/// Lets `pass` take each line, as long as it wants more. Bytes are text in UTF-8, as far as they
/// are.
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

/// Waits for the end of a child and leaves it to be waited for, so that its number stays its own.
fn wait_without_reaping(pid: u32) {
    loop {
        let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: `info` has room for what the call writes, which is not read.
        let waited = unsafe {
            libc::waitid(
                libc::P_PID,
                pid,
                info.as_mut_ptr(),
                libc::WEXITED | libc::WNOWAIT,
            )
        };
        let interrupted = || io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if waited == 0 || !interrupted() {
            return;
        }
    }
}

/// The end of a pipe that the next process is to inherit, and what says which it is.
pub fn inherit(command: &mut Command, pipe: &impl AsRawFd) -> i32 {
    let fd = pipe.as_raw_fd();
    let keep = move || {
        // SAFETY: takes integers; the descriptor is open in the child, a copy of the parent's.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: the closure calls fcntl, which is safe between fork and exec, and allocates nothing.
    unsafe { command.pre_exec(keep) };
    fd
}
