//! The interface between an RDMA transport and the link that makes its lanes.

use super::RdmaError;
use crossbeam_channel::{Receiver, Sender};
use fabric_host::metrics::{Counter, Histogram};
use fabric_pages::page::PageBytes;
use fabric_verbs::device::Route;
use fabric_verbs::endpoint::Endpoint;
use fabric_verbs::settings::{Retries, Waiting};
use fabric_wire::TrafficClass;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Reads and writes pages of a lease without its donor's CPU.
pub trait PageLane: Send + std::fmt::Debug {
    /// Adds a READ of `pages` pages from `offset` of the lease on to the next batch, under an
    /// unused number below [`IN_FLIGHT_MAX`](crate::IN_FLIGHT_MAX). Returns false when there is no
    /// room for the answer at the moment.
    fn add(&mut self, number: u16, offset: u64, pages: usize) -> bool;

    /// Adds a WRITE of a page to `offset` of the lease in the same way. The bytes are copied before
    /// this returns.
    fn add_write(&mut self, number: u16, offset: u64, page: &PageBytes) -> bool;

    /// Returns the page of a WRITE that has not completed.
    fn page_of(&self, number: u16) -> &PageBytes;

    /// Posts the batch.
    ///
    /// # Errors
    ///
    /// Fails when the lane has failed, as does [`poll`](Self::poll).
    fn post(&mut self) -> Result<(), RdmaError>;

    /// Passes completions to `complete`: the number and the bytes, which are valid during the call;
    /// WRITEs have none. Returns true when there were any. Completions before an error are passed
    /// as well. A page whose WRITE has completed is visible to later READs.
    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError>;

    /// Call it before sleeping: it returns false when a request has already completed. Otherwise
    /// the descriptor becomes readable at the next completion.
    fn arm(&mut self) -> bool;

    /// Returns the descriptor.
    fn event_fd(&self) -> Option<RawFd>;
}

/// The two ends of an RDMA connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LaneEnds {
    /// Port and address of this end.
    pub here: Route,
    /// The other end.
    pub there: Endpoint,
    /// The largest payload of a packet between them, bytes.
    pub mtu_bytes: u16,
    /// Limit of outstanding requests.
    pub depth: u16,
    /// How often requests are repeated.
    pub retries: Retries,
    /// How the thread waits.
    pub waiting: Waiting,
}

/// Counters of the RDMA connections to one donor.
#[derive(Debug, Default)]
pub struct RdmaStats {
    /// Pages fetched by READ.
    pub pages_read: Counter,
    /// Pages written back by WRITE.
    pub pages_written: Counter,
    /// From posting these WRITEs to the completion of their flush.
    pub write: Histogram,
    /// Connections established.
    pub connections: Counter,
    /// Connections that failed.
    pub failures: Counter,
    /// Connections that were closed in order.
    pub returned: Counter,
    /// The ends of the newest connection for faults.
    pub ends: Mutex<Option<LaneEnds>>,
}

impl RdmaStats {
    /// Returns whether a connection is established.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connections.get() > self.failures.get() + self.returned.get()
    }
}

/// Sends lanes to a transport.
pub type LaneSender = Sender<Box<dyn PageLane>>;

/// A request to the thread that makes lanes.
#[derive(Debug)]
pub enum LaneRequest {
    /// Closes a lane that failed, or is no longer needed.
    TakeBack(TrafficClass, Box<dyn PageLane>, Option<RdmaError>),
    /// Stops the thread.
    Stop,
}

/// The link's interface for a transport.
#[derive(Debug)]
pub struct LanePort {
    class: TrafficClass,
    lanes: Receiver<Box<dyn PageLane>>,
    requests: Sender<LaneRequest>,
    stats: Arc<RdmaStats>,
}

impl LanePort {
    /// Creates a port for one class: lanes arrive through `lanes`, are returned through `requests`,
    /// and are counted in `stats`.
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

    /// Returns the class of its lanes.
    #[must_use]
    pub fn class(&self) -> TrafficClass {
        self.class
    }

    /// Returns the newest lane, if there is a new one.
    #[must_use]
    pub fn take_lane(&self) -> Option<Box<dyn PageLane>> {
        self.lanes.try_recv().ok()
    }

    /// Returns a lane that failed, or is no longer needed.
    pub fn return_lane(&self, lane: Box<dyn PageLane>, why: Option<RdmaError>) {
        // There is room: no class has more than two lanes. If the channel is closed, the lane is
        // dropped here.
        let request = LaneRequest::TakeBack(self.class, lane, why);
        let _ = self.requests.try_send(request);
    }

    /// Counts fetched pages.
    pub fn note_read(&self, pages: u32) {
        self.stats.pages_read.add(pages.into());
    }

    /// Counts a page that was written back, and how long that took.
    pub fn note_written(&self, time: Option<Duration>) {
        self.stats.pages_written.increment();
        if let Some(time) = time {
            self.stats.write.record(time);
        }
    }
}
