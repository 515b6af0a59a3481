//! Events of the links of a guest's start, until their donor has been drained.

use crate::fabric::{FabricEvent, FabricObserver};
use crate::homes::NodeId;
use crate::link::LinkEvent;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock};

/// The loss of a donor.
#[derive(Clone, Debug)]
pub(super) struct Loss {
    pub node: NodeId,
    /// Why it is lost.
    pub reason: String,
    /// Whether it was reported as unreachable.
    pub was_down: bool,
    /// Whether it held memory of the guest.
    pub is_used: bool,
}

impl Loss {
    /// Returns the event that ends the VM.
    pub fn event(self) -> FabricEvent {
        let Self { node, reason, .. } = self;
        FabricEvent::Link(LinkEvent::Lost { node, reason })
    }
}

/// What events of a donor depend on.
struct Handlers {
    /// Returns whether a donor holds memory of the guest.
    is_used: Box<dyn Fn(NodeId) -> bool + Send + Sync>,
    /// Handles the loss of a donor.
    on_lost: Box<dyn Fn(Loss) + Send + Sync>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Donors that were last reported as unreachable.
    down: HashSet<NodeId>,
    /// Donors that hold nothing any more, or were lost.
    ignored: HashSet<NodeId>,
}

/// Passes on events of links, except those of donors that hold nothing, or nothing any more.
#[derive(Clone)]
pub(in crate::fabric) struct BootEvents {
    observer: FabricObserver,
    seen: Arc<Mutex<Seen>>,
    /// Set when the memory has its homes.
    handlers: Arc<OnceLock<Handlers>>,
}

impl BootEvents {
    pub fn new(observer: &FabricObserver) -> Self {
        Self {
            observer: Arc::clone(observer),
            seen: Arc::default(),
            handlers: Arc::default(),
        }
    }

    /// Handles losses by `on_lost` instead of passing them on, and does not report that a donor is
    /// unreachable of which nothing `is_used` at that time.
    pub(super) fn handle(
        &self,
        is_used: impl Fn(NodeId) -> bool + Send + Sync + 'static,
        on_lost: impl Fn(Loss) + Send + Sync + 'static,
    ) {
        let _ = self.handlers.set(Handlers {
            is_used: Box::new(is_used),
            on_lost: Box::new(on_lost),
        });
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
        let handlers = self.handlers.get();
        let is_used = handlers.is_none_or(|handlers| (handlers.is_used)(node));
        match (event, handlers) {
            (LinkEvent::Down { .. }, _) if !is_used => {}
            // Of one that was not reported as unreachable.
            (LinkEvent::Up { .. }, _) if !seen.down.remove(&node) => {}
            (LinkEvent::Lost { reason, .. }, Some(handlers)) => {
                let was_down = seen.down.remove(&node);
                (handlers.on_lost)(Loss {
                    node,
                    reason,
                    was_down,
                    is_used,
                });
            }
            (event, _) => {
                if matches!(event, LinkEvent::Down { .. }) {
                    seen.down.insert(node);
                }
                (self.observer)(FabricEvent::Link(event));
            }
        }
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

    #[test]
    fn only_a_donor_that_is_used_is_an_outage_and_each_loss_is_handled() {
        let (sender, events) = channel();
        let lost = sender.clone();
        let sink: FabricObserver =
            Arc::new(move |event| sender.send(format!("{event:?}")).expect("a receiver"));
        let boot_events = BootEvents::new(&sink);
        boot_events.handle(
            |node| node == NodeId(1),
            move |loss| lost.send(format!("{loss:?}")).expect("a receiver"),
        );
        let observer = boot_events.observer();
        for node in [1, 2].map(NodeId) {
            let reason = || "cut".to_owned();
            let down = || LinkEvent::Down {
                node,
                reason: reason(),
            };
            observer(FabricEvent::Link(down()));
            observer(FabricEvent::Link(LinkEvent::Up { node }));
            observer(FabricEvent::Link(down()));
            observer(FabricEvent::Link(LinkEvent::Lost {
                node,
                reason: reason(),
            }));
        }
        drop((observer, boot_events, sink));
        let seen: Vec<_> = events.iter().collect();
        let wanted = [
            "Down",
            "Up",
            "Down",
            "was_down: true, is_used: true",
            "was_down: false, is_used: false",
        ];
        assert_eq!(seen.len(), wanted.len(), "{seen:?}");
        let mut both = seen.iter().zip(wanted);
        assert!(both.all(|(seen, wanted)| seen.contains(wanted)), "{seen:?}");
    }
}
