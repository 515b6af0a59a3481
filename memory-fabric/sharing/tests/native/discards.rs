//! Pages that one node drops while others may use them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fabric_pages::page::{PageIndex, PageRange};
use fabric_sharing::SharedMemory;

use crate::mesh::{ALL, nodes};
use crate::programs::word;

const PAGE: usize = 4096;

/// Longer than any wait of these tests, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn range(first: usize, count: usize) -> PageRange {
    let number = |value: usize| u32::try_from(value).expect("a small number");
    PageRange::new(PageIndex::new(number(first)), number(count))
}

/// A word of a page, in the guest view of a node.
fn at(node: &SharedMemory, page: usize, place: usize) -> &AtomicU64 {
    word(node.memory(), page * PAGE + place * 8)
}

fn pages_in_file(node: &SharedMemory) -> u64 {
    node.memory().resident_bytes().expect("a memory file") / PAGE as u64
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn the_block_of_one_node_is_freed_and_is_good_memory_again() {
    let nodes = nodes(2, 4, ALL);
    for page in 0..1024 {
        at(&nodes[0], page, 0).store(1, Ordering::SeqCst);
    }
    assert_eq!(pages_in_file(&nodes[0]), 1024);
    // Of two blocks, and what was never touched.
    let ranges = [range(0, 3), range(10, 1014), range(1500, 20)];
    let (dropped, outcome) = nodes[0].discards().discard(&ranges);
    assert_eq!((dropped, outcome), (1017, Ok(())));
    assert_eq!(pages_in_file(&nodes[0]), 7);
    assert_eq!(nodes[0].stats().discarded.get(), 1017);
    at(&nodes[0], 2, 0).store(2, Ordering::SeqCst);
    for node in &nodes {
        let found = [2, 3, 9, 10, 1023].map(|page| at(node, page, 0).load(Ordering::SeqCst));
        assert_eq!(found, [2, 1, 1, 0, 0]);
    }
    // The other node has nothing of them: it drops nothing.
    let nothing = nodes[1].discards().discard(&[range(512, 512)]);
    assert_eq!(nothing, (0, Ok(())));
}

#[test]
fn of_shared_blocks_a_node_drops_what_it_has_alone() {
    let nodes = nodes(2, 4, ALL);
    // All pages of two blocks, each of one node; then some are read by both.
    for page in 0..1024 {
        at(&nodes[page % 2], page, 0).store(1 + page as u64, Ordering::SeqCst);
    }
    for page in (0..1024).step_by(8) {
        assert_eq!(
            at(&nodes[1], page, 0).load(Ordering::SeqCst),
            1 + page as u64
        );
    }
    let before = pages_in_file(&nodes[0]);
    let (dropped, outcome) = nodes[0].discards().discard(&[range(0, 1024)]);
    assert_eq!(outcome, Ok(()));
    println!("{dropped} of {before} pages dropped");
    assert!(dropped > 300, "{dropped} pages");
    wait_until("their memory is not freed", || {
        pages_in_file(&nodes[0]) + dropped <= before
    });
    let found = |node: &SharedMemory| -> Vec<u64> {
        let pages = 0..1024;
        let found = pages.map(|page| at(node, page, 0).load(Ordering::SeqCst));
        found.collect()
    };
    let all = found(&nodes[1]);
    assert_eq!(found(&nodes[0]), all, "another node finds other bytes");
    let zeroes = all.iter().filter(|value| **value == 0).count();
    assert_eq!(zeroes as u64, dropped);
    for (page, value) in all.iter().enumerate() {
        let is_kept = *value == 1 + page as u64;
        let may_be_zero = page % 2 == 0 && page % 8 > 0;
        assert!(
            is_kept || (*value == 0 && may_be_zero),
            "page {page} is {value}"
        );
    }
}

/// Ends the threads that touch pages, also when a test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// One node drops pages again and again, while both touch them; what is written after that stays.
fn dropped_while_touched(lent: usize, rounds: u64) {
    const PAGES: usize = 96;
    /// Pages between two of them: some of all blocks, and of one block some in a row.
    fn number(page: usize) -> usize {
        page / 4 * 83 % 2044 + page % 4
    }
    let nodes = nodes(2, 4, lent);
    let (first, second) = (&nodes[0], &nodes[1]);
    let ranges: Vec<_> = (0..PAGES).map(|page| range(number(page), 1)).collect();
    let (begun, done, over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let stamp = |round: u64, page: usize, node: u64| round << 32 | (page as u64) << 8 | node;
    let mut dropped = 0;
    std::thread::scope(|scope| {
        // Touches other pages, so that some are evicted, and writes words of these ones.
        for node in &nodes {
            let over = &over;
            scope.spawn(move || {
                for turn in 0_usize.. {
                    if over.load(Ordering::SeqCst) {
                        break;
                    }
                    at(node, turn * 7 % 2048, 5).fetch_add(1, Ordering::SeqCst);
                    at(node, number(turn % PAGES), 6).fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let _ends = Ends(&over);
        let (begun, done) = (&begun, &done);
        scope.spawn(move || {
            for round in 1..=rounds {
                wait_until("no round", || begun.load(Ordering::SeqCst) == round);
                for page in 0..PAGES {
                    let theirs = at(second, number(page), 0).load(Ordering::SeqCst);
                    assert_eq!(theirs, stamp(round, page, 0), "round {round}, page {page}");
                    at(second, number(page), 1).store(stamp(round, page, 1), Ordering::SeqCst);
                }
                done.store(round, Ordering::SeqCst);
            }
        });
        for round in 1..=rounds {
            let (pages, outcome) = first.discards().discard(&ranges);
            dropped += pages;
            if let Err(error) = outcome {
                println!("round {round}: {error}");
            }
            for page in 0..PAGES {
                at(first, number(page), 0).store(stamp(round, page, 0), Ordering::SeqCst);
            }
            begun.store(round, Ordering::SeqCst);
            wait_until("the other node does not end its round", || {
                done.load(Ordering::SeqCst) == round
            });
            for page in 0..PAGES {
                let found = [0, 1].map(|place| at(first, number(page), place));
                let found = found.map(|word| word.load(Ordering::SeqCst));
                let written = [0, 1].map(|node| stamp(round, page, node));
                assert_eq!(found, written, "round {round}, page {page}");
            }
        }
    });
    println!("{dropped} pages dropped in {rounds} rounds");
    assert!(dropped > rounds, "only {dropped} pages dropped");
}

#[test]
fn what_is_written_after_a_page_was_dropped_stays() {
    dropped_while_touched(ALL, 200);
}

#[test]
fn what_is_written_after_a_page_was_dropped_stays_where_pages_are_evicted() {
    dropped_while_touched(2, 200);
}
