//! Mailbox and inbox of the prefetcher.

use super::{Port, PortInbox, port};
use crate::pager::detect::Order;
use crate::transport::PageTransport;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Limit of waiting orders. Further orders are dropped: their pages would arrive too late.
const ORDERS_MAX: usize = 64;

/// What other threads send to the prefetcher.
#[derive(Debug)]
pub(crate) struct PrefetcherMailbox {
    port: Port,
    orders: Sender<Order>,
    /// Whether the prefetcher sleeps, or is about to.
    asleep: Arc<AtomicBool>,
}

/// The prefetcher's end.
#[derive(Debug)]
pub(crate) struct PrefetcherInbox {
    port: PortInbox,
    orders: Receiver<Order>,
    asleep: Arc<AtomicBool>,
}

impl PrefetcherMailbox {
    pub(crate) fn new() -> io::Result<(Self, PrefetcherInbox)> {
        let (port, port_inbox) = port()?;
        let (sender, receiver) = bounded(ORDERS_MAX);
        let asleep = Arc::new(AtomicBool::new(false));
        let mailbox = Self {
            port,
            orders: sender,
            asleep: Arc::clone(&asleep),
        };
        let inbox = PrefetcherInbox {
            port: port_inbox,
            orders: receiver,
            asleep,
        };
        Ok((mailbox, inbox))
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Adds an order.
    pub(in crate::pager) fn order(&self, order: Order) {
        // When the channel is full the thread is woken nevertheless: it may wait for memory.
        let _ = self.orders.try_send(order);
        self.wake_if_asleep();
    }

    /// Wakes the prefetcher if it sleeps, after new work was published.
    pub(in crate::pager) fn wake_if_asleep(&self) {
        // SeqCst: pairs with `PrefetcherInbox::fall_asleep`. The prefetcher sets the flag and then
        // checks for work once more; here work is published and then the flag is read. One of them
        // sees the other.
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.port.wake();
        }
    }
}

impl PrefetcherInbox {
    /// Becomes readable when the thread is woken.
    pub(in crate::pager) fn fd(&self) -> RawFd {
        self.port.fd()
    }

    pub(in crate::pager) fn clear_wake(&self) {
        self.port.clear_wake();
    }

    /// Announces that the thread sleeps next, unless its last check finds work.
    pub(in crate::pager) fn fall_asleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    pub(in crate::pager) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    pub(in crate::pager) fn next_order(&self) -> Option<Order> {
        self.orders.try_recv().ok()
    }

    pub(in crate::pager) fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }

    pub(in crate::pager) fn has_changes(&self) -> bool {
        !self.port.changes.is_empty()
    }

    /// Applies the next change of the thread's transports; returns the donor.
    pub(in crate::pager) fn apply_change(
        &mut self,
        transports: &mut Vec<Box<dyn PageTransport>>,
    ) -> Option<usize> {
        self.port.apply_change(transports)
    }
}
