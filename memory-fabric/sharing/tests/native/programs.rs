//! Programs whose roles run on nodes of their own, and check what they find.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fabric_pages::guest_memory::GuestMemory;

use crate::litmus;
use crate::mesh::ALL;
use crate::network::Faults;

/// A program for several nodes.
pub struct Program {
    /// Number of its nodes.
    pub roles: usize,
    /// Memory that it needs for some rounds.
    pub bytes: fn(usize) -> usize,
    /// Runs a role; role 0 checks the result at the end and says it.
    pub run: fn(&Arc<GuestMemory>, usize, usize) -> String,
}

/// The program with this name.
pub fn find(name: &str) -> Program {
    let program = match name {
        "counters" => Some(COUNTERS),
        "compare_exchange" => Some(COMPARE_EXCHANGE),
        "straddling" => Some(STRADDLING),
        _ => litmus::program(name),
    };
    program.unwrap_or_else(|| panic!("no program {name}"))
}

/// An aligned word of the memory.
pub fn word(memory: &GuestMemory, offset: usize) -> &AtomicU64 {
    assert!(offset.is_multiple_of(8) && offset < memory.bytes());
    // SAFETY: inside the guest view, which is mapped while `memory` lives, and aligned; all accesses
    // are atomic.
    unsafe { AtomicU64::from_ptr(memory.guest_view().add(offset).cast()) }
}

/// Waits until `roles` are here, for the `time`-th time. The first page is for that.
pub fn meet(memory: &GuestMemory, roles: usize, time: usize) {
    let arrived = word(memory, 0);
    arrived.fetch_add(1, Ordering::SeqCst);
    let all = (time as u64 + 1) * roles as u64;
    while arrived.load(Ordering::SeqCst) < all {
        std::thread::yield_now();
    }
}

const PAGE: usize = 4096;

/// Threads of each node, pages of counters.
const THREADS: usize = 2;
const PAGES: usize = 64;

/// Pages between pages of counters, so that they are in several blocks.
const STEP: usize = 37;

/// Pages of the memory: all have a counter that is incremented now and then, so that pages are evicted
/// where nodes lend less than all of the memory.
const ALL_PAGES: usize = BLOCKS * 512;
const BLOCKS: usize = 8;

/// Rounds between two increments of these.
const SELDOM: usize = 16;

/// The counter of any page, behind those of the program.
fn seldom(memory: &GuestMemory, page: usize) -> &AtomicU64 {
    word(memory, page * PAGE + PAGE / 2)
}

fn counter(memory: &GuestMemory, page: usize) -> &AtomicU64 {
    word(memory, (1 + page * STEP) * PAGE + page % 8 * 8)
}

/// Runs `step` in threads of this node, with the thread's number and the round, and compares the sum
/// of the counters at the end.
fn exact(
    memory: &Arc<GuestMemory>,
    role: usize,
    rounds: usize,
    step: fn(&GuestMemory, usize, usize),
    sum: fn(&GuestMemory) -> u64,
) -> String {
    let roles = 4;
    meet(memory, roles, 0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let thread = role * THREADS + thread;
                for round in 0..rounds {
                    step(memory, thread, round);
                    if round % SELDOM == 0 {
                        let page = (thread * 509 + round / SELDOM * 1021) % ALL_PAGES;
                        seldom(memory, page).fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    meet(memory, roles, 1);
    let all = (0..ALL_PAGES).map(|page| seldom(memory, page).load(Ordering::Relaxed));
    let found = sum(memory) + all.sum::<u64>();
    let expected = (roles * THREADS * (rounds + rounds.div_ceil(SELDOM))) as u64;
    assert_eq!(found, expected, "role {role} finds another sum");
    if role == 0 {
        format!("{found} increments, all there")
    } else {
        String::new()
    }
}

fn place(thread: usize, round: usize) -> usize {
    // Each thread goes through the pages in an order of its own.
    (round * [1, 3, 5, 7][thread % 4] + thread * 11) % PAGES
}

fn sum_of_counters(memory: &GuestMemory) -> u64 {
    let counters = (0..PAGES).map(|page| counter(memory, page));
    counters
        .map(|counter| counter.load(Ordering::Relaxed))
        .sum()
}

/// Counters that all threads of 4 nodes increment.
const COUNTERS: Program = Program {
    roles: 4,
    bytes: |_| ALL_PAGES * PAGE,
    run: |memory, role, rounds| {
        let step = |memory: &GuestMemory, thread, round| {
            counter(memory, place(thread, round)).fetch_add(1, Ordering::Relaxed);
        };
        exact(memory, role, rounds, step, sum_of_counters)
    },
};

/// The same, by compare-and-exchange.
const COMPARE_EXCHANGE: Program = Program {
    roles: 4,
    bytes: |_| ALL_PAGES * PAGE,
    run: |memory, role, rounds| {
        let step = |memory: &GuestMemory, thread, round| {
            let counter = counter(memory, place(thread, round));
            let mut found = counter.load(Ordering::Relaxed);
            while let Err(other) =
                counter.compare_exchange(found, found + 1, Ordering::Relaxed, Ordering::Relaxed)
            {
                found = other;
            }
        };
        exact(memory, role, rounds, step, sum_of_counters)
    },
};

/// Counters whose first half is in one page and whose second half is in the next one: an increment
/// needs both pages at once.
const STRADDLING: Program = Program {
    roles: 4,
    bytes: |_| ALL_PAGES * PAGE,
    run: |memory, role, rounds| {
        let step = |memory: &GuestMemory, thread, round| {
            add_straddling(memory, place(thread, round) % 8);
        };
        let sum = |memory: &GuestMemory| (0..8).map(|place| read_straddling(memory, place)).sum();
        exact(memory, role, rounds, step, sum)
    },
};

fn straddling(memory: &GuestMemory, place: usize) -> *mut u64 {
    let offset = (2 + place * STEP) * PAGE - 4;
    assert!(offset + 8 <= memory.bytes());
    // SAFETY: inside the guest view, as asserted.
    unsafe { memory.guest_view().add(offset).cast() }
}

fn add_straddling(memory: &GuestMemory, place: usize) {
    let counter = straddling(memory, place);
    // SAFETY: the counter is inside the guest view; a locked instruction is atomic on any address.
    unsafe {
        std::arch::asm!("lock add qword ptr [{}], 1", in(reg) counter, options(nostack));
    }
}

fn read_straddling(memory: &GuestMemory, place: usize) -> u64 {
    let counter = straddling(memory, place);
    let mut value = 0_u64;
    // SAFETY: as above; adding 0 reads the whole value at once.
    unsafe {
        std::arch::asm!("lock xadd qword ptr [{}], {}", in(reg) counter, inout(reg) value, options(nostack));
    }
    value
}

/// Half of the memory.
const HALF: usize = BLOCKS / 2;

#[test]
fn counters_with_half_of_the_pages_local() {
    crate::processes::run("counters", 10_000, HALF);
}

#[test]
fn compare_and_exchange() {
    crate::processes::run("compare_exchange", 2_000, ALL);
}

#[test]
fn counters_that_straddle_pages() {
    crate::processes::run("straddling", 500, ALL);
}

/// At least so many cuts of a run over bad links, and delays.
const CUTS_MIN: u64 = 5;
const DELAYS_MIN: u64 = 100;

/// Runs programs one after the other over links that are slow and cut.
pub fn over_bad_links(
    names: impl IntoIterator<Item = impl AsRef<str>>,
    rounds: usize,
    lent: usize,
) {
    let faults = Arc::<Faults>::default();
    for name in names {
        crate::processes::run_over_bad_links(name.as_ref(), rounds, lent, &faults);
        println!("{}: {faults:?} so far", name.as_ref());
    }
    let cuts = faults.cuts.load(Ordering::Relaxed);
    assert!(cuts >= CUTS_MIN, "only {cuts} cuts");
    let delays = faults.delays.load(Ordering::Relaxed);
    assert!(delays >= DELAYS_MIN, "only {delays} delays");
}

#[test]
fn counters_over_links_that_are_slow_and_cut() {
    over_bad_links(["counters"], 4_000, HALF);
}

#[test]
fn other_increments_over_links_that_are_slow_and_cut() {
    over_bad_links(["compare_exchange", "straddling"], 50, ALL);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn many_increments_over_links_that_are_slow_and_cut() {
    over_bad_links(["counters", "compare_exchange"], 200_000, HALF);
    over_bad_links(["straddling"], 1_000, ALL);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn ten_million_increments() {
    // 8 threads in all.
    for name in ["counters", "compare_exchange", "straddling"] {
        crate::processes::run(name, 1_250_000, HALF);
    }
}
