//! Waiting until there is something to read.

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
        let mut wanted = libc::pollfd {
            fd: fd.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `wanted` is one pollfd, and lives through the call.
        match unsafe { libc::poll(&raw mut wanted, 1, left) } {
            1 => return Ok(true),
            0 => return Ok(false),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
