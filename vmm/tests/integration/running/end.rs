//! Waiting for the end of processes with a deadline: a process that does not end fails its test,
//! and blocks no other.

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Timeout of each step, far longer than on the most loaded host.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Runs a command and returns its complete output.
#[track_caller]
pub fn output_of(command: &mut Command) -> Output {
    output_within(command, LIMIT)
}

/// Like [`output_of`], with another timeout.
#[track_caller]
pub fn output_within(command: &mut Command, limit: Duration) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    rest_of(command.spawn().expect("it starts"), limit)
}

/// Returns the remaining output of a process on its pipes, and its exit status.
#[track_caller]
pub fn rest_of(mut child: Child, limit: Duration) -> Output {
    let (stdout, stderr) = (pumped(child.stdout.take()), pumped(child.stderr.take()));
    let status = end_within(&mut child, limit);
    // Other processes with the pipe must end too.
    let deadline = Instant::now() + limit;
    let (stdout, stderr) = (all_of(&stdout, deadline), all_of(&stderr, deadline));
    match (status, stdout, stderr) {
        (Some(status), Ok(stdout), Ok(stderr)) => Output {
            status,
            stdout,
            stderr,
        },
        (status, stdout, stderr) => {
            let text = |said: Result<Vec<u8>, Vec<u8>>| {
                let bytes = said.unwrap_or_else(|so_far| so_far);
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let (stdout, stderr) = (text(stdout), text(stderr));
            panic!("no end within {limit:?} ({status:?}); it said {stdout:?} and {stderr:?}")
        }
    }
}

/// Returns the exit status of a process, which is killed at the timeout.
pub fn end_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    if let Some(status) = child.try_wait().expect("is a child") {
        return Some(status);
    }
    let pid = libc::pid_t::try_from(child.id()).expect("a process id");
    // SAFETY: takes two integers; the child has not been reaped, so the id is its own.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(opened).expect("a descriptor");
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was opened above, and has no other owner.
    let process = unsafe { OwnedFd::from_raw_fd(fd) };
    if !is_readable(&process, limit) {
        child.kill().expect("it is a child");
        child.wait().expect("it was killed");
        return None;
    }
    Some(child.wait().expect("it has ended"))
}

/// Waits until a descriptor is readable or closed; a pidfd is readable after the process's end.
pub fn is_readable(fd: &impl AsRawFd, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = i32::try_from(left.as_millis()).expect("some minutes");
        let mut poll = libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `poll` is one valid `pollfd`, which lives through the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, left) };
        if ready >= 0 {
            return ready > 0;
        }
        let error = std::io::Error::last_os_error();
        assert_eq!(error.kind(), std::io::ErrorKind::Interrupted, "{error}");
    }
}

/// Returns what arrives on a pipe until that has `text` in it, or until its end or the timeout.
pub fn said_until(pipe: Option<impl Read + Send + 'static>, text: &str) -> String {
    let (arriving, deadline) = (pumped(pipe), Instant::now() + LIMIT);
    let mut said = Vec::new();
    loop {
        let so_far = String::from_utf8_lossy(&said).into_owned();
        if so_far.contains(text) {
            return so_far;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match arriving.recv_timeout(left) {
            Ok(bytes) => said.extend(bytes),
            Err(_) => return so_far,
        }
    }
}

/// Forwards the data of a pipe, as it arrives, to its end.
fn pumped(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, said) = mpsc::channel();
    if let Some(mut pipe) = pipe {
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
    }
    said
}

/// Returns all data, or the part that arrived before the deadline as an error.
fn all_of(said: &Receiver<Vec<u8>>, deadline: Instant) -> Result<Vec<u8>, Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match said.recv_timeout(left) {
            Ok(bytes) => all.extend(bytes),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(all),
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(all),
        }
    }
}
