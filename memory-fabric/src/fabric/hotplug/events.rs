//! Events of the links of donors that joined.

use super::super::{FabricEvent, FabricObserver};
use super::Inner;
use crate::link::LinkEvent;
use std::sync::{Arc, Weak};

impl Inner {
    /// Returns the observer for a donor that joined: its events concern the guest only while memory
    /// of the donor is used.
    pub(super) fn observer_of(self: &Arc<Self>, donor: usize) -> FabricObserver {
        let inner = Arc::downgrade(self);
        let observer = Arc::clone(&self.observer);
        Arc::new(move |event| match (Weak::upgrade(&inner), event) {
            (Some(inner), FabricEvent::Link(event)) => inner.take_event(donor, event),
            (_, event) => observer(event),
        })
    }

    pub(super) fn take_event(self: &Arc<Self>, donor: usize, event: LinkEvent) {
        let node = self.node_of(donor);
        let mut state = self.lock();
        let used = self.is_used(&state, donor);
        let joiner = &mut state.joiners[self.joiner_of(donor)];
        let is_lost = matches!(event, LinkEvent::Lost { .. });
        let (usable, reported) = match event {
            LinkEvent::Down { .. } => {
                joiner.away = true;
                joiner.reported_down |= used;
                (false, used.then_some(event))
            }
            LinkEvent::Up { .. } => {
                joiner.away = false;
                let was_reported = std::mem::take(&mut joiner.reported_down);
                (true, was_reported.then_some(event))
            }
            LinkEvent::Lost { ref reason, .. } => {
                joiner.lost = true;
                if !used {
                    joiner.unreported_loss = Some(reason.clone());
                    tracing::warn!("{node}, of which nothing is used, is lost: {reason}");
                }
                (false, used.then_some(event))
            }
        };
        state.pools.set_usable(node, usable);
        let news = state.news.clone();
        drop(state);
        if is_lost {
            self.announce_loss(news.as_ref());
        }
        if let Some(event) = reported {
            (self.observer)(FabricEvent::Link(event));
        } else if !usable {
            self.disconnect_lost(donor);
        }
    }
}
