//! Nodes whose threads each need many pages at once, as an instruction does that walks page tables.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use fabric_pages::guest_memory::GuestMemory;
use fabric_sharing::SharingStats;

use crate::mesh::{ALL, config, nodes, nodes_with};
use crate::programs::word;

/// Pages between two of a gang, so that they are in blocks of all nodes.
const STEP: usize = 67;

/// What one thread did.
#[derive(Debug)]
struct Done {
    /// Rounds in which it had all pages at once.
    rounds: u64,
    /// Rounds for which it had to get pages.
    turns: u64,
    /// Longest time between the ends of two of these.
    gap: Duration,
}

/// Writes a stamp into each page, and counts the round if all of them are there at the end. A node that
/// takes a page away writes its own stamp, and the round begins again, as an instruction does.
fn need_all(memory: &GuestMemory, node: u64, pages: usize, time: Duration) -> Done {
    let counter = |page: usize| word(memory, (page * STEP) << 12);
    let started = Instant::now();
    let (mut rounds, mut turns, mut gap, mut last) = (0, 0, Duration::ZERO, started);
    let mut had_all = false;
    for attempt in 1.. {
        let stamp = node << 48 | attempt;
        for page in 0..pages {
            counter(page).swap(stamp, Ordering::SeqCst);
        }
        let has_all = (0..pages).all(|page| counter(page).load(Ordering::SeqCst) == stamp);
        let now = Instant::now();
        let is_over = now - started > time;
        if has_all || is_over {
            gap = gap.max(now - last);
            last = now;
            rounds += u64::from(has_all);
            turns += u64::from(has_all && !had_all);
        }
        had_all = has_all;
        if is_over {
            break;
        }
    }
    Done { rounds, turns, gap }
}

/// What a node did, and how many pages came to it for that.
struct Node {
    done: Done,
    came: u64,
    /// Pages that it requested ahead of their fault.
    ahead: u64,
}

/// All nodes need the same pages at once for this time.
fn contend(count: u8, pages: usize, time: Duration) -> Vec<Node> {
    let nodes = nodes(count, 4, ALL);
    let done = std::thread::scope(|scope| {
        let threads = (1..).zip(&nodes).map(|(node, shared)| {
            let memory = shared.memory();
            scope.spawn(move || need_all(memory, node, pages, time))
        });
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|done| done.expect("no panic"))
            .collect::<Vec<_>>()
    });
    let rounds: u64 = done.iter().map(|done| done.rounds).sum();
    println!("{count} nodes, {pages} pages, {time:?}: {rounds} rounds");
    let results = nodes.iter().zip(done).map(|(node, done)| {
        let stats = node.stats();
        let came = stats.from_member.get();
        println!(
            "  {} turns, longest gap {:?}; {came} pages came, {} requested ahead, {} lost early, {} held, {} tokens",
            done.turns,
            done.gap,
            stats.ahead.get(),
            stats.early.get(),
            stats.holds.get(),
            stats.tokens.get(),
        );
        let ahead = stats.ahead.get();
        Node { done, came, ahead }
    });
    results.collect()
}

#[test]
fn every_node_progresses_on_pages_that_all_need_at_once() {
    for (count, pages) in [(2, 8), (2, 30), (3, 8)] {
        for node in contend(count, pages, Duration::from_secs(4)) {
            let Done { rounds, turns, .. } = node.done;
            assert!(
                turns >= 2 && rounds > turns,
                "{turns} turns, {rounds} rounds"
            );
            // Two nodes get back at once what they lost; more of them would disturb each other.
            assert_eq!(node.ahead > 0, count == 2, "{} pages ahead", node.ahead);
            // Each page once for each turn, and some of them again.
            let useful = turns * pages as u64;
            let came = node.came;
            assert!(
                came <= 6 * useful,
                "{came} pages came for {turns} turns of {pages}"
            );
        }
    }
}

/// Two nodes take turns: each counts in all pages, wakes the other, and halts, as two CPUs do that
/// wait for each other. Returns how many pages were lost early and held.
fn take_turns(turns: u64, pages: usize, halts: bool) -> (u64, u64) {
    let nodes = nodes_with(2, 4, |place| {
        let mut config = config(place, 2, 4, ALL);
        // Longer than a turn takes: nobody progresses by having run for long.
        config.hold_unit = Duration::from_millis(20);
        config
    });
    let (wake_first, first) = mpsc::channel();
    let (wake_second, second) = mpsc::channel();
    let ends = [(wake_second, first), (wake_first.clone(), second)];
    wake_first.send(()).expect("somebody waits");
    std::thread::scope(|scope| {
        for (node, (other, interrupt)) in nodes.iter().zip(ends) {
            scope.spawn(move || {
                for _ in 0..turns {
                    let limit = Duration::from_secs(30);
                    interrupt.recv_timeout(limit).expect("an interrupt");
                    for page in 0..pages {
                        word(node.memory(), (page * STEP) << 12).fetch_add(1, Ordering::SeqCst);
                    }
                    if halts {
                        node.halts().halted();
                    }
                    // The last one has nobody to wake.
                    let _ = other.send(());
                }
            });
        }
    });
    for page in 0..pages {
        let counted = word(nodes[0].memory(), (page * STEP) << 12);
        assert_eq!(counted.load(Ordering::SeqCst), 2 * turns, "page {page}");
    }
    let sum = |of: fn(&SharingStats) -> u64| nodes.iter().map(|node| of(node.stats())).sum();
    (
        sum(|stats| stats.early.get()),
        sum(|stats| stats.holds.get()),
    )
}

#[test]
fn a_halted_vcpu_holds_nothing_that_another_needs() {
    let with @ (early, held) = take_turns(3, 8, true);
    let without @ (early_before, held_before) = take_turns(3, 8, false);
    println!("lost early and held: {with:?} with halts, {without:?} without");
    // The first grants are of whole blocks, before a halt.
    assert!(early <= 2 && held <= 2, "{early} lost early, {held} held");
    assert!(early_before > 2 && held_before > 2, "{without:?}");
}
