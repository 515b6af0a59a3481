//! Waits for input, or for the end of it.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Returns whether there is input, or its end, within `limit`.
pub fn readable_within(fd: impl AsFd, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(found) = poll(&fd, PollFlags::IN, Some(left))? {
            return Ok(found);
        }
    }
}

/// Waits until the other end is closed.
pub fn hung_up(fd: impl AsFd) -> io::Result<()> {
    // A hang-up is always reported, without being requested.
    while poll(&fd, PollFlags::empty(), None)? != Some(true) {}
    Ok(())
}

/// Returns whether the other end is closed.
pub fn is_hung_up(fd: impl AsFd) -> io::Result<bool> {
    loop {
        if let Some(gone) = poll(&fd, PollFlags::empty(), Some(Duration::ZERO))? {
            return Ok(gone);
        }
    }
}

/// Waits for one of `events`, optionally with a limit; returns `None` when a signal came first.
fn poll(fd: &impl AsFd, events: PollFlags, limit: Option<Duration>) -> io::Result<Option<bool>> {
    let limit = limit.map(Timespec::try_from).transpose();
    let limit = limit.map_err(io::Error::other)?;
    match rustix::event::poll(&mut [PollFd::new(fd, events)], limit.as_ref()) {
        Ok(ready) => Ok(Some(ready > 0)),
        Err(Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
