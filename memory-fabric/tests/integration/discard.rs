//! Discarded pages: zero or newer afterwards, never their old contents, under any concurrency.

use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::*;
use memory_fabric::discard::{DISCARD_TIME_MAX, DiscardError, Discarder};
use memory_fabric::fabric::{FabricConfig, TransportKind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const GUEST: u64 = 64 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Threads own parts of the guest, and write, discard and verify them, while everything else is
/// evicted and fetched, and readers access what is being discarded.
fn race(config: &FabricConfig, rounds: usize, disturb: impl Fn() + Sync) {
    const OWNERS: usize = 3;
    let running = start(config);
    let words = Words::of(&running.fabric);
    let pages = words.pages();
    let share = pages / OWNERS;
    let finished = AtomicBool::new(false);
    let late = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let owners: Vec<_> = (0..OWNERS)
            .map(|owner| {
                let discarder = running.fabric.discarder();
                let late = &late;
                scope.spawn(move || own(words, &discarder, owner, share, rounds, late))
            })
            .collect();
        for reader in 0..2 {
            let finished = &finished;
            scope.spawn(move || {
                let mut random = Random(1000 + reader);
                while !finished.load(Ordering::Relaxed) {
                    let page = random.below(pages);
                    let word = random.below(WORDS_PER_PAGE);
                    std::hint::black_box(words.at(page, word).load(Ordering::Relaxed));
                }
            });
        }
        let (finished, disturb) = (&finished, &disturb);
        scope.spawn(move || {
            while !finished.load(Ordering::Relaxed) {
                disturb();
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = owners.into_iter().map(|owner| owner.join()).collect();
        finished.store(true, Ordering::Relaxed);
        for result in results {
            result.expect("owner");
        }
    });
    let stats = running.fabric.stats();
    println!(
        "{} pages reported, {} dropped here, {} at home, {} late, {} evictions, {} remote faults",
        stats.free_pages.reported.get(),
        stats.free_pages.dropped_here.get(),
        stats.free_pages.dropped_at_home.get(),
        late.load(Ordering::Relaxed),
        stats.evictions.get(),
        stats.remote.summary().count,
    );
    assert!(stats.free_pages.dropped_here.get() > 1000);
    assert!(stats.evictions.get() > 1000, "too few evictions");
    assert!(
        stats.remote.summary().count > 1000,
        "too few pages were returned"
    );
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert!(resident <= LOCAL, "{resident} bytes resident");
    let cached = running.fabric.cached_pages() * 4096;
    assert!(cached <= LOCAL, "{cached} bytes counted");
}

/// Checks an owner's page: this value in every word, or zero.
fn own(
    words: Words,
    discarder: &Discarder,
    owner: usize,
    share: usize,
    rounds: usize,
    late: &AtomicU64,
) {
    let mut random = Random(owner as u64 + 1);
    let first = owner * share;
    let mut wanted = vec![0_u64; share];
    for round in 0..rounds {
        let start = random.below(share);
        let count = (1 + random.below(700)).min(share - start);
        match random.below(3) {
            // Write all words of some pages, with a value that never repeats.
            0 => {
                let value = ((round as u64 + 1) << 8) | owner as u64;
                let some = &mut wanted[start..start + count];
                for (page, wanted) in (start..).zip(some) {
                    for word in 0..WORDS_PER_PAGE {
                        words.at(first + page, word).store(value, Ordering::Relaxed);
                    }
                    *wanted = value;
                }
            }
            1 => match discarder.discard(&[range(first + start, count)]) {
                Ok(()) => wanted[start..start + count].fill(0),
                // A page is in transit from a donor that was cut off: what was discarded before it
                // is zero, and the rest is unchanged.
                Err(DiscardError::Late) => {
                    late.fetch_add(1, Ordering::Relaxed);
                    for (page, wanted) in (start..).zip(&mut wanted[start..start + count]) {
                        let found = words.at(first + page, 7).load(Ordering::Relaxed);
                        assert!(found == *wanted || found == 0, "page {page}: {found:#x}");
                        *wanted = found;
                    }
                }
                Err(error) => panic!("{error}"),
            },
            _ => {
                for (page, &wanted) in (start..).zip(&wanted[start..start + count]) {
                    assert_all(words, first + page..first + page + 1, wanted);
                }
            }
        }
    }
    for (page, &wanted) in (first..).zip(&wanted) {
        assert_all(words, page..page + 1, wanted);
    }
}

#[test]
fn discards_racing_faults_and_write_backs_over_tcp_bring_no_old_byte_back() {
    let donor = donor(GUEST);
    race(&config(GUEST, LOCAL, &[donor.address()]), 600, || {});
}

#[test]
fn discards_racing_faults_over_loopback_bring_no_old_byte_back() {
    let mut config = config(GUEST, LOCAL, &[]);
    config.transport = TransportKind::Loopback;
    race(&config, 600, || {});
}

#[test]
fn discards_racing_broken_connections_bring_no_old_byte_back() {
    let donors = [donor(GUEST), donor(GUEST)];
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    let mut config = config(GUEST, LOCAL, &addresses);
    config.checksum = true;
    let breaker = Breaker::new(&donors, BREAK_INTERVAL);
    race(&config, 400, || breaker.tick());
    breaker.assert_broke();
}

#[test]
fn pages_at_home_here_are_freed_as_well() {
    let running = start(&config(GUEST, GUEST, &[]));
    let words = Words::of(&running.fabric);
    fill(words, 3);
    let discarder = running.fabric.discarder();
    discarder.discard(&[range(10, 100)]).expect("discarded");
    let free_pages = &running.fabric.stats().free_pages;
    assert_eq!(free_pages.dropped_here.get(), 100);
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert_eq!(resident, GUEST - 100 * 4096);
    assert_all(words, 10..110, 0);
    verify_page(words, 3, 9);
    verify_page(words, 3, 110);
    discarder.discard(&[range(10, 100)]).expect("once more");
    // They had been read in the meantime, each of which takes a page of zeroes.
    assert!(free_pages.dropped_here.get() <= 200);
}

#[test]
fn what_is_no_guest_memory_is_refused() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let pages = Words::of(&running.fabric).pages();
    let discarder = running.fabric.discarder();
    for bad in [
        range(pages, 1),
        range(pages - 1, 2),
        range(u32::MAX as usize, 1),
    ] {
        let result = discarder.discard(&[bad]);
        assert!(
            matches!(result, Err(DiscardError::OutsideMemory { .. })),
            "{result:?}"
        );
    }
    running.fabric.shutdown();
    let result = discarder.discard(&[range(0, 1)]);
    assert!(matches!(result, Err(DiscardError::Stopped)), "{result:?}");
}

#[test]
fn a_page_that_does_not_come_is_not_waited_for_longer_than_allowed() {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), Mischief::None, 0);
    let running = start(&config(GUEST, LOCAL, &[proxy.address]));
    let words = Words::of(&running.fabric);
    fill(words, 4);
    // The first pages have been written back by now.
    proxy.cut(true);
    let discarder = running.fabric.discarder();
    // A page that is discarded before the reader's access is zero at once; then tries the next
    // page.
    let late = (0..100).find(|&page| {
        let touching = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                touching.store(true, Ordering::SeqCst);
                words.at(page, 5).load(Ordering::Relaxed)
            });
            wait_until("the reader runs", || touching.load(Ordering::SeqCst));
            for _ in 0..100 {
                std::thread::yield_now();
            }
            let started = Instant::now();
            let result = discarder.discard(&[range(page, 1)]);
            let took = started.elapsed();
            let is_late = matches!(result, Err(DiscardError::Late));
            if is_late {
                proxy.cut(false);
            }
            // From here on nothing may fail before the reader has its page.
            let read = reader.join().expect("reader");
            if is_late {
                assert!(took >= DISCARD_TIME_MAX, "{took:?}");
                assert_ne!(read, 0, "a discard that was given up took the page away");
            } else {
                result.expect("discarded");
                assert_eq!(read, 0, "old bytes after a discard");
            }
            is_late
        })
    });
    let page = late.expect("a page that was being fetched");
    verify_page(words, 4, page);
    discarder
        .discard(&[range(page, 1)])
        .expect("it is here now");
    assert_all(words, page..page + 1, 0);
}
