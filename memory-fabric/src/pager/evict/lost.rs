//! Pages whose home is lost: the evictor's part. They stay here.

use super::Evictor;
use crate::page::PageIndex;
use std::sync::Arc;

impl Evictor {
    /// Takes back pages whose write-backs a lost donor will not confirm. Blocks that got their home
    /// there until now are marked as well.
    pub(super) fn give_up_writes(&mut self, link: usize) {
        let shared = Arc::clone(&self.shared);
        let node = shared.nodes.node_at(link);
        for (block, _) in shared.homes.ram_blocks_at(node) {
            shared.homes.set_lost(block, node);
        }
        for ticket in 0..self.writing.len() {
            let writing = self.writing[ticket].take_if(|(_, donor)| *donor == link);
            if let Some((page, _)) = writing {
                let ticket = u32::try_from(ticket).expect("a few donors");
                self.free_tickets.push(ticket);
                self.take_back(page);
            }
        }
    }

    /// Puts a page back on probation whose write-back does not count.
    pub(super) fn take_back(&mut self, page: PageIndex) {
        if self.shared.map.entry(page).cancel_write_back() {
            self.ranking.on_probation(&self.shared.map, page);
        } else {
            self.rescued(page);
        }
    }
}
