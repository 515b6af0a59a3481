//! Memory that is added where hosts with vCPUs share the guest's memory. The hosts lend and share all
//! of it from the start, so a block is plugged at once, and what is unplugged is dropped as far as this
//! host has it alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use devices::virtio::FreeRange;
use memory_fabric::compute::Discards;
use vm_memory::GuestAddress;

use crate::instance::free_memory::pages_of;

/// The part of a shared memory that may be added to the guest.
#[derive(Clone, Debug)]
pub struct SharedRegion {
    pub start: GuestAddress,
    pub bytes: u64,
    discards: Arc<Discards>,
    // Relaxed: a number for reports, which only the device's thread changes.
    plugged_bytes: Arc<AtomicU64>,
}

impl SharedRegion {
    /// The region of so many bytes, of which nothing is plugged.
    pub fn new(start: GuestAddress, bytes: u64, discards: Arc<Discards>) -> Self {
        Self {
            start,
            bytes,
            discards,
            plugged_bytes: Arc::default(),
        }
    }

    /// Returns how much is plugged.
    pub fn plugged_bytes(&self) -> u64 {
        self.plugged_bytes.load(Ordering::Relaxed)
    }

    /// Counts blocks as plugged. They are zero, or as the guest left them.
    pub fn plug(&self, blocks: FreeRange) {
        self.plugged_bytes
            .fetch_add(blocks.bytes, Ordering::Relaxed);
    }

    /// Drops the bytes of blocks, as far as this host has them alone. Pages that stay cost memory, which
    /// is lent for them anyway.
    pub fn unplug(&self, blocks: FreeRange) {
        // The device only passes blocks of its region.
        let pages = pages_of(&blocks);
        let (dropped, outcome) = self.discards.discard(pages.as_slice());
        tracing::debug!(
            start = blocks.start.0,
            bytes = blocks.bytes,
            dropped,
            "memory is unplugged"
        );
        if let Err(error) = outcome {
            tracing::debug!(%error, "pages that the guest has unplugged are kept");
        }
        self.plugged_bytes
            .fetch_sub(blocks.bytes, Ordering::Relaxed);
    }
}
