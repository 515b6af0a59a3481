//! A lane before its peer is known.

use super::super::RdmaError;
use super::super::messages::ConnectAnswer;
use super::{Lane, Request, RequestState, WRITING_QUEUE_ENTRIES};
use crate::IN_FLIGHT_MAX;
use fabric_verbs::batch::Batch;
use fabric_verbs::device::{Device, Route};
use fabric_verbs::endpoint::Endpoint;
use fabric_verbs::memory::{Access, ProtectionDomain};
use fabric_verbs::pair::{NOT_READY_RETRIES, NOT_READY_RETRIES_PAGING, QueuePair};
use fabric_verbs::queue::{CompletionQueue, Taken};
use fabric_verbs::room::Room;
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
        let retries = if answer.memory.pinned {
            NOT_READY_RETRIES
        } else {
            NOT_READY_RETRIES_PAGING
        };
        self.pair.connect(&answer.endpoint, retries)?;
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
        let (entries, flush_pages) = if config.writes {
            (WRITING_QUEUE_ENTRIES, 1)
        } else {
            (IN_FLIGHT_MAX, 0)
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
        })
    }
}
