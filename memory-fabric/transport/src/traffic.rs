//! Counters of connections.

use fabric_host::metrics::Counter;
use fabric_pages::page::PAGE_SIZE;
use std::sync::atomic::{AtomicBool, Ordering};

/// Traffic of a connection and its successors. A page that was sent again after a connection broke
/// counts once.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Number of pages.
    pub pages: Counter,
    /// Bytes sent for them, without the headers of frames.
    pub wire_bytes: Counter,
    /// Pages sent in fewer bytes than they have, zeroes included.
    pub pages_compressed: Counter,
    // Relaxed: it publishes no other data.
    compressing: AtomicBool,
}

impl Traffic {
    /// Records pages that were transferred in this many bytes.
    pub fn record(&self, pages: u64, compressed: u64, wire_bytes: usize) {
        self.pages.add(pages);
        self.wire_bytes.add(wire_bytes as u64);
        if compressed > 0 {
            self.pages_compressed.add(compressed);
        }
    }

    /// Returns the uncompressed size of the pages.
    #[must_use]
    pub fn plain_bytes(&self) -> u64 {
        self.pages.get() * PAGE_SIZE as u64
    }

    /// Records whether pages are compressed from now on.
    pub fn set_compressing(&self, compressing: bool) {
        self.compressing.store(compressing, Ordering::Relaxed);
    }

    /// Returns whether pages are compressed now, except in trials.
    #[must_use]
    pub fn is_compressing(&self) -> bool {
        self.compressing.load(Ordering::Relaxed)
    }
}
