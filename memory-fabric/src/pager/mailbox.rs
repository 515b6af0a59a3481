//! Communication between the pager's threads. Each thread has a *mailbox*, to which any thread may
//! send, and an *inbox*, which only that thread owns and empties. They are created in pairs; the
//! mailboxes are in [`Shared`](super::Shared), and each inbox moves into its thread.

mod evictor;
mod fault;
mod prefetcher;

pub(crate) use evictor::{Arrival, EvictorInbox, EvictorMailbox};
pub(crate) use fault::{FaultInbox, FaultMailbox};
pub(crate) use prefetcher::{PrefetcherInbox, PrefetcherMailbox};

use super::transports::TransportChange;
use crate::transport::PageTransport;
use crate::transport::vacant::Vacant;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Limit of waiting transport changes: each requester waits for its completion.
const CHANGES_MAX: usize = 1;

/// Timeout for a thread to accept a transport.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(2);

/// The common part of a mailbox: the thread's wake-up, and changes of its transports.
#[derive(Debug)]
pub(crate) struct Port {
    wake: Arc<EventFd>,
    changes: Sender<TransportChange>,
}

/// The owner's end of a [`Port`].
#[derive(Debug)]
struct PortInbox {
    wake: Arc<EventFd>,
    changes: Receiver<TransportChange>,
    /// A change that waits for answers.
    waiting: Option<TransportChange>,
}

fn port() -> io::Result<(Port, PortInbox)> {
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    let (sender, receiver) = bounded(CHANGES_MAX);
    let port = Port {
        wake: Arc::clone(&wake),
        changes: sender,
    };
    let inbox = PortInbox {
        wake,
        changes: receiver,
        waiting: None,
    };
    Ok((port, inbox))
}

impl Port {
    /// Ends the thread's sleep, or prevents the next one.
    pub(crate) fn wake(&self) {
        // EAGAIN means that the counter is full, which wakes as well.
        let _ = self.wake.write(1);
    }

    /// Returns the eventfd that connections signal when the thread has work.
    pub(crate) fn event_fd(&self) -> &EventFd {
        &self.wake
    }

    /// Replaces the thread's transport to a donor and returns the previous one. `None` when the
    /// thread does not accept it within [`CHANGE_TIME_MAX`], or has ended.
    pub(crate) fn replace_transport(
        &self,
        donor: usize,
        transport: Box<dyn PageTransport>,
    ) -> Option<Box<dyn PageTransport>> {
        self.change(donor, transport, false)
    }

    /// Removes the thread's transport to a donor once no request on it is outstanding, and returns
    /// it. `None` when that takes longer than [`CHANGE_TIME_MAX`], or the thread has ended; a later
    /// call replaces this one.
    pub(crate) fn vacate_when_idle(&self, donor: usize) -> Option<Box<dyn PageTransport>> {
        self.change(donor, Box::new(Vacant), true)
    }

    fn change(
        &self,
        donor: usize,
        transport: Box<dyn PageTransport>,
        when_idle: bool,
    ) -> Option<Box<dyn PageTransport>> {
        let (replaced, previous) = bounded(1);
        let change = TransportChange {
            donor,
            when_idle,
            transport,
            replaced,
        };
        self.changes.send_timeout(change, CHANGE_TIME_MAX).ok()?;
        self.wake();
        previous.recv_timeout(CHANGE_TIME_MAX).ok()
    }
}

impl PortInbox {
    fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Resets the wake-up. Afterwards the thread checks everything that may have woken it.
    fn clear_wake(&self) {
        // EAGAIN means that nothing woke the thread.
        let _ = self.wake.read();
    }

    /// Applies the next change of the thread's transports; returns the donor.
    fn apply_change(&mut self, transports: &mut Vec<Box<dyn PageTransport>>) -> Option<usize> {
        // A later change replaces one that waits.
        let waiting = self.waiting.take();
        let change = self.changes.try_recv().ok().or(waiting)?;
        if change.is_early(transports) {
            self.waiting = Some(change);
            return None;
        }
        let donor = change.donor;
        change.apply(transports);
        Some(donor)
    }
}
