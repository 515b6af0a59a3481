//! Mailbox and inbox of the evictor.

use super::{Port, PortInbox, port};
use crate::discard::{self, DiscardMailbox, Posted};
use crate::page::PageIndex;
use crate::page_map::PageMap;
use crate::pager::eviction_clock::EvictionClock;
use crate::pager::queue::{Arrivals, PageQueue};
use crate::pager::relocate::MoveOrder;
use crate::transport::PageTransport;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How a page became resident.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Arrival {
    /// It was touched.
    Touched,
    /// It was touched soon after its eviction.
    Returned,
    /// It was prefetched, and not touched yet.
    Prefetched,
}

/// What both ends access.
#[derive(Debug, Default)]
struct Common {
    touched: Arrivals,
    returned: Arrivals,
    prefetched: Arrivals,
    clock: EvictionClock,
    /// Whether the evictor was woken for lack of memory and has not responded yet.
    low_memory_notified: AtomicBool,
}

impl Common {
    fn arrivals(&self, arrival: Arrival) -> &Arrivals {
        match arrival {
            Arrival::Touched => &self.touched,
            Arrival::Returned => &self.returned,
            Arrival::Prefetched => &self.prefetched,
        }
    }
}

/// What other threads send to the evictor.
#[derive(Debug)]
pub(crate) struct EvictorMailbox {
    port: Port,
    common: Arc<Common>,
    discards: Sender<Posted>,
    moves: Sender<MoveOrder>,
}

/// The evictor's end.
#[derive(Debug)]
pub(crate) struct EvictorInbox {
    port: PortInbox,
    common: Arc<Common>,
    discards: Receiver<Posted>,
    moves: Receiver<MoveOrder>,
}

impl EvictorMailbox {
    pub(crate) fn new() -> io::Result<(Self, EvictorInbox)> {
        let (port, port_inbox) = port()?;
        let common = Arc::<Common>::default();
        let (sender, receiver) = discard::channel();
        // One order at a time.
        let (moves, moves_receiver) = bounded(1);
        let mailbox = Self {
            port,
            common: Arc::clone(&common),
            discards: sender,
            moves,
        };
        let inbox = EvictorInbox {
            port: port_inbox,
            common,
            discards: receiver,
            moves: moves_receiver,
        };
        Ok((mailbox, inbox))
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Where pages to be discarded are posted, for as long as the evictor runs.
    pub(crate) fn discards(&self) -> DiscardMailbox {
        DiscardMailbox::new(self.discards.clone(), Arc::clone(&self.port.wake))
    }

    /// Orders moves of blocks. Returns false if an earlier order was not taken yet, or the evictor
    /// has ended.
    pub(crate) fn move_blocks(&self, order: MoveOrder) -> bool {
        let is_sent = self.moves.try_send(order).is_ok();
        self.port.wake();
        is_sent
    }

    /// Adds a page that became resident and that the caller has listed: it is in no queue.
    pub(in crate::pager) fn push(&self, map: &PageMap, page: PageIndex, arrival: Arrival) {
        self.common.arrivals(arrival).push(map, page);
    }

    /// How a page arrives that was evicted with this stamp.
    pub(in crate::pager) fn arrival_of(&self, stamp: u32) -> Arrival {
        if self.common.clock.is_recent(stamp) {
            Arrival::Returned
        } else {
            Arrival::Touched
        }
    }

    /// Wakes the evictor because memory is low; a system call only if that was not done already.
    pub(in crate::pager) fn notify_low_memory(&self) {
        // SeqCst here and in `EvictorInbox::clear_wake`: a thread that finds the evictor
        // notified took its memory before the evictor looks at the budget again.
        if !self.common.low_memory_notified.swap(true, Ordering::SeqCst) {
            self.port.wake();
        }
    }
}

impl EvictorInbox {
    /// Becomes readable when the thread is woken.
    pub(in crate::pager) fn fd(&self) -> RawFd {
        self.port.fd()
    }

    /// Resets the wake-up, before the evictor looks at the budget again.
    pub(in crate::pager) fn clear_wake(&self) {
        // In this order: a notification in between finds the evictor awake and about to look.
        self.port.clear_wake();
        self.common
            .low_memory_notified
            .store(false, Ordering::SeqCst);
    }

    /// Moves the pages that arrived in this way to the end of `queue`, oldest first.
    pub(in crate::pager) fn drain_into(
        &self,
        arrival: Arrival,
        map: &PageMap,
        queue: &mut PageQueue,
    ) {
        self.common.arrivals(arrival).drain_into(map, queue);
    }

    /// The clock that gives evicted pages their stamps.
    pub(in crate::pager) fn clock(&self) -> &EvictionClock {
        &self.common.clock
    }

    /// The next request to discard pages.
    pub(in crate::pager) fn next_discard(&self) -> Option<Posted> {
        self.discards.try_recv().ok()
    }

    /// The next order to move blocks.
    pub(in crate::pager) fn next_moves(&self) -> Option<MoveOrder> {
        self.moves.try_recv().ok()
    }

    /// Applies the next change of the thread's transports; returns the donor.
    pub(in crate::pager) fn apply_change(
        &mut self,
        transports: &mut Vec<Box<dyn PageTransport>>,
    ) -> Option<usize> {
        self.port.apply_change(transports)
    }

    #[cfg(test)]
    pub(in crate::pager) fn is_notified(&self) -> bool {
        self.common.low_memory_notified.load(Ordering::SeqCst)
    }
}
