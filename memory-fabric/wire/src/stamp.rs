//! The sender of a frame, and its epoch of the VM's home table.
//!
//! A frame is stamped when it is sent, and again when it is repeated on another connection. The
//! epoch may advance while frames are in transit, so a donor does not require the newest one: the
//! epoch of a request is at least that in which its connection was made ([`Attached::check`]). An
//! answer repeats the epoch of its request, and has the donor's id ([`Frame::check_answer`]).

use crate::{AttachRequest, Frame, Token, TrafficClass, WireError};
use fabric_homes::{LocalNode, NodeId};

/// Sender and epoch of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stamp {
    /// The sending node.
    pub node: NodeId,
    /// The epoch of the home table to which its pages belong; an answer has that of its request.
    pub epoch: u64,
}

impl Stamp {
    /// The stamp of frames without pages. Tables start with epoch 1.
    pub const NONE: Self = Self {
        node: NodeId(0),
        epoch: 0,
    };
}

/// Both ends of the connections to a donor, from the VM's view.
#[derive(Clone, Debug)]
pub struct Ends {
    /// This node.
    pub local: LocalNode,
    /// The donor.
    pub donor: NodeId,
}

impl Ends {
    /// Returns the stamp of a frame that is sent now.
    #[inline]
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        Stamp {
            node: self.local.id(),
            epoch: self.local.epoch(),
        }
    }

    /// Returns the first request of a connection that is made now.
    #[must_use]
    pub fn attach(&self, token: Token, class: TrafficClass) -> AttachRequest {
        let Stamp { node, epoch } = self.stamp();
        AttachRequest {
            token,
            class,
            node,
            donor: self.donor,
            epoch,
        }
    }
}

/// A page connection, from its donor's view.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attached {
    /// The peer.
    node: NodeId,
    /// The donor's id for the peer.
    donor: NodeId,
    /// The epoch in which the connection was made.
    epoch: u64,
    /// The newest epoch of a request.
    newest: u64,
}

impl Attached {
    /// Creates the state of a connection that starts with this request.
    #[must_use]
    pub fn new(request: &AttachRequest) -> Self {
        Self {
            node: request.node,
            donor: request.donor,
            epoch: request.epoch,
            newest: request.epoch,
        }
    }

    /// Checks a request; returns the stamp of its answer.
    ///
    /// # Errors
    ///
    /// [`WireError::Sender`] and [`WireError::StaleEpoch`].
    #[inline]
    pub fn check(&mut self, request: &Frame) -> Result<Stamp, WireError> {
        let kind = request.kind;
        let Stamp { node, epoch } = request.stamp;
        if node != self.node {
            return Err(WireError::Sender {
                kind,
                found: node,
                expected: self.node,
            });
        }
        if epoch < self.epoch {
            return Err(WireError::StaleEpoch {
                kind,
                found: epoch,
                current: self.epoch,
            });
        }
        self.newest = self.newest.max(epoch);
        Ok(self.stamp(epoch))
    }

    /// Returns the stamp of the answer that accepts the connection.
    #[must_use]
    pub fn accepted(&self) -> Stamp {
        self.stamp(self.epoch)
    }

    /// Returns the newest epoch of a request, or that in which the connection was made.
    #[must_use]
    pub fn newest_epoch(&self) -> u64 {
        self.newest
    }

    fn stamp(&self, epoch: u64) -> Stamp {
        Stamp {
            node: self.donor,
            epoch,
        }
    }
}
