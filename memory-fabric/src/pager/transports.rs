//! The transports of a pager thread, one per donor. While the thread runs, the transport of a
//! donor that joins replaces a vacant one, and the transport of a donor that leaves is removed.

use crate::transport::PageTransport;
use crate::transport::vacant::Vacant;
use crossbeam_channel::Sender;

/// Replaces the transport to a donor.
#[derive(Debug)]
pub(crate) struct TransportChange {
    pub donor: usize,
    /// Whether the change waits until no request to the donor is outstanding.
    pub when_idle: bool,
    pub transport: Box<dyn PageTransport>,
    /// Receives the previous transport: dropping it may take long, so the pager thread does not.
    pub replaced: Sender<Box<dyn PageTransport>>,
}

impl TransportChange {
    /// Returns whether the change has to wait.
    pub(super) fn is_early(&self, transports: &[Box<dyn PageTransport>]) -> bool {
        let transport = transports.get(self.donor);
        self.when_idle && transport.is_some_and(|transport| transport.in_flight() > 0)
    }

    /// Puts the transport in its place among those of a thread.
    pub(super) fn apply(self, transports: &mut Vec<Box<dyn PageTransport>>) {
        while transports.len() <= self.donor {
            transports.push(Box::new(Vacant));
        }
        let previous = std::mem::replace(&mut transports[self.donor], self.transport);
        // A requester that timed out has dropped its receiver, which is not an error.
        let _ = self.replaced.try_send(previous);
    }
}
