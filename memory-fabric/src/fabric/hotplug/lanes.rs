//! The threads of the pager take up the transports of a donor, and let go of them.

use super::Inner;
use crate::pager::lanes::LaneChange;
use crate::transport::PageTransport;
use crate::transport::vacant::Vacant;
use crate::wire::TrafficClass;
use crossbeam_channel::bounded;
use std::time::Duration;

/// How long a thread of the pager may take to take note of a transport.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(2);

impl Inner {
    pub(super) fn bell(&self, class: TrafficClass) -> &vmm_sys_util::eventfd::EventFd {
        match class {
            TrafficClass::Urgent => &self.shared.fault_wake,
            TrafficClass::Bulk => &self.shared.evict_wake,
            _ => self.shared.prefetch_bell.descriptor(),
        }
    }

    /// Gives a thread of the pager another transport; gives what it had. `None` when it does not
    /// take it in time, or has ended.
    pub(super) fn change(
        &self,
        donor: usize,
        class: TrafficClass,
        transport: Box<dyn PageTransport>,
    ) -> Option<Box<dyn PageTransport>> {
        let (_, lane) = self.lanes.iter().find(|(of, _)| *of == class)?;
        let (replaced, before) = bounded(1);
        let change = LaneChange {
            donor,
            transport,
            replaced,
        };
        lane.send_timeout(change, CHANGE_TIME_MAX).ok()?;
        // A full counter rings as well.
        let _ = self.bell(class).write(1);
        before.recv_timeout(CHANGE_TIME_MAX).ok()
    }

    pub(super) fn vacate(&self, donor: usize) {
        for &(class, _) in &self.lanes {
            // Dropped here, which closes its connection.
            drop(self.change(donor, class, Box::new(Vacant)));
        }
    }
}

pub(super) fn lane_of(class: TrafficClass) -> usize {
    match class {
        TrafficClass::Urgent => 0,
        TrafficClass::Bulk => 1,
        _ => 2,
    }
}
