//! The connection of a transport: taken from the link, returned when a request stays unanswered,
//! and replaced by another on which all outstanding requests are sent again.

use super::{Part, TcpTransport};
use crate::port::{Outage, STALL_TIMEOUT};
use std::time::Instant;

impl TcpTransport {
    /// Takes a new connection from the link.
    pub(super) fn adopt_connection(&mut self) {
        if let Some(stream) = self.port.take_connection() {
            match stream.set_nonblocking() {
                Ok(()) => {
                    self.stream = Some(stream);
                    self.sent = 0;
                    self.sent_bytes = 0;
                    self.filled = 0..0;
                    self.received = Instant::now();
                    self.measured = self.received;
                    self.overdue = self.posted.front().copied();
                    self.choice.interrupted();
                    // Not the epoch in which they were sent before, which the donor may refuse.
                    let stamp = self.port.ends().stamp();
                    for &index in &self.posted {
                        let slot = &mut self.slots[usize::from(index)];
                        slot.part = Part::default();
                        slot.since = self.received;
                        slot.encode(index, self.checksum, stamp);
                    }
                }
                Err(error) => self.port.request_connection(Outage::Stream(error)),
            }
        }
    }

    pub(super) fn disconnect(&mut self, why: Outage) {
        self.stream = None;
        self.port.request_connection(why);
    }

    /// Fails when the oldest request is outstanding for too long, whatever was received since.
    pub(super) fn check_oldest(&self) -> Result<(), Outage> {
        let oldest = self.posted.front().map(|&oldest| usize::from(oldest));
        match oldest {
            Some(oldest) if self.slots[oldest].since.elapsed() >= STALL_TIMEOUT => {
                Err(Outage::Stalled)
            }
            _ => Ok(()),
        }
    }

    /// Records that a request was completed, here or by other means: the donor works, unless it
    /// left an older request unanswered.
    #[inline]
    pub(crate) fn note_progress(&self) {
        if self.overdue.is_none() {
            self.port.note_progress();
        }
    }
}
