//! Requests whose execution must be certain: fences, and drops of pages, for users that also access
//! the donor's memory by other means.

use super::{Payload, TcpTransport};
use crate::Ticket;
use fabric_wire::FrameKind;

impl TcpTransport {
    /// Sends a fence before all later requests, unless one is outstanding already.
    #[inline]
    pub(crate) fn post_fence(&mut self) {
        if self.fences == 0 {
            let posted = self.post(Ticket(0), FrameKind::Fence, 0, Payload::None);
            posted.expect("there is a place for it");
            self.fences = 1;
        }
    }

    /// Returns whether a fence is outstanding.
    #[inline]
    pub(crate) fn is_fencing(&self) -> bool {
        self.fences > 0
    }

    /// Returns whether drops are outstanding.
    #[inline]
    pub(crate) fn is_dropping(&self) -> bool {
        self.drops > 0
    }
}
