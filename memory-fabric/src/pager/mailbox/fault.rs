//! Mailbox and inbox of the fault thread.

use super::{Port, PortInbox, port};
use crate::page::PageIndex;
use crate::transport::{IN_FLIGHT_MAX, PageTransport};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io;
use std::os::fd::RawFd;

/// Limit of pages whose faults are to be handled again. The evictor hands back at most one per page
/// and step, and the fault thread always takes them.
const RETRIES_MAX: usize = IN_FLIGHT_MAX * 16;

/// What other threads send to the fault thread.
#[derive(Debug)]
pub(crate) struct FaultMailbox {
    port: Port,
    retries: Sender<PageIndex>,
}

/// The fault thread's end.
#[derive(Debug)]
pub(crate) struct FaultInbox {
    port: PortInbox,
    retries: Receiver<PageIndex>,
}

impl FaultMailbox {
    pub(crate) fn new() -> io::Result<(Self, FaultInbox)> {
        let (port, port_inbox) = port()?;
        let (sender, receiver) = bounded(RETRIES_MAX);
        let mailbox = Self {
            port,
            retries: sender,
        };
        let inbox = FaultInbox {
            port: port_inbox,
            retries: receiver,
        };
        Ok((mailbox, inbox))
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Ends the fault thread's sleep: memory was freed, or a fault was handed back.
    pub(crate) fn wake(&self) {
        self.port.wake();
    }

    /// Hands a fault on a page back, to be handled again. The caller [wakes](Self::wake) the thread
    /// after the last page.
    pub(in crate::pager) fn retry(&self, page: PageIndex) {
        // Waits while the channel is full, which ends soon. It is disconnected only after the
        // fault thread has ended, when no fault is served any more.
        let _ = self.retries.send(page);
    }
}

impl FaultInbox {
    /// Becomes readable when the thread is woken.
    pub(in crate::pager) fn fd(&self) -> RawFd {
        self.port.fd()
    }

    pub(in crate::pager) fn clear_wake(&self) {
        self.port.clear_wake();
    }

    /// The next page whose fault was handed back.
    pub(in crate::pager) fn next_retry(&self) -> Option<PageIndex> {
        self.retries.try_recv().ok()
    }

    /// Applies the next change of the thread's transports; returns the donor.
    pub(in crate::pager) fn apply_change(
        &mut self,
        transports: &mut Vec<Box<dyn PageTransport>>,
    ) -> Option<usize> {
        self.port.apply_change(transports)
    }
}
