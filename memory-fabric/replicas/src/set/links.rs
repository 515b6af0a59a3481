//! What the links to donors report, and whether the guest waits for one of them.
//!
//! It waits for a donor that is unreachable and has what no other in use has. That ends when the donor
//! is back, when others have got what only it had, and when nothing is left of it here. Whatever
//! changes who has what calls [`ReplicaSet::settle_links`], so that no wait outlasts its reason, and no
//! donor that is unreachable is in use without one.

use super::{Loss, ReplicaEvent, ReplicaSet};
use crate::copies::Spared;
use fabric_host::lock;

/// State of a donor's link.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkState {
    /// Why the donor is unreachable, if it is.
    down: Option<String>,
    /// Whether the guest waits for it.
    awaited: bool,
}

impl ReplicaSet {
    /// A donor is unreachable. Returns whether the guest has to wait for it.
    pub fn down(&self, donor: usize, reason: &str) -> bool {
        lock(&self.links)[donor].down = Some(reason.to_owned());
        self.settle_link(donor);
        lock(&self.links)[donor].awaited
    }

    /// A donor is back. Returns whether the guest waited for it.
    pub fn up(&self, donor: usize) -> bool {
        let mut links = lock(&self.links);
        links[donor].down = None;
        let was_awaited = std::mem::take(&mut links[donor].awaited);
        if was_awaited {
            (self.observer)(ReplicaEvent::Back { donor });
        }
        drop(links);
        self.wake();
        was_awaited
    }

    /// The memory of a donor is lost.
    pub fn lost(&self, donor: usize, reason: &str) -> Loss {
        lock(&self.links)[donor].down = Some(reason.to_owned());
        match self.expel(donor, Spared::Blocks, reason) {
            true => {
                let was_awaited = self.end_wait(donor, &mut lock(&self.links)[donor]);
                Loss::OfCopies { was_awaited }
            }
            false => {
                // The VM ends.
                lock(&self.links)[donor].awaited = true;
                Loss::OfBlocks
            }
        }
    }

    pub(crate) fn is_down(&self, donor: usize) -> bool {
        lock(&self.links)[donor].down.is_some()
    }

    /// Forgets what the link of the last donor in a place reported.
    pub(super) fn forget_link(&self, donor: usize) {
        lock(&self.links)[donor] = LinkState::default();
    }

    /// Ends the use of donors that are unreachable, and waits for those without which the guest
    /// cannot continue.
    pub(crate) fn settle_links(&self) {
        let donors = lock(&self.links).len();
        (0..donors).for_each(|donor| self.settle_link(donor));
    }

    fn settle_link(&self, donor: usize) {
        // With the lock, so that what is reported is in the order of the changes.
        let mut links = lock(&self.links);
        let link = &mut links[donor];
        let Some(reason) = link.down.clone() else {
            return;
        };
        match self.copies.exclude(Self::id(donor)) {
            Ok(was_used) => {
                self.end_wait(donor, link);
                drop(links);
                self.note_out(donor, was_used, &reason);
            }
            Err(_) if !link.awaited => {
                link.awaited = true;
                (self.observer)(ReplicaEvent::Awaited { donor, reason });
            }
            Err(_) => {}
        }
    }

    /// Returns whether the guest waited for a donor, which it does no longer.
    fn end_wait(&self, donor: usize, link: &mut LinkState) -> bool {
        let was_awaited = std::mem::take(&mut link.awaited);
        if was_awaited {
            (self.observer)(ReplicaEvent::AwaitedNoMore { donor });
        }
        was_awaited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copies::Copies;
    use crate::placement::Place;
    use std::sync::{Arc, Mutex};

    type Events = Arc<Mutex<Vec<ReplicaEvent>>>;

    /// A block on donors 0 and 1, and one on 1 and 2.
    fn set() -> (ReplicaSet, Events) {
        let place = |donor, slot| Place { donor, slot };
        let places = [[place(0, 0), place(1, 0)], [place(1, 1), place(2, 0)]];
        let copies = Copies::new(&places, &[2, 2, 2], &[1, 2, 1], &[0, 1, 2]);
        let events = Events::default();
        let seen = Arc::clone(&events);
        let observer = move |event| lock(&seen).push(event);
        (ReplicaSet::new(copies, 3, Box::new(observer)), events)
    }

    fn awaited(donor: usize) -> ReplicaEvent {
        ReplicaEvent::Awaited {
            donor,
            reason: "cut".to_owned(),
        }
    }

    fn degraded(donor: usize) -> ReplicaEvent {
        ReplicaEvent::Degraded {
            donor,
            reason: "cut".to_owned(),
        }
    }

    fn new(events: &Events) -> Vec<ReplicaEvent> {
        std::mem::take(&mut lock(events))
    }

    #[test]
    fn the_guest_waits_for_a_donor_until_others_have_what_only_it_had() {
        let (set, events) = set();
        assert!(!set.down(0, "cut"));
        assert!(set.down(1, "cut"), "donor 0 does not answer either");
        assert!(set.down(1, "cut"));
        assert_eq!(new(&events), [degraded(0), awaited(1)]);
        set.settle_links();
        assert_eq!(new(&events), []);
        // The first one is back, and has missed nothing.
        assert!(!set.up(0));
        assert!(set.copies().readmit(0));
        set.note_readmitted();
        let end = ReplicaEvent::AwaitedNoMore { donor: 1 };
        assert_eq!(new(&events), [end, degraded(1)]);
        assert!(set.copies().is_out(1));
        assert!(!set.up(1), "nobody waits for it");
        assert_eq!(new(&events), []);
    }

    #[test]
    fn a_donor_that_goes_when_it_is_used_again_is_out_or_waited_for() {
        let (set, events) = set();
        assert!(!set.down(0, "cut"));
        // The thread that repairs has seen it before.
        assert!(set.copies().readmit(0));
        set.note_readmitted();
        assert!(set.copies().is_out(0));
        assert!(set.down(1, "cut"));
        new(&events);
        assert!(set.copies().readmit(0));
        set.note_readmitted();
        // One of them is: each has what the other has.
        let end = ReplicaEvent::AwaitedNoMore { donor: 1 };
        let all = new(&events);
        let is_out = [0, 1].map(|donor| set.copies().is_out(donor));
        match is_out {
            [true, false] => assert_eq!(all, [degraded(0)]),
            [false, true] => assert_eq!(all, [awaited(0), end, degraded(1)]),
            _ => panic!("{is_out:?}: {all:?}"),
        }
    }

    #[test]
    fn a_donor_that_is_lost_is_waited_for_no_more() {
        let (set, events) = set();
        assert!(!set.down(0, "cut"));
        assert!(set.down(1, "cut"));
        new(&events);
        assert!(!set.up(0));
        assert!(set.copies().readmit(0));
        assert_eq!(set.lost(1, "gone"), Loss::OfCopies { was_awaited: true });
        assert_eq!(new(&events)[1], ReplicaEvent::AwaitedNoMore { donor: 1 });
        // The VM ends without donor 2, which is no new wait.
        assert_eq!(set.lost(2, "gone"), Loss::OfBlocks);
        set.settle_links();
        assert_eq!(new(&events), []);
    }
}
