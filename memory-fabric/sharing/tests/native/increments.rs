//! Counters in shared memory that threads of all nodes increment.

use std::sync::atomic::{AtomicU64, Ordering};

use fabric_sharing::SharedMemory;

use crate::budget::is_within_budget;
use crate::mesh::{ALL, nodes};

/// The counter at this page and word of a node's guest view.
fn counter(node: &SharedMemory, page: usize, word: usize) -> &AtomicU64 {
    let memory = node.memory();
    let offset = (page << 12) + word * 8;
    assert!(offset < memory.bytes());
    // SAFETY: inside the guest view, which is mapped while `node` lives; all accesses are atomic.
    unsafe { AtomicU64::from_ptr(memory.guest_view().add(offset).cast()) }
}

/// Each thread of each node increments a counter of each page, `rounds` times.
fn increments(count: u8, threads: usize, pages: &[usize], rounds: u64, lent: usize) {
    let nodes = nodes(count, 4, lent);
    std::thread::scope(|scope| {
        for node in &nodes {
            for thread in 0..threads {
                scope.spawn(move || {
                    for round in 0..rounds {
                        for page in pages {
                            let word =
                                usize::try_from(round).map_or(0, |round| (round + thread) % 3);
                            counter(node, *page, word).fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        }
    });
    let expected = u64::from(count) * threads as u64 * rounds;
    for node in &nodes {
        for page in pages {
            let words = (0..3).map(|word| counter(node, *page, word).load(Ordering::Relaxed));
            assert_eq!(words.sum::<u64>(), expected, "page {page}");
        }
        println!("{:?}", node.stats());
        if lent != ALL {
            is_within_budget(node, count.into(), lent);
        }
    }
}

#[test]
fn one_page_two_nodes() {
    increments(2, 1, &[700], 2000, ALL);
}

#[test]
fn pages_of_several_blocks_and_nodes() {
    let pages: Vec<usize> = (0..64).map(|page| page * 31).collect();
    increments(4, 2, &pages, 200, ALL);
}

/// Two nodes lend half of the memory each and write all of it, and the bytes are right.
#[test]
fn pages_that_are_evicted_in_between() {
    let pages: Vec<usize> = (0..2048).collect();
    increments(2, 2, &pages, 8, 2);
}
