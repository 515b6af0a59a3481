//! Waiting until there is something to read, or nobody to read from.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// Whether there is something to read, or an end, within `limit`.
pub fn readable_within(fd: impl AsFd, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the time is over when it says so.
        let left = left.as_millis().saturating_add(1);
        let left = libc::c_int::try_from(left).unwrap_or(libc::c_int::MAX);
        if let Some(found) = poll(&fd, libc::POLLIN, left)? {
            return Ok(found);
        }
    }
}

/// Waits until the other end is gone.
pub fn hung_up(fd: impl AsFd) -> io::Result<()> {
    // That is told of without being asked for.
    while poll(&fd, 0, -1)? != Some(true) {}
    Ok(())
}

/// Whether the other end is gone.
pub fn is_hung_up(fd: impl AsFd) -> io::Result<bool> {
    loop {
        if let Some(gone) = poll(&fd, 0, 0)? {
            return Ok(gone);
        }
    }
}

/// Whether something happened within so many milliseconds; `None` when a signal came before.
fn poll(
    fd: &impl AsFd,
    events: libc::c_short,
    milliseconds: libc::c_int,
) -> io::Result<Option<bool>> {
    let mut wanted = libc::pollfd {
        fd: fd.as_fd().as_raw_fd(),
        events,
        revents: 0,
    };
    // SAFETY: `wanted` is one pollfd, and lives through the call.
    match unsafe { libc::poll(&raw mut wanted, 1, milliseconds) } {
        1 => Ok(Some(true)),
        0 => Ok(Some(false)),
        _ => {
            let error = io::Error::last_os_error();
            let signal = error.kind() == io::ErrorKind::Interrupted;
            if signal { Ok(None) } else { Err(error) }
        }
    }
}
