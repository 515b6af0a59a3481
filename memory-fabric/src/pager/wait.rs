//! Waiting of the pager's threads: look for work for a while, then sleep until there is some.

use crate::transport::{Interest, PageTransport};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// How long a thread sleeps at the most while requests are outstanding: then it looks
/// whether a connection has stalled.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The shortest time worth looking for work before sleeping.
const SPIN_MIN: Duration = Duration::from_micros(10);

/// Decides between looking again and sleeping.
///
/// How long it looks adapts as KVM's halt polling does: when work came soon after the thread
/// had gone to sleep, it looks twice as long the next time, up to a limit; when it came late,
/// half as long, down to not at all. So a busy pager does not sleep, and an idle one takes no
/// processor time.
#[derive(Debug)]
pub(super) struct Waiter {
    spin_max: Duration,
    spin: Duration,
    idle_since: Option<Instant>,
    fds: Vec<libc::pollfd>,
    /// Whether other threads need this one's processor.
    crowded: bool,
}

impl Waiter {
    /// A waiter that looks for `spin_max` at the most, with room for `donors` connections.
    pub(super) fn new(spin_max: Duration, donors: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            spin_max,
            spin: SPIN_MIN.min(spin_max),
            idle_since: None,
            fds: Vec::with_capacity(donors + 2),
            crowded: cores < 4,
        }
    }

    /// There was work.
    pub(super) fn worked(&mut self) {
        self.idle_since = None;
    }

    /// The thread slept and was woken `idle` after it ran out of work.
    fn adapt(&mut self, idle: Duration) {
        self.spin = if idle <= self.spin_max {
            (self.spin * 2).clamp(SPIN_MIN, self.spin_max)
        } else if self.spin > SPIN_MIN {
            self.spin / 2
        } else {
            Duration::ZERO
        };
    }

    /// There was none: returns soon, to look again, or after there was something on one of
    /// `fds` or the transports. True when it slept.
    pub(super) fn idle(
        &mut self,
        fds: &[RawFd],
        transports: &[Box<dyn PageTransport>],
    ) -> io::Result<bool> {
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now - idle_since < self.spin {
            if self.crowded {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            return Ok(false);
        }
        self.fds.clear();
        let pollfd = |fd, events| libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        self.fds
            .extend(fds.iter().map(|&fd| pollfd(fd, libc::POLLIN)));
        let busy = transports
            .iter()
            .filter(|transport| transport.in_flight() > 0);
        let mut timeout_ms = -1;
        for transport in busy {
            timeout_ms = libc::c_int::try_from(STALL_CHECK_INTERVAL.as_millis()).unwrap_or(500);
            if let Some(Interest { fd, writable }) = transport.interest() {
                let events = libc::POLLIN | if writable { libc::POLLOUT } else { 0 };
                self.fds.push(pollfd(fd, events));
            }
        }
        let count = self.fds.len() as libc::nfds_t;
        // SAFETY: the pointer and the count are those of one vector.
        let result = unsafe { libc::poll(self.fds.as_mut_ptr(), count, timeout_ms) };
        self.adapt(idle_since.elapsed());
        self.idle_since = None;
        if result < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_grows_with_short_waits_and_ends_with_long_ones() {
        let limit = Duration::from_micros(100);
        let mut waiter = Waiter::new(limit, 1);
        for _ in 0..10 {
            waiter.adapt(Duration::from_micros(80));
        }
        assert_eq!(waiter.spin, limit);
        for _ in 0..10 {
            waiter.adapt(Duration::from_millis(5));
        }
        assert_eq!(waiter.spin, Duration::ZERO);
        waiter.adapt(Duration::from_micros(80));
        assert_eq!(waiter.spin, SPIN_MIN);
    }
}
