//! The transports of a thread of the pager. While it runs, that of a donor that joins comes into
//! a vacant place, and that of one that leaves is taken out.

use crate::transport::PageTransport;
use crate::transport::vacant::Vacant;
use crossbeam_channel::{Receiver, Sender, bounded};

/// Changes that wait, at the most: whoever sends one waits for its end.
const CHANGES_MAX: usize = 1;

/// A transport for the place of a donor.
#[derive(Debug)]
pub(crate) struct LaneChange {
    pub donor: usize,
    pub transport: Box<dyn PageTransport>,
    /// Takes what was there: dropping that may take long.
    pub replaced: Sender<Box<dyn PageTransport>>,
}

/// Where changes come from.
pub(crate) type LaneChanges = Receiver<LaneChange>;

/// The channel to one thread.
pub(crate) fn channel() -> (Sender<LaneChange>, LaneChanges) {
    bounded(CHANGES_MAX)
}

/// Makes the changes that have come; true when there were some.
pub(super) fn change(transports: &mut Vec<Box<dyn PageTransport>>, changes: &LaneChanges) -> bool {
    let mut changed = false;
    for change in changes.try_iter() {
        while transports.len() <= change.donor {
            transports.push(Box::new(Vacant));
        }
        let before = std::mem::replace(&mut transports[change.donor], change.transport);
        // That nobody waits for it any more is no error.
        let _ = change.replaced.try_send(before);
        changed = true;
    }
    changed
}
