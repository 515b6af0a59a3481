//! Who sends a frame, and in which epoch of the VM's home table.
//!
//! A frame is stamped when it is sent, and once more when it is sent again on another connection.
//! The epoch may advance while frames travel, so a donor does not demand the newest one: requests
//! of a connection are at least of the epoch in which the connection was made
//! ([`Attached::check`]). An answer repeats the epoch of its request, and has the donor's id
//! ([`Frame::check_answer`]).

use crate::{AttachRequest, Frame, Token, TrafficClass, WireError};
use fabric_homes::{LocalNode, NodeId};

/// What a frame says of its sender.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stamp {
    /// The node that sends it.
    pub node: NodeId,
    /// The epoch of the home table in which it names pages; an answer has that of its request.
    pub epoch: u64,
}

impl Stamp {
    /// That of frames which name no page. Tables begin with epoch 1.
    pub const NONE: Self = Self {
        node: NodeId(0),
        epoch: 0,
    };
}

/// Both ends of the connections to a donor, as the VM knows them.
#[derive(Clone, Debug)]
pub struct Ends {
    /// This node.
    pub local: LocalNode,
    /// The donor.
    pub donor: NodeId,
}

impl Ends {
    /// What is on a frame that is sent now.
    #[inline]
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        Stamp {
            node: self.local.id(),
            epoch: self.local.epoch(),
        }
    }

    /// What a connection begins with that is made now.
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

/// A connection for pages, as its donor knows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attached {
    /// The node at the other end.
    node: NodeId,
    /// What that one calls the donor.
    donor: NodeId,
    /// The epoch in which the connection was made.
    epoch: u64,
    /// The newest epoch of a request.
    newest: u64,
}

impl Attached {
    /// A connection that begins with this request.
    #[must_use]
    pub fn new(request: &AttachRequest) -> Self {
        Self {
            node: request.node,
            donor: request.donor,
            epoch: request.epoch,
            newest: request.epoch,
        }
    }

    /// Checks a request; gives what is on its answer.
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

    /// What is on the answer that accepts the connection.
    #[must_use]
    pub fn accepted(&self) -> Stamp {
        self.stamp(self.epoch)
    }

    /// The newest epoch of a request, or that in which the connection was made.
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
