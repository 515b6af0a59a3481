//! Waiting of the pager's threads: poll for work for a limited time, then sleep.

use crate::spin::Spin;
use crate::transport::{Interest, PageTransport};
use fabric_host::poll::poll_until;
use fabric_transport::port::STALL_CHECK_INTERVAL;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Decides between polling again and sleeping.
#[derive(Debug)]
pub(super) struct Waiter {
    spin: Spin,
    idle_since: Option<Instant>,
    fds: Vec<libc::pollfd>,
    /// The end of the next sleep at the latest.
    due: Option<Instant>,
}

impl Waiter {
    /// Creates a waiter that polls up to `spin_max`, with room for `donors` connections.
    pub(super) fn new(spin_max: Duration, donors: usize) -> Self {
        Self {
            spin: Spin::new(spin_max),
            idle_since: None,
            // Up to two for each donor: RDMA and TCP.
            fds: Vec::with_capacity(2 * donors + 2),
            due: None,
        }
    }

    /// Records that there was work.
    pub(super) fn worked(&mut self) {
        self.idle_since = None;
    }

    /// Records that there was none. Returns soon, to poll again, or after an event on one of `fds`
    /// or the transports. Returns true when it slept.
    pub(super) fn idle(
        &mut self,
        fds: &[RawFd],
        transports: &mut [Box<dyn PageTransport>],
    ) -> io::Result<bool> {
        if self.looks_again() {
            return Ok(false);
        }
        self.sleep(fds, transports)?;
        Ok(true)
    }

    /// Sets the time of the next work that nothing announces.
    pub(super) fn set_due(&mut self, due: Option<Instant>) {
        self.due = due;
    }

    /// Returns whether the descriptor at this index of the last sleep may be ready.
    pub(super) fn is_ready(&self, place: usize) -> bool {
        self.fds.get(place).is_none_or(|fd| fd.revents != 0)
    }

    /// Records that there was no work. Returns whether to poll again, after a short pause, or to
    /// sleep.
    pub(super) fn looks_again(&mut self) -> bool {
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        self.spin.keeps_polling(now - idle_since)
    }

    /// Sleeps until an event on one of `fds` or the transports. Returns at once when one of these
    /// has already had an event.
    pub(super) fn sleep(
        &mut self,
        fds: &[RawFd],
        transports: &mut [Box<dyn PageTransport>],
    ) -> io::Result<()> {
        self.fds.clear();
        let mut armed = true;
        for transport in transports.iter_mut() {
            armed &= transport.arm();
        }
        if !armed {
            return Ok(());
        }
        let idle_since = *self.idle_since.get_or_insert_with(Instant::now);
        let pollfd = |fd, events| libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        self.fds
            .extend(fds.iter().map(|&fd| pollfd(fd, libc::POLLIN)));
        let mut until = self.due;
        for transport in transports {
            let stalls_at = (transport.in_flight() > 0).then(|| idle_since + STALL_CHECK_INTERVAL);
            let due = [until, transport.wake_by(), stalls_at];
            until = due.into_iter().flatten().min();
            transport.interests(&mut |Interest { fd, writable }| {
                let events = libc::POLLIN | if writable { libc::POLLOUT } else { 0 };
                self.fds.push(pollfd(fd, events));
            });
        }
        let slept = poll_until(&mut self.fds, until);
        self.spin.slept(idle_since.elapsed());
        self.idle_since = None;
        slept
    }
}
