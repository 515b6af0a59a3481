//! What arrives from one peer: each message once, in the order of its lane, of this epoch.

use crate::message::Lane;
use crate::offence::Violation;

/// What travels before each message.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Header {
    /// The sender's epoch.
    pub epoch: u32,
    /// The message's place in its lane, from 0 in each epoch.
    pub sequence: u64,
}

/// What to do with a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Arrival {
    /// Handle it.
    Fresh,
    /// Drop it: it was handled before the connection was restored.
    Duplicate,
    /// Drop it: it was sent before the peer learned of this epoch.
    Stale,
}

#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
struct Progress {
    epoch: u32,
    next: u64,
}

/// The lanes from one peer. A peer repeats what was not confirmed when a connection is restored, so
/// that a lane continues where it was, or a little before. A transport may have more lanes than the
/// protocol.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Inbox<const LANES: usize = { Lane::ALL.len() }> {
    epoch: u32,
    lanes: [Progress; LANES],
}

impl<const LANES: usize> Inbox<LANES> {
    /// The lanes of an epoch, before their first messages.
    #[must_use]
    pub fn new(epoch: u32) -> Self {
        let progress = Progress { epoch: 0, next: 0 };
        Self {
            epoch,
            lanes: [progress; LANES],
        }
    }

    /// This node moves to a later epoch.
    pub fn set_epoch(&mut self, epoch: u32) {
        self.epoch = self.epoch.max(epoch);
    }

    /// The sequence number that the lane continues with.
    #[must_use]
    pub fn expected(&self, lane: impl Into<usize>) -> u64 {
        self.lanes[lane.into()].next
    }

    /// A lane that was received up to a message before.
    #[cfg(test)]
    pub(crate) fn resume(&mut self, lane: Lane, next: u64) {
        self.lanes[usize::from(lane)].next = next;
    }

    /// Compares a message's header with what came before on its lane.
    ///
    /// # Errors
    /// When the peer skipped messages, went back to an epoch, or invented one.
    pub fn accept(&mut self, lane: impl Into<usize>, header: Header) -> Result<Arrival, Violation> {
        let progress = &mut self.lanes[lane.into()];
        let Header { epoch, sequence } = header;
        if epoch > self.epoch {
            let current = self.epoch;
            return Err(Violation::FutureEpoch {
                current,
                found: epoch,
            });
        }
        if epoch < progress.epoch {
            return Err(Violation::OldEpoch {
                seen: progress.epoch,
                found: epoch,
            });
        }
        if epoch < self.epoch {
            return Ok(Arrival::Stale);
        }
        let expected = if epoch > progress.epoch {
            0
        } else {
            progress.next
        };
        if sequence > expected {
            return Err(Violation::Gap {
                expected,
                found: sequence,
            });
        }
        progress.epoch = epoch;
        if sequence < expected {
            return Ok(Arrival::Duplicate);
        }
        progress.next = expected + 1;
        Ok(Arrival::Fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(epoch: u32, sequence: u64) -> Header {
        Header { epoch, sequence }
    }

    #[test]
    fn repeated_messages_are_dropped_and_skipped_ones_are_an_offence() {
        let mut inbox = <Inbox>::new(3);
        let mut accept = |sequence| inbox.accept(Lane::Data, header(3, sequence));
        assert_eq!(accept(0), Ok(Arrival::Fresh));
        assert_eq!(accept(1), Ok(Arrival::Fresh));
        assert_eq!(accept(0), Ok(Arrival::Duplicate));
        assert_eq!(accept(1), Ok(Arrival::Duplicate));
        let gap = Violation::Gap {
            expected: 2,
            found: 3,
        };
        assert_eq!(accept(3), Err(gap));
        assert_eq!(accept(2), Ok(Arrival::Fresh));
        let other = inbox.accept(Lane::Requests, header(3, 0));
        assert_eq!(other, Ok(Arrival::Fresh), "lanes count on their own");
    }

    #[test]
    fn a_peer_moves_to_a_new_epoch_once_and_does_not_return() {
        let mut inbox = <Inbox>::new(0);
        let lane = Lane::Requests;
        assert_eq!(inbox.accept(lane, header(0, 0)), Ok(Arrival::Fresh));
        let future = Violation::FutureEpoch {
            current: 0,
            found: 1,
        };
        assert_eq!(inbox.accept(lane, header(1, 0)), Err(future));
        inbox.set_epoch(1);
        assert_eq!(inbox.accept(lane, header(0, 1)), Ok(Arrival::Stale));
        assert_eq!(inbox.accept(lane, header(1, 0)), Ok(Arrival::Fresh));
        let old = Violation::OldEpoch { seen: 1, found: 0 };
        assert_eq!(inbox.accept(lane, header(0, 2)), Err(old));
    }
}
