//! A lane before its peer is known.

use super::super::RdmaError;
use super::super::messages::ConnectAnswer;
use super::{ENTRIES_PER_WRITE, Lane, Request, RequestState};
use crate::IN_FLIGHT_MAX;
use fabric_verbs::batch::Batch;
use fabric_verbs::device::{Device, Route};
use fabric_verbs::endpoint::Endpoint;
use fabric_verbs::memory::{Access, ProtectionDomain};
use fabric_verbs::pair::QueuePair;
use fabric_verbs::queue::{CompletionQueue, Taken};
use fabric_verbs::room::Room;
use fabric_verbs::settings::{NOT_READY_RETRIES_PAGING, Retries, Waiting};
use fabric_verbs::staging::Staging;
use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

/// Configuration of a lane.
#[derive(Clone, Debug)]
pub struct LaneConfig {
    /// The device.
    pub device: Arc<Device>,
    /// Port and address.
    pub route: Route,
    /// Limit of pages in transit.
    pub pages: usize,
    /// Whether it also writes pages. Flushes need one more page.
    pub writes: bool,
    /// Limit of outstanding requests, from 1 to [`IN_FLIGHT_MAX`].
    pub depth: usize,
    /// How often requests are repeated.
    pub retries: Retries,
    /// How the thread that uses the lane waits.
    pub waiting: Waiting,
    /// Description of the peer, for errors.
    pub peer: String,
}

/// A lane whose peer is not known yet.
#[derive(Debug)]
pub struct NewLane {
    pair: QueuePair,
    staging: Staging,
    queue: Arc<CompletionQueue>,
    pages: usize,
    writes: bool,
    entries: usize,
    depth: usize,
    retries: Retries,
    waiting: Waiting,
}

impl NewLane {
    /// Returns this end's parameters for the peer.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.pair.endpoint()
    }

    /// Connects the lane; `session` is the TCP connection over which the peer's end was created.
    pub fn connect(
        mut self,
        answer: &ConnectAnswer,
        session: TcpStream,
    ) -> Result<Lane, RdmaError> {
        if !answer.memory.pinned {
            self.retries.not_ready = NOT_READY_RETRIES_PAGING;
        }
        self.pair.connect(&answer.endpoint, self.retries)?;
        let requests = (0..IN_FLIGHT_MAX).map(|_| Request {
            page: 0,
            pages: 0,
            state: RequestState::Idle,
        });
        Ok(Lane {
            pair: self.pair,
            staging: self.staging,
            queue: self.queue,
            memory: answer.memory,
            room: Room::new(self.pages),
            requests: requests.collect(),
            batch: Batch::new(self.entries, answer.memory.key),
            writes: VecDeque::with_capacity(IN_FLIGHT_MAX),
            unflushed: 0,
            written_end: 0,
            flush_page: self.writes.then_some(self.pages),
            outstanding: 0,
            active: 0,
            depth: self.depth,
            retries: self.retries,
            waiting: self.waiting,
            taken: Taken::new(),
            progress: Instant::now(),
            revoked: Arc::default(),
            failed: false,
            _session: session,
        })
    }
}

impl Lane {
    /// Creates this end of a lane.
    pub fn prepare(config: &LaneConfig) -> Result<NewLane, RdmaError> {
        let domain = ProtectionDomain::own(&config.device)?;
        let depth = config.depth.clamp(1, IN_FLIGHT_MAX);
        let (entries, flush_pages) = if config.writes {
            (ENTRIES_PER_WRITE * depth, 1)
        } else {
            (depth, 0)
        };
        let queue = CompletionQueue::with_events(&config.device, entries)?;
        let pair = QueuePair::new(
            &domain,
            &queue,
            &config.route,
            entries,
            Access::Local,
            &config.peer,
        )?;
        Ok(NewLane {
            pair,
            staging: Staging::new(&domain, config.pages + flush_pages)?,
            queue,
            pages: config.pages,
            writes: config.writes,
            entries,
            depth,
            retries: config.retries,
            waiting: config.waiting,
        })
    }
}
