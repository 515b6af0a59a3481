//! Runs the command in a shell, and sends its output and its status.

use core::ffi::CStr;

use super::super::frame::{self, CONTENTS_BYTES_MAX, HEADER_BYTES};
use super::sys::{self, Errno, Fd, Poll};

const SHELL: &CStr = c"/bin/sh";
const ENVIRONMENT: [&CStr; 3] = [
    c"PATH=/bin:/sbin:/usr/bin:/usr/sbin:/usr/local/bin",
    c"HOME=/root",
    c"TERM=dumb",
];

/// Interval at which orphaned children are reaped while nothing else happens.
const REAP_INTERVAL_MS: usize = 1000;

/// The shell has ended with this status.
const ENDED: u8 = b'e';
/// The shell could not be started, with this error.
const NOT_STARTED: u8 = b'x';

/// The pipes between the command and the relay: reading end, writing end.
struct Pipes {
    out: (Fd, Fd),
    err: (Fd, Fd),
    /// Two bytes at the end: the event and its number.
    news: (Fd, Fd),
}

/// Runs `command` and sends frames to `channel`, up to the last one, before which `before_last` is
/// called. `reap` is set in the first process, which inherits orphaned children.
pub fn run(command: &CStr, channel: Fd, reap: bool, before_last: impl FnOnce()) {
    let pipes = match (sys::pipe(), sys::pipe(), sys::pipe()) {
        (Ok(out), Ok(err), Ok(news)) => Pipes { out, err, news },
        _ => return fail(channel, b"the guest's init cannot make pipes"),
    };
    let waiter = match sys::fork() {
        Ok(0) => wait_for_shell(command, &pipes),
        Ok(pid) => pid,
        Err(error) => return fail_with(channel, b"the guest's init cannot fork", error),
    };
    for (_, writing) in [pipes.out, pipes.err, pipes.news] {
        sys::close(writing);
    }
    let news = relay(channel, &pipes, reap);
    for (reading, _) in [pipes.out, pipes.err, pipes.news] {
        sys::close(reading);
    }
    let _ = sys::wait(waiter, true);
    before_last();
    match news {
        Some([ENDED, status]) => send(channel, frame::STATUS, &[status]),
        Some([_, error]) => fail_with(channel, b"cannot start /bin/sh", error.into()),
        None => fail(channel, b"the guest's init lost the shell"),
    }
}

/// Sends that there is no result, with the reason.
pub fn fail(channel: Fd, why: &[u8]) {
    send(channel, frame::FAILURE, why);
}

/// Like [`fail`], with an error number.
fn fail_with(channel: Fd, why: &[u8], error: Errno) {
    let mut text = [0_u8; 96];
    let mut len = 0;
    let mut push = |bytes: &[u8]| {
        for byte in bytes {
            if let Some(place) = text.get_mut(len) {
                *place = *byte;
                len += 1;
            }
        }
    };
    push(why);
    push(b": error ");
    let error = u8::try_from(error).unwrap_or(u8::MAX);
    for (unit, shown) in [(100, error >= 100), (10, error >= 10), (1, true)] {
        if shown {
            push(&[b'0' + error / unit % 10]);
        }
    }
    fail(channel, text.get(..len).unwrap_or_default());
}

/// Sends a frame. Best effort: an error cannot be reported.
fn send(channel: Fd, kind: u8, contents: &[u8]) {
    let header: [u8; HEADER_BYTES] = frame::header(kind, contents.len());
    let _ = sys::write_all(channel, &header);
    let _ = sys::write_all(channel, contents);
}

/// Forwards the command's output until its shell has ended, and then what is in the pipes at that
/// time. Background processes are not waited for, also if they write on and on. Returns the event.
fn relay(channel: Fd, pipes: &Pipes, reap: bool) -> Option<[u8; 2]> {
    let waiting_for = |fd| Poll {
        fd,
        events: sys::POLLIN,
        revents: 0,
    };
    let mut polls = [pipes.out.0, pipes.err.0, pipes.news.0].map(waiting_for);
    let mut buffer = [0_u8; CONTENTS_BYTES_MAX];
    while polls[2].revents == 0 {
        for poll in &mut polls {
            poll.revents = 0;
        }
        let _ = sys::poll(&mut polls, REAP_INTERVAL_MS);
        for (at, kind) in [(0, frame::STDOUT), (1, frame::STDERR)] {
            if polls[at].revents == 0 {
                continue;
            }
            match sys::read(polls[at].fd, &mut buffer) {
                Ok(len @ 1..) => send(channel, kind, buffer.get(..len).unwrap_or_default()),
                // All writers have closed it; negative descriptors are not polled.
                _ => polls[at].fd = -1,
            }
        }
        if reap && polls[2].revents == 0 {
            while matches!(sys::wait(-1, false), Ok((1.., _))) {}
        }
    }
    for (at, kind) in [(0, frame::STDOUT), (1, frame::STDERR)] {
        // What the shell has written is among it.
        let mut left = match polls[at].fd {
            0.. => sys::unread_bytes(polls[at].fd),
            _ => 0,
        };
        while left > 0 {
            let most = left.min(CONTENTS_BYTES_MAX);
            let Ok(len @ 1..) = sys::read(polls[at].fd, buffer.get_mut(..most).unwrap_or_default())
            else {
                break;
            };
            send(channel, kind, buffer.get(..len).unwrap_or_default());
            left = left.saturating_sub(len);
        }
    }
    let mut news = [0; 2];
    (sys::read(pipes.news.0, &mut news) == Ok(2)).then_some(news)
}

/// Starts the shell as a child of a separate process, and waits only for it.
fn wait_for_shell(command: &CStr, pipes: &Pipes) -> ! {
    let report = |what: u8, number: i32| {
        let number = u8::try_from(number).unwrap_or(u8::MAX);
        let _ = sys::write_all(pipes.news.1, &[what, number]);
    };
    match sys::fork() {
        Ok(0) => {
            let error = become_shell(command, pipes);
            report(NOT_STARTED, error);
            sys::exit(1)
        }
        Ok(shell) => {
            // Otherwise the pipes would stay open after the command's end.
            sys::close(pipes.out.1);
            sys::close(pipes.err.1);
            match sys::wait(shell, true) {
                // The first event counts.
                Ok((_, status)) => report(ENDED, shell_status(status)),
                Err(error) => report(NOT_STARTED, error),
            }
        }
        Err(error) => report(NOT_STARTED, error),
    }
    sys::exit(0)
}

/// Returns the status of a process as a shell does: 128 plus the number of a signal that ended it.
fn shell_status(status: i32) -> i32 {
    match status & 0x7f {
        0 => status >> 8 & 0xff,
        signal => 128 + signal,
    }
}

fn become_shell(command: &CStr, pipes: &Pipes) -> Errno {
    sys::setsid();
    let files = sys::open(c"/dev/null", sys::O_RDONLY | sys::O_CLOEXEC).and_then(|null| {
        sys::dup2(null, 0)?;
        sys::dup2(pipes.out.1, 1)?;
        sys::dup2(pipes.err.1, 2)
    });
    if let Err(error) = files {
        return error;
    }
    sys::execve(SHELL, &[c"sh", c"-c", command], &ENVIRONMENT)
}

#[cfg(test)]
#[path = "shell_tests.rs"]
mod tests;
