//! Waiting until there is something to read, or nobody to read from.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Whether there is something to read, or an end, within `limit`.
pub fn readable_within(fd: impl AsFd, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(found) = poll(&fd, PollFlags::IN, Some(left))? {
            return Ok(found);
        }
    }
}

/// Waits until the other end is gone.
pub fn hung_up(fd: impl AsFd) -> io::Result<()> {
    // That is told of without being asked for.
    while poll(&fd, PollFlags::empty(), None)? != Some(true) {}
    Ok(())
}

/// Whether the other end is gone.
pub fn is_hung_up(fd: impl AsFd) -> io::Result<bool> {
    loop {
        if let Some(gone) = poll(&fd, PollFlags::empty(), Some(Duration::ZERO))? {
            return Ok(gone);
        }
    }
}

/// Whether one of `events` happened within a time, or at all; `None` when a signal came before.
fn poll(fd: &impl AsFd, events: PollFlags, limit: Option<Duration>) -> io::Result<Option<bool>> {
    let limit = limit.map(Timespec::try_from).transpose();
    let limit = limit.map_err(io::Error::other)?;
    match rustix::event::poll(&mut [PollFd::new(fd, events)], limit.as_ref()) {
        Ok(ready) => Ok(Some(ready > 0)),
        Err(Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
