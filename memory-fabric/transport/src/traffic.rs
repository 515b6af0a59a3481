//! What connections carried.

use fabric_host::metrics::Counter;
use fabric_pages::page::PAGE_SIZE;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a connection, and its successors, carried over the network. A page that was sent again
/// after a connection broke counts once.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Pages.
    pub pages: Counter,
    /// Bytes that were sent for them, without the headers of frames.
    pub wire_bytes: Counter,
    /// Pages that were sent as less bytes than they have, zeroes included.
    pub pages_compressed: Counter,
    // Relaxed: no other data is published by it.
    compressing: AtomicBool,
}

impl Traffic {
    /// Pages that came or went as so many bytes.
    pub fn record(&self, pages: u64, compressed: u64, wire_bytes: usize) {
        self.pages.add(pages);
        self.wire_bytes.add(wire_bytes as u64);
        if compressed > 0 {
            self.pages_compressed.add(compressed);
        }
    }

    /// Bytes that the pages have.
    #[must_use]
    pub fn plain_bytes(&self) -> u64 {
        self.pages.get() * PAGE_SIZE as u64
    }

    /// Notes whether pages are compressed from now on.
    pub fn set_compressing(&self, compressing: bool) {
        self.compressing.store(compressing, Ordering::Relaxed);
    }

    /// Whether pages are compressed just now, but for what is tried now and then.
    #[must_use]
    pub fn is_compressing(&self) -> bool {
        self.compressing.load(Ordering::Relaxed)
    }
}
