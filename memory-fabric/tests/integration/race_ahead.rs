//! All activities at once on the smallest budget: pages are prefetched, written, evicted and
//! discarded, and every read of a word at any time returns a value that is valid at that time.

use fabric_test_support::*;
use memory_fabric::discard::{DiscardError, Discarder};
use memory_fabric::fabric::TransportKind;
use memory_fabric::page::PageRange;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

const GUEST: u64 = 64 * MIB;
/// Minimum of local memory.
const LOCAL: u64 = 16 * MIB;
const OWNERS: usize = 2;

/// Limit of retries for discards that time out.
const TRIES_MAX: usize = 20;

/// State of a page. Its owner numbers its operations: a write stores the number in every word, a
/// discard leaves zeroes.
#[derive(Debug, Default)]
struct Known {
    begun: AtomicU64,
    finished: AtomicU64,
    /// Number of the last discard that started.
    discarded: AtomicU64,
}

/// Returns the value that write `number` stores in a word.
fn value(number: u64, page: usize, word: usize) -> u64 {
    (number << 32) | ((page as u64) << 9) | word as u64
}

/// Reads all words of a page during any operation of its owner.
fn read(words: Words, known: &[Known], page: usize) {
    let known = &known[page];
    for word in 0..WORDS_PER_PAGE {
        // Acquire, here and below: the effects of a finished operation are visible, and a visible
        // number belongs to an operation that started.
        let least = known.finished.load(Ordering::Acquire);
        let found = words.at(page, word).load(Ordering::Acquire);
        let discarded = known.discarded.load(Ordering::Acquire);
        let most = known.begun.load(Ordering::Acquire);
        let number = found >> 32;
        let valid = if found == 0 {
            discarded >= least
        } else {
            (least..=most).contains(&number) && found == value(number, page, word)
        };
        assert!(
            valid,
            "page {page} word {word}: {found:#x} where {least} to {most} may be, \
             the last discard was {discarded}"
        );
    }
}

/// A discard waits a limited time for pages in transit, which may not suffice while connections
/// break.
fn discard_in_time(discarder: &Discarder, run: PageRange) {
    let mut tries = 0;
    while let Err(error) = discarder.discard(&[run]) {
        tries += 1;
        assert!(
            matches!(error, DiscardError::Late) && tries < TRIES_MAX,
            "{error}"
        );
    }
}

/// Writes, discards and verifies the pages from `first` on.
fn own(
    words: Words,
    known: &[Known],
    discarder: &Discarder,
    first: usize,
    share: usize,
    rounds: usize,
) {
    let mut random = Random(first as u64 + 1);
    // The last write of each page, or 0 when it is zero.
    let mut wanted = vec![0_u64; share];
    let check = |start: usize, wanted: &[u64]| {
        for (page, &number) in (first + start..).zip(wanted) {
            for word in 0..WORDS_PER_PAGE {
                let found = words.at(page, word).load(Ordering::Relaxed);
                let right = if number == 0 {
                    0
                } else {
                    value(number, page, word)
                };
                assert_eq!(found, right, "page {page} word {word} of write {number}");
            }
        }
    };
    for round in 0..rounds {
        let number = round as u64 + 1;
        let start = random.below(share);
        let count = (1 + random.below(700)).min(share - start);
        let pages = first + start..first + start + count;
        match random.below(4) {
            0 | 1 => {
                for page in pages {
                    known[page].begun.store(number, Ordering::SeqCst);
                    for word in 0..WORDS_PER_PAGE {
                        let to = value(number, page, word);
                        words.at(page, word).store(to, Ordering::Release);
                    }
                    known[page].finished.store(number, Ordering::SeqCst);
                }
                wanted[start..start + count].fill(number);
            }
            2 => {
                for page in pages.clone() {
                    known[page].begun.store(number, Ordering::SeqCst);
                    known[page].discarded.store(number, Ordering::SeqCst);
                }
                discard_in_time(discarder, range(first + start, count));
                for page in pages {
                    known[page].finished.store(number, Ordering::SeqCst);
                }
                wanted[start..start + count].fill(0);
            }
            _ => check(start, &wanted[start..start + count]),
        }
    }
    check(0, &wanted);
}

fn race(running: Running, rounds: usize, disturb: impl Fn() + Sync) {
    let words = Words::of(&running.fabric);
    let pages = words.pages();
    let share = pages / OWNERS;
    let known: Vec<_> = (0..pages).map(|_| Known::default()).collect();
    let known = &known[..];
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let owners: Vec<_> = (0..OWNERS)
            .map(|owner| {
                let discarder = running.fabric.discarder();
                scope.spawn(move || own(words, known, &discarder, owner * share, share, rounds))
            })
            .collect();
        let finished = &finished;
        // One reader advances sequentially, one in steps up, one in steps down.
        let readers: Vec<_> = [(0, 1), (1, 3), (pages - 1, pages - 2)]
            .into_iter()
            .map(|(first, step)| {
                scope.spawn(move || {
                    let mut page = first;
                    while !finished.load(Ordering::Relaxed) {
                        read(words, known, page);
                        // Modulo the guest: the last step is two down.
                        page = (page + step) % pages;
                    }
                })
            })
            .collect();
        let disturb = &disturb;
        scope.spawn(move || {
            while !finished.load(Ordering::Relaxed) {
                disturb();
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = owners.into_iter().map(|owner| owner.join()).collect();
        finished.store(true, Ordering::Relaxed);
        let seen = readers.into_iter().map(|reader| reader.join());
        for result in results.into_iter().chain(seen) {
            result.expect("owner or reader");
        }
    });
    let stats = running.fabric.stats();
    println!(
        "{} pages fetched ahead, {} used, {} wasted, {} late; {} dropped here; {} evictions, {} \
         cancelled; {} remote faults",
        stats.prefetch_issued.get(),
        stats.prefetch_used.get(),
        stats.prefetch_wasted.get(),
        stats.prefetch_late.get(),
        stats.free_pages.dropped_here.get(),
        stats.evictions.get(),
        stats.evictions_cancelled.get(),
        stats.remote.summary().count,
    );
    assert!(stats.prefetch_used.get() > 1000, "too few were of use");
    assert!(stats.free_pages.dropped_here.get() > 500, "too few freed");
    assert!(stats.evictions.get() > 10_000, "too few evictions");
    within_budget(&running);
    // Counters and queues have no stale entries: after discarding everything no page is counted,
    // and the memory can be used again.
    let discarder = running.fabric.discarder();
    discard_in_time(&discarder, range(0, pages));
    assert_eq!(running.fabric.cached_pages(), 0);
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert_eq!(resident, 0);
    fill(words, 9);
    verify(words, 9);
    within_budget(&running);
}

fn within_budget(running: &Running) {
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert!(resident <= LOCAL, "{resident} bytes resident");
    let cached = running.fabric.cached_pages() * 4096;
    assert!(cached <= LOCAL, "{cached} bytes counted");
}

#[test]
fn readers_find_what_may_be_there_over_tcp() {
    let donor = donor(GUEST);
    race(start(&config(GUEST, LOCAL, &[donor.address()])), 500, || {});
}

#[test]
fn readers_find_what_may_be_there_over_loopback() {
    let mut config = config(GUEST, LOCAL, &[]);
    config.transport = TransportKind::Loopback;
    race(start(&config), 500, || {});
}

#[test]
fn readers_find_what_may_be_there_without_continue_write_protected() {
    let mut config = config(GUEST, LOCAL, &[]);
    config.transport = TransportKind::Loopback;
    race(start_as_on_old_kernels(&config), 300, || {});
}

#[test]
fn readers_find_what_may_be_there_while_connections_break() {
    let donors = [donor(GUEST), donor(GUEST)];
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    let mut config = config(GUEST, LOCAL, &addresses);
    config.checksum = true;
    let breaker = Breaker::new(&donors, BREAK_INTERVAL);
    race(start(&config), 300, || breaker.tick());
    breaker.assert_broke();
}

#[test]
fn pages_that_were_fetched_ahead_and_are_freed_are_zero_and_count_as_neither_used_nor_wasted() {
    let donor = donor(GUEST);
    // Enough that nothing is evicted during the relevant part.
    let running = start(&config(GUEST, GUEST / 2, &[donor.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 1);
    verify(words, 1);
    let stats = running.fabric.stats();
    let issued = stats.prefetch_issued.get();
    let used = stats.prefetch_used.get();
    let next = AtomicUsize::new(0);
    wait_until("pages are fetched ahead", || {
        verify_page(words, 1, next.fetch_add(1, Ordering::Relaxed));
        stats.prefetch_issued.get() - issued > stats.prefetch_used.get() - used + 30
    });
    let page = next.into_inner();
    let discarder = running.fabric.discarder();
    // The discard waits for pages in transit.
    let rest = words.pages() - page;
    discarder.discard(&[range(page, rest)]).expect("discarded");
    let (used, wasted) = (stats.prefetch_used.get(), stats.prefetch_wasted.get());
    assert_all(words, page..words.pages(), 0);
    assert_eq!(stats.prefetch_used.get(), used, "old bytes were mapped");
    // They are written and evicted like any others, through the queues in which they still are.
    fill(words, 2);
    verify(words, 2);
    assert!(stats.evictions.get() > 1000, "nothing was evicted");
    let lost = stats.prefetch_issued.get() - stats.prefetch_used.get();
    assert!(
        stats.prefetch_wasted.get() < wasted + lost,
        "what was freed counts as wasted"
    );
}
