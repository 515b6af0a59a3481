//! The seam between an RDMA transport and the link that makes its lanes.

use super::RdmaError;
use crate::PageSource;
use crossbeam_channel::{Receiver, Sender};
use fabric_host::metrics::Counter;
use fabric_pages::page::PageBytes;
use fabric_wire::TrafficClass;
use std::os::fd::RawFd;
use std::sync::Arc;

/// A way to read and write pages of a lease without its donor's processor.
pub trait PageLane: Send + std::fmt::Debug {
    /// Adds a READ of `pages` pages from `offset` of the lease on to the next batch, under a
    /// number below [`IN_FLIGHT_MAX`](crate::IN_FLIGHT_MAX) that is not in use. False when there is no room for the
    /// answer just now.
    fn add(&mut self, number: u16, offset: u64, pages: usize) -> bool;

    /// Adds a WRITE of a page to `offset` of the lease in the same way. The bytes are taken before
    /// this returns.
    fn add_write(&mut self, number: u16, offset: u64, page: PageSource) -> bool;

    /// What a WRITE that has not completed is to write.
    fn page_of(&self, number: u16) -> &PageBytes;

    /// Posts the batch.
    ///
    /// # Errors
    ///
    /// When the lane is of no more use; here and in [`poll`](Self::poll).
    fn post(&mut self) -> Result<(), RdmaError>;

    /// Gives what has completed to `complete`: its number and bytes, which are valid during the
    /// call; WRITEs have none. True when there was something. What has completed before an error
    /// was given all the same. A page whose WRITE has completed is found by a later READ.
    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError>;

    /// To be called before sleeping: false when something has completed already. Otherwise the
    /// descriptor becomes readable when something does.
    fn arm(&mut self) -> bool;

    /// The descriptor.
    fn event_fd(&self) -> Option<RawFd>;
}

/// Numbers of the RDMA connections to one donor.
#[derive(Debug, Default)]
pub struct RdmaStats {
    /// Pages that came by READ.
    pub pages_read: Counter,
    /// Pages that went home by WRITE.
    pub pages_written: Counter,
    /// Connections made.
    pub connections: Counter,
    /// Of these, failed.
    pub failures: Counter,
    /// Of these, given back in order.
    pub returned: Counter,
}

impl RdmaStats {
    /// Whether there is a connection now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connections.get() > self.failures.get() + self.returned.get()
    }
}

/// Where lanes are handed over.
pub type LaneSender = Sender<Box<dyn PageLane>>;

/// What the thread that makes lanes is asked for.
#[derive(Debug)]
pub enum LaneRequest {
    /// To take down a lane that failed, or that is not needed any more.
    TakeBack(TrafficClass, Box<dyn PageLane>, Option<RdmaError>),
    /// To end.
    Stop,
}

/// The end of the link in the hands of a transport.
#[derive(Debug)]
pub struct LanePort {
    class: TrafficClass,
    lanes: Receiver<Box<dyn PageLane>>,
    requests: Sender<LaneRequest>,
    stats: Arc<RdmaStats>,
}

impl LanePort {
    /// A port for one class: lanes come from `lanes`, go back by `requests`, and are counted in
    /// `stats`.
    #[must_use]
    pub fn new(
        class: TrafficClass,
        lanes: Receiver<Box<dyn PageLane>>,
        requests: Sender<LaneRequest>,
        stats: Arc<RdmaStats>,
    ) -> Self {
        Self {
            class,
            lanes,
            requests,
            stats,
        }
    }

    /// The class of its lanes.
    #[must_use]
    pub fn class(&self) -> TrafficClass {
        self.class
    }

    /// The newest lane, if there is a new one.
    #[must_use]
    pub fn take_lane(&self) -> Option<Box<dyn PageLane>> {
        self.lanes.try_recv().ok()
    }

    /// Hands back a lane that failed, or is not needed any more.
    pub fn give_back(&self, lane: Box<dyn PageLane>, why: Option<RdmaError>) {
        // There is room: no class has more than two lanes. Closed: then it ends here.
        let request = LaneRequest::TakeBack(self.class, lane, why);
        let _ = self.requests.try_send(request);
    }

    /// Counts pages that have come.
    pub fn note_read(&self, pages: u32) {
        self.stats.pages_read.add(pages.into());
    }

    /// Counts a page that has gone home.
    pub fn note_written(&self) {
        self.stats.pages_written.increment();
    }
}
