//! Page tables that nodes write at the same time.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fabric_pages::page::{PageIndex, PageRange};
use fabric_sharing::SharedMemory;

use crate::mesh::{ALL, config, nodes_with};
use crate::programs::word;

/// The root, and the tables below it down to one in a block with another home.
const ROOT: usize = 8;
const THIRD: usize = 9;
const SECOND: usize = 10;
const FIRST: usize = 11;
const FAR: usize = 520;

/// An entry that points to a table.
const fn link(page: usize) -> u64 {
    (page as u64) << 12 | 3
}

fn entry(node: &SharedMemory, page: usize, entry: usize) -> &AtomicU64 {
    word(node.memory(), (page << 12) + entry * 8)
}

/// Nodes of which the first made tables, as a kernel has them, and all use them.
fn with_tables(count: u8, merge: bool) -> Vec<SharedMemory> {
    let nodes = nodes_with(count, 4, |me| {
        let mut config = config(me, count, 4, ALL);
        config.merge_tables = merge;
        config
    });
    for (page, place, value) in [
        (ROOT, 511, link(THIRD)),
        (THIRD, 510, link(SECOND)),
        // The image, which has the root in it, is a large page.
        (SECOND, 0, 0x83),
        (SECOND, 1, link(FIRST)),
        (SECOND, 2, link(FAR)),
        (FIRST, 0, 0),
    ] {
        entry(&nodes[0], page, place).store(value, Ordering::Relaxed);
    }
    for page in [ROOT, THIRD, SECOND, FIRST] {
        use_as_table(&nodes[1..], page);
    }
    // Its home is the second node, which merges it when the others ask for it.
    use_as_table(&nodes[1..2], FAR);
    use_as_table(&nodes, FAR);
    nodes
}

/// Needs the page writable, and changes nothing in it, as a walk does.
fn use_as_table(nodes: &[SharedMemory], page: usize) {
    for node in nodes {
        entry(node, page, 400).swap(0, Ordering::Relaxed);
    }
}

/// Nodes count their tables after they have answered.
fn wait_for_tables(nodes: &[SharedMemory], count: u64) {
    let until = Instant::now() + Duration::from_secs(20);
    for node in nodes {
        let tables = &node.stats().merged_tables;
        while tables.get() != count {
            let found = tables.get();
            assert!(Instant::now() < until, "{found} merged tables, not {count}");
            std::thread::yield_now();
        }
    }
}

fn came(nodes: &[SharedMemory]) -> u64 {
    nodes
        .iter()
        .map(|node| node.stats().from_member.get())
        .sum()
}

#[test]
fn nodes_write_one_table_without_taking_it_from_each_other() {
    for count in [2, 3] {
        let nodes = with_tables(count, true);
        wait_for_tables(&nodes, 5);
        let before = came(&nodes);
        let rounds = 20_000_u64;
        std::thread::scope(|scope| {
            for (place, node) in nodes.iter().enumerate() {
                scope.spawn(move || {
                    for round in 1..=rounds {
                        for page in [FIRST, FAR] {
                            entry(node, page, place).store(round, Ordering::Relaxed);
                            entry(node, page, 100 + place).fetch_add(2, Ordering::Relaxed);
                        }
                        if round % 64 == 0 {
                            node.fences().wait();
                        }
                    }
                    node.fences().wait();
                });
            }
        });
        for (page, place) in [FIRST, FAR]
            .into_iter()
            .flat_map(|page| (0..512).map(move |place| (page, place)))
        {
            let expected = match place {
                _ if place < usize::from(count) => rounds,
                _ if (100..100 + usize::from(count)).contains(&place) => 2 * rounds,
                _ => 0,
            };
            for node in &nodes {
                let found = entry(node, page, place).load(Ordering::Relaxed);
                assert_eq!(found, expected, "entry {place} of page {page}");
            }
        }
        assert_eq!(came(&nodes), before, "a table moved");
        for node in &nodes {
            assert!(node.stats().table_changes.get() + node.stats().held_for_tables.get() > 0);
        }
    }
}

/// Two nodes that store one entry end with the same value.
#[test]
fn copies_are_equal_after_conflicts() {
    let nodes = with_tables(2, true);
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        for (place, node) in (1..).zip(&nodes) {
            let barrier = &barrier;
            let nodes = &nodes;
            scope.spawn(move || {
                for round in 0..2000 {
                    let value = round << 8 | place;
                    for page in [FIRST, FAR] {
                        entry(node, page, 7).store(value, Ordering::Relaxed);
                    }
                    node.fences().wait();
                    barrier.wait();
                    for page in [FIRST, FAR] {
                        let [one, two] =
                            [0, 1].map(|node| entry(&nodes[node], page, 7).load(Ordering::Relaxed));
                        assert_eq!((one, one >> 8), (two, round), "page {page}");
                    }
                    barrier.wait();
                }
            });
        }
    });
}

/// A store into a table is seen by those who see what was stored into ordinary memory afterwards. Each
/// round waits for the one before, so that the pages move.
#[test]
fn a_store_into_a_table_is_seen_before_what_follows_it() {
    for (count, flag) in [(2, 600), (2, 1100), (3, 600), (3, 1600)] {
        let nodes = with_tables(count, true);
        let rounds = 100;
        let answer = |node: usize| flag + 2 + node;
        let wait_for = |node: &SharedMemory, page, round| {
            while entry(node, page, 0).load(Ordering::Acquire) < round {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=rounds {
                    for page in [FIRST, FAR] {
                        entry(&nodes[0], page, 9).store(round, Ordering::Relaxed);
                    }
                    entry(&nodes[0], flag, 0).store(round, Ordering::Release);
                    for place in 1..nodes.len() {
                        wait_for(&nodes[0], answer(place), round);
                    }
                }
            });
            for (place, node) in nodes.iter().enumerate().skip(1) {
                scope.spawn(move || {
                    for round in 1..=rounds {
                        wait_for(node, flag, round);
                        for page in [FIRST, FAR] {
                            let found = entry(node, page, 9).load(Ordering::Relaxed);
                            assert_eq!(found, round, "of page {page}, seen late");
                        }
                        entry(node, answer(place), 0).store(round, Ordering::Release);
                    }
                });
            }
        });
        let stats = nodes[0].stats();
        let (held, changes) = (stats.held_for_tables.get(), stats.table_changes.get());
        println!("{count} nodes, flag {flag}: {held} messages waited, {changes} changes sent");
        assert!(held >= rounds, "{held} messages waited");
    }
}

/// A table that nothing links any longer is ordinary memory: no locked operation is lost.
#[test]
fn a_table_that_is_freed_is_memory_of_one_writer() {
    let nodes = with_tables(3, true);
    for turn in 0..24_usize {
        let (place, page) = if turn % 2 == 0 { (1, FIRST) } else { (2, FAR) };
        let freeing = &nodes[turn / 2 % 3];
        entry(freeing, SECOND, place).store(0, Ordering::Relaxed);
        // Its kernel flushes the TLBs of all CPUs.
        freeing.fences().wait();
        wait_for_tables(&nodes, 4);
        let rounds = 500;
        std::thread::scope(|scope| {
            for node in &nodes {
                scope.spawn(move || {
                    for _ in 0..rounds {
                        entry(node, page, 300).fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let sum = 3 * rounds * (turn as u64 / 2 + 1);
        for node in &nodes {
            let found = entry(node, page, 300).load(Ordering::Relaxed);
            assert_eq!(found, sum, "turn {turn}");
        }
        // It is a table again, for which its home has it first.
        entry(&nodes[0], SECOND, place).store(link(page), Ordering::Relaxed);
        nodes[0].fences().wait();
        let home = usize::from(page == FAR);
        use_as_table(&nodes[home..=home], page);
        use_as_table(&nodes, page);
        wait_for_tables(&nodes, 5);
    }
}

/// Without the flag tables are memory like any other.
/// The guest's report of free pages may come before the table is known to be none any more.
#[test]
fn a_merged_table_is_not_dropped() {
    let nodes = with_tables(2, true);
    wait_for_tables(&nodes, 5);
    for (place, node) in nodes.iter().enumerate() {
        for page in [FIRST, FAR] {
            entry(node, page, 100 + place).store(7, Ordering::Relaxed);
        }
        node.fences().wait();
    }
    let tables = [ROOT, THIRD, SECOND, FIRST, FAR];
    let ranges = tables.map(|page| {
        let page = u32::try_from(page).expect("a small number");
        PageRange::new(PageIndex::new(page), 1)
    });
    for node in &nodes {
        assert_eq!(node.discards().discard(&ranges), (0, Ok(())));
    }
    for node in &nodes {
        for (page, place, value) in [
            (ROOT, 511, link(THIRD)),
            (SECOND, 2, link(FAR)),
            (FIRST, 100, 7),
            (FIRST, 101, 7),
            (FAR, 100, 7),
            (FAR, 101, 7),
        ] {
            let found = entry(node, page, place).load(Ordering::Relaxed);
            assert_eq!(found, value, "entry {place} of page {page}");
        }
    }
}

#[test]
fn nothing_is_merged_unless_it_is_asked_for() {
    let nodes = with_tables(2, false);
    for node in &nodes {
        assert_eq!(node.stats().merged_tables.get(), 0);
    }
    nodes[0].fences().wait();
}
