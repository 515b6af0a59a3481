//! Sleeping until descriptors are ready.

use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

/// Sleeps until a descriptor is ready, until a deadline, or until a signal arrives.
///
/// # Errors
///
/// Fails when the system call fails; a signal is not an error.
pub fn sleep_on(fd: RawFd, events: libc::c_short, until: Option<Instant>) -> io::Result<()> {
    let mut fds = [libc::pollfd {
        fd,
        events,
        revents: 0,
    }];
    poll_until(&mut fds, until)
}

/// Like [`sleep_on`], with several descriptors.
///
/// # Errors
///
/// Fails when the system call fails; a signal is not an error.
pub fn poll_until(fds: &mut [libc::pollfd], until: Option<Instant>) -> io::Result<()> {
    let timeout = until.map(|until| {
        let left = until.saturating_duration_since(Instant::now());
        libc::timespec {
            tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    let timeout = timeout
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    let count = fds.len() as libc::nfds_t;
    // SAFETY: pointer and count describe one slice; the timeout, if there is one, lives until the
    // call returns; no signal mask is given.
    if unsafe { libc::ppoll(fds.as_mut_ptr(), count, timeout, std::ptr::null()) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}
