//! A donor of the guest's start is lost, or one that joined has sent pages that do not open.
//!
//! If it holds memory of the guest, the VM ends, or where the configuration says so, it continues
//! without the pages that only the donor had. A donor from which all blocks have moved just leaves.

use super::Inner;
use super::boot_events::Loss;
use crate::fabric::adapt::Change;
use crate::fabric::{FabricEvent, LostMemory, OnLostMemory};
use crate::link::LinkEvent;
use crate::pager::losses::sweep;
use crate::transport::vacant::Vacant;
use std::sync::Arc;

impl Inner {
    /// Handles losses of donors, except with copies, whose set does that.
    pub(super) fn handle_losses(self: &Arc<Self>) {
        if self.config.redundancy.is_some() {
            return;
        }
        // The events live as long as the links, which the state must not keep.
        let inner = Arc::downgrade(self);
        let of_uses = inner.clone();
        let is_used = move |node| {
            let inner = of_uses.upgrade();
            inner.is_none_or(|inner| inner.shared.homes.pages_at(node) > 0)
        };
        let observer = Arc::clone(&self.observer);
        let on_lost = move |loss: Loss| {
            let joined = inner.upgrade().and_then(|inner| {
                let link = inner.shared.nodes.link_to(loss.node)?;
                (link >= inner.shared.nodes.fixed()).then_some((inner, link))
            });
            if let Some((inner, link)) = joined {
                // By what it sent: its link reports other losses. The guest cannot do without memory
                // that was added.
                let Loss { node, reason, .. } = loss;
                inner.take_event(link, LinkEvent::Lost { node, reason });
                return;
            }
            let ends_vm = |inner: &Arc<Self>| loss.is_used && !inner.survives_losses();
            let inner = inner.upgrade().filter(|inner| !ends_vm(inner));
            let handled = inner.is_some_and(|inner| {
                let (of_thread, loss) = (Arc::clone(&inner), loss.clone());
                // On a thread of its own: the link's thread is needed by those of the pager.
                let thread = std::thread::Builder::new().name(format!("lost-{}", loss.node.0));
                let thread = thread.spawn(move || of_thread.handle_loss(loss)).ok();
                let is_started = thread.is_some();
                inner.lock().leaving.extend(thread);
                is_started
            });
            if !handled {
                observer(loss.event());
            }
        };
        self.boot_events.handle(is_used, on_lost);
    }

    /// Returns whether the VM continues without memory that was lost.
    fn survives_losses(&self) -> bool {
        self.config.on_lost_memory == OnLostMemory::Poison
    }

    fn handle_loss(&self, mut loss: Loss) {
        if !loss.is_used && self.leave_behind(&loss) {
            return;
        }
        loss.is_used = true;
        match self.survives_losses() {
            true => self.lose(loss),
            false => (self.observer)(loss.event()),
        }
    }

    /// Continues without a donor that holds nothing. Returns false if a block has moved there in the
    /// meantime, or may have.
    fn leave_behind(&self, loss: &Loss) -> bool {
        let node = loss.node;
        let Some(link) = self.shared.nodes.link_to(node) else {
            return false;
        };
        // First: from then on no block is ordered to move there.
        self.lock().lost.insert(link);
        if !self.remove_transports(link) {
            // Nothing is used any more when the VM ends.
            return self.shared.lifecycle.is_stopping();
        }
        // With its transports, moves to it were given up.
        if self.shared.homes.pages_at(node) > 0 {
            return false;
        }
        self.boot_events.ignore(node);
        self.end_lease(link);
        if loss.was_down {
            (self.observer)(FabricEvent::Link(LinkEvent::Up { node }));
        }
        let why = &loss.reason;
        tracing::warn!("{node}, of which nothing is used, is lost: {why}");
        true
    }

    /// Removes a lost donor's transports from the pager's threads. Returns false when a thread does
    /// not accept that in time, or has ended.
    fn remove_transports(&self, link: usize) -> bool {
        let mut classes = self.classes.iter();
        classes.all(|&class| {
            let port = self.shared.port_of(class);
            port.replace_transport(link, Box::new(Vacant)).is_some()
        })
    }

    /// Continues without a donor. Its blocks keep their home, so that what the guest sees of nodes
    /// stays.
    fn lose(&self, loss: Loss) {
        let node = loss.node;
        let shared = &self.shared;
        let Some(link) = shared.nodes.link_to(node) else {
            return;
        };
        // Each page of it that cannot be opened, and its link, may say that it is lost.
        if !shared.losses.set_lost(link) {
            return;
        }
        // What else happens to it pauses no guest.
        self.boot_events.ignore(node);
        // In this order: a thread whose transport was removed finds the homes marked.
        for (block, _) in shared.homes.ram_blocks_at(node) {
            shared.homes.set_lost(block, node);
        }
        // When the VM ends, nothing is fetched any more. A lost page can be what ends the guest, and
        // what else is lost is reported all the same.
        if !self.remove_transports(link) && !shared.lifecycle.is_stopping() {
            (self.observer)(loss.event());
            return;
        }
        shared.policies.leave(link);
        let _ = self.adapter.try_send(Change::Forget(node));
        let blocks = shared.homes.ram_blocks_at(node);
        let blocks: Vec<u32> = blocks.map(|(block, _)| block).collect();
        let swept = sweep(shared, &blocks);
        // Pages that stay here take nothing from the cache of the others.
        if shared.budget.grow(swept.kept) {
            shared.faults.wake();
        }
        (self.observer)(FabricEvent::Poisoned(LostMemory {
            node,
            reason: loss.reason,
            lost_pages: swept.lost,
            kept_pages: swept.kept,
            was_down: loss.was_down,
        }));
    }
}
