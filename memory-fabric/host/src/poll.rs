//! Sleeping until descriptors are ready.

use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// How long a part of the descriptors is watched before the others are looked at.
const PART_TIME: Duration = Duration::from_millis(1);

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

/// Like [`sleep_on`], with several descriptors, also where these are more than this process may have
/// open: the limit may have been lowered since they were opened, and the kernel then refuses to watch
/// so many at once.
///
/// # Errors
///
/// Fails when the system call fails; a signal is not an error.
pub fn poll_until(fds: &mut [libc::pollfd], until: Option<Instant>) -> io::Result<()> {
    let polled = poll(fds, left(until));
    // Threads whose system calls are filtered cannot ask for the limit.
    let mut part_max = fds.len() / 2;
    let mut polled = polled.map(drop);
    while let Err(error) = &polled
        && error.raw_os_error() == Some(libc::EINVAL)
        && part_max > 0
    {
        polled = poll_in_parts(fds, until, part_max);
        part_max /= 2;
    }
    polled
}

fn left(until: Option<Instant>) -> Option<Duration> {
    until.map(|until| until.saturating_duration_since(Instant::now()))
}

/// Watches a part of the descriptors after the other.
fn poll_in_parts(
    fds: &mut [libc::pollfd],
    until: Option<Instant>,
    part_max: usize,
) -> io::Result<()> {
    loop {
        let left = left(until);
        let mut wait = left.map_or(PART_TIME, |left| left.min(PART_TIME));
        let mut ready = 0;
        for part in fds.chunks_mut(part_max) {
            let Polled::Ready(more) = poll(part, Some(wait))? else {
                return Ok(());
            };
            ready += more;
            wait = Duration::ZERO;
        }
        if ready > 0 || left.is_some_and(|left| left.is_zero()) {
            return Ok(());
        }
    }
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Polled {
    /// So many descriptors are ready, or none in time.
    Ready(usize),
    /// A signal arrived.
    Interrupted,
}

fn poll(fds: &mut [libc::pollfd], time: Option<Duration>) -> io::Result<Polled> {
    let timeout = time.map(|time| libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos().into(),
    });
    let timeout = timeout
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    let count = fds.len() as libc::nfds_t;
    // SAFETY: pointer and count describe one slice; the timeout, if there is one, lives until the
    // call returns; no signal mask is given.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), count, timeout, std::ptr::null()) };
    if let Ok(ready) = usize::try_from(ready) {
        return Ok(Polled::Ready(ready));
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(Polled::Interrupted),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsRawFd as _;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn readable(fd: RawFd) -> libc::pollfd {
        libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        }
    }

    #[test]
    fn more_descriptors_than_may_be_open_are_watched_too() {
        // The limit may be a thousand million. The tests of this crate need few.
        let limit = getrlimit(Resource::Nofile);
        let max = limit.current.map_or(4096, |limit| limit.min(4096));
        let lowered = Rlimit {
            current: Some(max),
            ..limit
        };
        setrlimit(Resource::Nofile, lowered).expect("lower");
        let (far, mut near) = std::io::pipe().expect("a pipe");
        // The kernel skips those below 0, but counts them.
        let mut fds = vec![readable(-1); 3 * usize::try_from(max).expect("small")];
        *fds.last_mut().expect("several") = readable(far.as_raw_fd());
        let refused = poll(&mut fds, Some(Duration::ZERO)).expect_err("too many");
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        let begin = Instant::now();
        poll_until(&mut fds, Some(begin + Duration::from_millis(5))).expect("in parts");
        assert!(begin.elapsed() >= Duration::from_millis(5));
        assert!(fds.iter().all(|fd| fd.revents == 0));
        near.write_all(b"x").expect("sent");
        poll_until(&mut fds, Some(begin + LONG)).expect("in parts");
        assert!(begin.elapsed() < LONG);
        let ready = fds.iter().filter(|fd| fd.revents != 0);
        assert_eq!(ready.map(|fd| fd.fd).collect::<Vec<_>>(), [far.as_raw_fd()]);
    }

    #[test]
    fn each_part_is_looked_at_and_none_waits_for_the_one_before() {
        let pipes: Vec<_> = (0..5).map(|_| std::io::pipe().expect("a pipe")).collect();
        let watched = || pipes.iter().map(|(far, _)| readable(far.as_raw_fd()));
        for (sender, (far, near)) in pipes.iter().enumerate() {
            let mut fds: Vec<_> = watched().collect();
            std::thread::scope(|scope| {
                scope.spawn(move || (&*near).write_all(b"x").expect("sent"));
                poll_in_parts(&mut fds, Some(Instant::now() + LONG), 2).expect("watched");
            });
            let ready = fds.iter().position(|fd| fd.revents != 0);
            assert_eq!(ready, Some(sender));
            (&*far).read_exact(&mut [0]).expect("received");
        }
    }
}
