//! What a donor has done for sure: fences, and pages that it drops, for who reads its memory by other
//! means too.

use super::{Payload, TcpTransport};
use crate::Ticket;
use fabric_wire::FrameKind;

impl TcpTransport {
    /// Sends a fence before all that is posted from here on, unless one is under way already.
    #[inline]
    pub(crate) fn post_fence(&mut self) {
        if self.fences == 0 {
            let posted = self.post(Ticket(0), FrameKind::Fence, 0, Payload::None);
            posted.expect("there is a place for it");
            self.fences = 1;
        }
    }

    /// Whether a fence has not been answered yet.
    #[inline]
    pub(crate) fn is_fencing(&self) -> bool {
        self.fences > 0
    }

    /// Whether the donor was told to drop pages, and may not have done so yet.
    #[inline]
    pub(crate) fn is_dropping(&self) -> bool {
        self.drops > 0
    }
}
