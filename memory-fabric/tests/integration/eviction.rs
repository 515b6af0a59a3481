//! The choice of pages to evict, and its cost for typical access patterns, with contents verified.

use fabric_test_support::*;
use memory_fabric::page::PAGE_SIZE;
use std::ops::Range;
use std::sync::atomic::Ordering;

const GUEST: u64 = 128 * MIB;
const CACHE: usize = 4096;
const LOCAL: u64 = (CACHE * PAGE_SIZE) as u64;

/// Returns the pages fetched from the donor, on demand or by prefetching.
fn fetched_by(running: &Running) -> u64 {
    running.fabric.stats().donors[0].pages_fetched.get()
}

/// Reads and verifies a word of each page.
fn read(words: Words, pages: Range<usize>) {
    for page in pages {
        let found = words.at(page, 17).load(Ordering::Relaxed);
        assert_eq!(found, pattern(1, page, 17), "page {page}");
    }
}

#[test]
fn one_pass_over_much_memory_leaves_the_hot_set_here() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 1);
    let hot = 0..CACHE / 2;
    // The hot set is recognized in a stream of pages that are used once.
    let mut cold = CACHE;
    for _ in 0..80 {
        read(words, hot.clone());
        read(words, cold..cold + 128);
        cold += 128;
    }
    // Twice the cache is read while the hot set is idle.
    read(words, words.pages() - 2 * CACHE..words.pages());
    let before = fetched_by(&running);
    read(words, hot.clone());
    let fetched = fetched_by(&running) - before;
    assert!(
        fetched <= hot.len() as u64 / 10,
        "{fetched} of {} hot pages were pushed out by one pass",
        hot.len()
    );
    verify(words, 1);
    running.fabric.shutdown();
}

#[test]
fn a_guest_that_writes_what_it_reads_seldom_faults_twice() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 1);
    let stats = running.fabric.stats();
    let before = (fetched_by(&running), stats.write_protect.summary().count);
    // Each page is read first and written next.
    for seed in 1..4 {
        for page in 0..words.pages() {
            for word in 0..WORDS_PER_PAGE {
                let at = words.at(page, word);
                let found = at.load(Ordering::Relaxed);
                assert_eq!(found, pattern(seed, page, word), "page {page} word {word}");
                at.store(pattern(seed + 1, page, word), Ordering::Relaxed);
            }
        }
    }
    let fetched = fetched_by(&running) - before.0;
    let twice = stats.write_protect.summary().count - before.1;
    assert!(
        fetched > 2 * CACHE as u64 && twice < fetched / 4,
        "{twice} of {fetched} fetched pages faulted again to be written"
    );
    verify(words, 4);
    running.fabric.shutdown();
}
