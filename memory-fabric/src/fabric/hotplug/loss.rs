//! A donor of the guest's start is lost, and the VM continues without the pages that only it had.

use super::Inner;
use crate::fabric::adapt::Change;
use crate::fabric::{FabricEvent, LostMemory, OnLostMemory};
use crate::homes::NodeId;
use crate::link::LinkEvent;
use crate::pager::losses::sweep;
use crate::transport::vacant::Vacant;
use std::sync::Arc;

impl Inner {
    /// Handles losses of donors, where the configuration has the VM survive them.
    pub(super) fn survive_losses(self: &Arc<Self>) {
        if self.config.on_lost_memory != OnLostMemory::Poison || self.config.redundancy.is_some() {
            return;
        }
        // The events live as long as the links, which the state must not keep.
        let inner = Arc::downgrade(self);
        let observer = Arc::clone(&self.observer);
        self.boot_events
            .handle_losses(move |node, reason, was_down| {
                let handled = inner.upgrade().is_some_and(|inner| {
                    let (of_thread, reason) = (Arc::clone(&inner), reason.clone());
                    // On a thread of its own: the link's thread is needed by those of the pager.
                    let work = move || of_thread.lose(node, reason, was_down);
                    let thread = std::thread::Builder::new().name(format!("lost-{}", node.0));
                    let thread = thread.spawn(work).ok();
                    let is_started = thread.is_some();
                    inner.lock().leaving.extend(thread);
                    is_started
                });
                if !handled {
                    observer(FabricEvent::Link(LinkEvent::Lost { node, reason }));
                }
            });
    }

    /// Continues without a donor. Its blocks keep their home, so that what the guest sees of nodes
    /// stays.
    fn lose(&self, node: NodeId, reason: String, was_down: bool) {
        let shared = &self.shared;
        let Some(link) = shared.nodes.link_to(node) else {
            return;
        };
        // In this order: a thread whose transport was removed finds the homes marked.
        shared.losses.set_lost(link);
        for (block, _) in shared.homes.ram_blocks_at(node) {
            shared.homes.set_lost(block);
        }
        for &class in &self.classes {
            let port = shared.port_of(class);
            if port.replace_transport(link, Box::new(Vacant)).is_none() {
                if shared.lifecycle.is_stopping() {
                    // Nothing is fetched any more. A lost page can be what ends the guest, and what
                    // else is lost is reported all the same.
                    break;
                }
                (self.observer)(FabricEvent::Link(LinkEvent::Lost { node, reason }));
                return;
            }
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
            reason,
            lost_pages: swept.lost,
            kept_pages: swept.kept,
            was_down,
        }));
    }
}
