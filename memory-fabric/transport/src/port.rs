//! The interface between a transport and the link that makes its connections.

use crate::stream::Stream;
use crossbeam_channel::{Receiver, Sender};
use fabric_wire::{Ends, ErrorMessage, TrafficClass, WireError};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A connection on which a request stays unanswered for so long is taken for dead, also when other
/// requests are answered.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a page connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum Outage {
    /// There was none yet.
    #[error("not connected yet")]
    Initial,
    /// It broke.
    #[error("connection broke: {0}")]
    Stream(#[source] io::Error),
    /// A request was not answered within the time that is allowed.
    #[error("a request was not answered within {} s", STALL_TIMEOUT.as_secs())]
    Stalled,
    /// The donor broke the protocol.
    #[error("donor does not keep to the protocol: {0}")]
    Protocol(#[source] WireError),
    /// The donor refused a request.
    #[error("donor refuses: {}", .0.text)]
    Refused(ErrorMessage),
}

/// What the thread of a link is asked for.
#[derive(Debug)]
pub enum LinkRequest {
    /// A new connection of a class, since the one there was failed.
    Connection(TrafficClass, Outage),
    /// To end.
    Stop,
}

/// The end of a link in the hands of a transport.
#[derive(Debug)]
pub struct LinkPort {
    class: TrafficClass,
    ends: Ends,
    requests: Sender<LinkRequest>,
    connections: Receiver<Stream>,
    /// Requests completed on all connections of this port.
    completed: Arc<AtomicU64>,
}

impl LinkPort {
    /// A port for one class of connections between `ends`: they come from `connections`, new ones
    /// are requested by `requests`, and completed requests are counted in `completed`.
    #[must_use]
    pub fn new(
        class: TrafficClass,
        ends: Ends,
        requests: Sender<LinkRequest>,
        connections: Receiver<Stream>,
        completed: Arc<AtomicU64>,
    ) -> Self {
        Self {
            class,
            ends,
            requests,
            connections,
            completed,
        }
    }

    /// The ends of its connections.
    #[must_use]
    pub fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Counts a completed request: the connection works.
    pub fn note_progress(&self) {
        // Relaxed: a count that the link compares with an earlier one.
        self.completed.fetch_add(1, Ordering::Relaxed);
    }

    /// The newest connection, if there is a new one.
    #[must_use]
    pub fn take_connection(&self) -> Option<Stream> {
        self.connections.try_iter().last()
    }

    /// Requests a new connection, since the one there was failed.
    pub fn request_connection(&self, why: Outage) {
        // Full or closed: the link knows already, or ends.
        let request = LinkRequest::Connection(self.class, why);
        let _ = self.requests.try_send(request);
    }
}
