//! Events of the links of a guest's start, until their donor has been drained.

use crate::fabric::{FabricEvent, FabricObserver};
use crate::homes::NodeId;
use crate::link::LinkEvent;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock};

/// Handles the loss of a donor: its node, why it is lost, and whether it was reported as
/// unreachable.
type OnLost = Box<dyn Fn(NodeId, String, bool) + Send + Sync>;

#[derive(Debug, Default)]
struct Seen {
    /// Donors that were last reported as unreachable.
    down: HashSet<NodeId>,
    /// Donors that hold nothing any more.
    ignored: HashSet<NodeId>,
}

/// Passes on events of links, except those of donors that hold nothing any more.
#[derive(Clone)]
pub(in crate::fabric) struct BootEvents {
    observer: FabricObserver,
    seen: Arc<Mutex<Seen>>,
    /// Where it is set, the VM survives the loss of a donor.
    on_lost: Arc<OnceLock<OnLost>>,
}

impl BootEvents {
    pub fn new(observer: &FabricObserver) -> Self {
        Self {
            observer: Arc::clone(observer),
            seen: Arc::default(),
            on_lost: Arc::default(),
        }
    }

    /// Handles losses by this function instead of passing them on.
    pub fn handle_losses(&self, handle: impl Fn(NodeId, String, bool) + Send + Sync + 'static) {
        let _ = self.on_lost.set(Box::new(handle));
    }

    /// Returns the observer for the links.
    pub fn observer(&self) -> FabricObserver {
        let events = self.clone();
        Arc::new(move |event| match event {
            FabricEvent::Link(event) => events.take(event),
            event => (events.observer)(event),
        })
    }

    fn take(&self, event: LinkEvent) {
        let node = event.node();
        // Passed on in the order of the changes, so with the lock.
        let mut seen = fabric_host::lock(&self.seen);
        if seen.ignored.contains(&node) {
            return;
        }
        let was_down = match event {
            LinkEvent::Down { .. } => !seen.down.insert(node),
            _ => seen.down.remove(&node),
        };
        if let (LinkEvent::Lost { reason, .. }, Some(handle)) = (&event, self.on_lost.get()) {
            return handle(node, reason.clone(), was_down);
        }
        (self.observer)(FabricEvent::Link(event));
    }

    /// From now on nothing depends on a donor.
    pub fn ignore(&self, node: NodeId) {
        let mut seen = fabric_host::lock(&self.seen);
        seen.ignored.insert(node);
        if seen.down.remove(&node) {
            (self.observer)(FabricEvent::Link(LinkEvent::Up { node }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_donor_that_holds_nothing_is_no_outage_any_more() {
        let (sender, events) = channel();
        let sink: FabricObserver = Arc::new(move |event| sender.send(event).expect("a receiver"));
        let boot_events = BootEvents::new(&sink);
        let observer = boot_events.observer();
        let down = |node| {
            FabricEvent::Link(LinkEvent::Down {
                node: NodeId(node),
                reason: "cut".into(),
            })
        };
        let lost = |node| {
            FabricEvent::Link(LinkEvent::Lost {
                node: NodeId(node),
                reason: "killed".into(),
            })
        };
        observer(down(1));
        boot_events.ignore(NodeId(1));
        observer(lost(1));
        boot_events.ignore(NodeId(2));
        observer(down(2));
        observer(lost(3));
        drop((observer, boot_events, sink));
        let seen: Vec<_> = events.iter().map(|event| format!("{event:?}")).collect();
        assert_eq!(seen.len(), 3, "{seen:?}");
        assert!(seen[0].contains("Down") && seen[1].contains("Up") && seen[2].contains("Lost"));
    }
}
