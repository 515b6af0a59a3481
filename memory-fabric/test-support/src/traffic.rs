//! Counters of the connections of each class, and threads that generate traffic.

use super::{Random, Running, WORDS_PER_PAGE, Words, pattern};
use fabric_wire::TrafficClass;
use memory_fabric::stats::Traffic;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub const CLASSES: [TrafficClass; 3] = [
    TrafficClass::Urgent,
    TrafficClass::Bulk,
    TrafficClass::Prefetch,
];

/// Gives each thread a different sequence of pages.
static NEXT_SEED: AtomicU64 = AtomicU64::new(0);

pub fn traffic(running: &Running, class: TrafficClass) -> Arc<Traffic> {
    Arc::clone(running.fabric.stats().donors[0].traffic(class))
}

/// Reads random pages, and verifies the word that it reads.
pub fn touch(words: Words, seed: u64, touches: usize) {
    let mut random = Random(NEXT_SEED.fetch_add(1, Ordering::Relaxed));
    for _ in 0..touches {
        let (page, word) = (random.below(words.pages()), random.below(WORDS_PER_PAGE));
        let found = words.at(page, word).load(Ordering::Relaxed);
        assert_eq!(found, pattern(seed, page, word), "page {page} word {word}");
    }
}
