//! The interface between a transport and the link that makes its connections.

use crate::stream::Stream;
use crossbeam_channel::{Receiver, Sender};
use fabric_wire::{Ends, ErrorMessage, TrafficClass, WireError};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest time without an answer to a request, after which the connection counts as dead, even if
/// other requests are answered.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest sleep of a thread while requests are outstanding: then it checks for stalled connections.
pub const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Why a page connection is unusable.
#[derive(Debug, thiserror::Error)]
pub enum Outage {
    /// There was no connection yet.
    #[error("not connected yet")]
    Initial,
    /// It broke.
    #[error("connection broke: {0}")]
    Stream(#[source] io::Error),
    /// A request was not answered in time.
    #[error("a request was not answered within {} s", STALL_TIMEOUT.as_secs())]
    Stalled,
    /// The donor violated the protocol.
    #[error("donor does not keep to the protocol: {0}")]
    Protocol(#[source] WireError),
    /// The donor refused a request.
    #[error("donor refuses: {}", .0.text)]
    Refused(ErrorMessage),
}

/// A request to the thread of a link.
#[derive(Debug)]
pub enum LinkRequest {
    /// Requests a new connection of a class, since the existing one failed.
    Connection(TrafficClass, Outage),
    /// Stops the thread.
    Stop,
}

/// The link's interface for a transport.
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
    /// Creates a port for one class of connections between `ends`: they arrive through
    /// `connections`, new ones are requested through `requests`, and completed requests are counted
    /// in `completed`.
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

    /// Returns the ends of its connections.
    #[must_use]
    pub fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Counts a completed request, which shows that the connection works.
    pub fn note_progress(&self) {
        // Relaxed: a count that the link compares with an earlier one.
        self.completed.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the newest connection, if there is a new one.
    #[must_use]
    pub fn take_connection(&self) -> Option<Stream> {
        self.connections.try_iter().last()
    }

    /// Requests a new connection, since the existing one failed.
    pub fn request_connection(&self, why: Outage) {
        // If the channel is full or closed, the link knows already, or is stopping.
        let request = LinkRequest::Connection(self.class, why);
        let _ = self.requests.try_send(request);
    }
}
