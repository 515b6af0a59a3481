//! Removes the transports of a leaving donor from the pager's threads.

use super::Inner;
use crate::transport::vacant::Vacant;
use crate::wire::TrafficClass;

impl Inner {
    /// Removes a donor's transports from all threads of the pager, each when its requests are
    /// answered. Requests that are not answered soon are served by the homes that their pages have
    /// now.
    pub(super) fn vacate(&self, donor: usize) {
        for &class in &self.classes {
            let port = self.shared.port_of(class);
            // Dropped here, which closes its connection.
            let vacated = port.vacate_when_idle(donor);
            if vacated.is_none() {
                drop(port.replace_transport(donor, Box::new(Vacant)));
            }
        }
    }
}

/// Returns the index of a class in the transports to one donor.
pub(super) fn place_of(class: TrafficClass) -> usize {
    match class {
        TrafficClass::Urgent => 0,
        TrafficClass::Bulk => 1,
        TrafficClass::Prefetch | TrafficClass::Probe => 2,
    }
}
