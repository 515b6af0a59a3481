//! Overload: a donor slower than the others, a flood of faults on one page, writers faster than the
//! network, and a donor that is lost during all other activity.

use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::throttle::Throttle;
use fabric_test_support::*;
use memory_fabric::discard::DiscardError;
use memory_fabric::fabric::{Compression, FabricEvent};
use memory_fabric::link::LinkEvent;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;

/// A rate that limits nothing.
const FAST: f64 = 1e9;

/// Runs a function on drop, so that other threads end even when the test fails.
struct AtEnd<F: Fn()>(F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[test]
fn a_donor_that_is_slower_than_the_others_slows_no_page_of_theirs() {
    /// About 12 pages per second.
    const SLOW: f64 = 50e3;
    const FAST_PAGES: u64 = 3000;
    let donors = [donor(GUEST), donor(GUEST)];
    let link = Throttle::new(donors[0].address(), FAST);
    let mut config = config(GUEST, LOCAL, &[link.address, donors[1].address()]);
    config.compression = Compression::Off;
    // A connection is closed after a long silence; this one is only slow.
    config.grace = Duration::from_secs(60);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    // The slow donor has the lower half.
    let half = words.pages() / 2;
    fill(words, 1);
    let stats = running.fabric.stats();
    let fetched = |donor: usize| stats.donors[donor].pages_fetched.get();
    link.set_rate(SLOW);
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let finished = &finished;
            scope.spawn(move || {
                let mut random = Random(thread);
                while !finished.load(Ordering::Relaxed) {
                    verify_page(words, 1, random.below(half));
                }
            });
        }
        let _end = AtEnd(|| {
            link.set_rate(FAST);
            finished.store(true, Ordering::Relaxed);
        });
        let before = fetched(0);
        wait_until("the slow donor is busy", || fetched(0) > before);
        let (slow_before, fast_before) = (fetched(0), fetched(1));
        let mut random = Random(100);
        let started = Instant::now();
        while fetched(1) - fast_before < FAST_PAGES {
            assert!(started.elapsed() < PATIENCE, "pages of the fast donor wait");
            verify_page(words, 1, half + random.below(half));
        }
        let slow = fetched(0) - slow_before;
        println!(
            "{FAST_PAGES} pages of the fast donor and {slow} of the slow one in {:?}",
            started.elapsed()
        );
        // Had one waited for the other, four pages would have come from the slow donor for each.
        assert!(slow * 10 < FAST_PAGES, "{slow} pages of the slow donor");
    });
    verify(words, 1);
    running.fabric.shutdown();
}

#[test]
fn a_flood_of_faults_on_one_page_is_one_fetch() {
    const THREADS: u64 = 48;
    const PAGES: usize = 300;
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.prefetch = false;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 2);
    let stats = running.fabric.stats();
    let before = stats.remote.summary().count;
    let barrier = Barrier::new(usize::try_from(THREADS).expect("few"));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let barrier = &barrier;
            scope.spawn(move || {
                // The first pages were evicted long ago.
                for page in 0..PAGES {
                    barrier.wait();
                    // Half of them write, to a word of the page that then has no pattern.
                    if thread % 2 == 0 {
                        words
                            .at(page, WORDS_PER_PAGE - 1)
                            .fetch_add(1, Ordering::Relaxed);
                    }
                    check_page(words, 2, page);
                }
            });
        }
    });
    let fetches = stats.remote.summary().count - before;
    println!("{THREADS} threads on each of {PAGES} pages: {fetches} fetches");
    assert!(
        fetches <= PAGES as u64,
        "{fetches} fetches of {PAGES} pages"
    );
    assert!(fetches * 2 > PAGES as u64, "{fetches}: they were here");
    // Verifies again after everything was evicted: no addition was lost.
    for page in PAGES..words.pages() {
        verify_page(words, 2, page);
    }
    for page in 0..PAGES {
        check_page(words, 2, page);
        let last = WORDS_PER_PAGE - 1;
        let found = words.at(page, last).load(Ordering::Relaxed);
        let wanted = pattern(2, page, last) + THREADS / 2;
        assert_eq!(found, wanted, "page {page}");
    }
    running.fabric.shutdown();
}

#[test]
fn writers_that_are_faster_than_the_network_are_held_back_and_lose_nothing() {
    /// About 3,000 pages per second.
    const RATE: f64 = 12e6;
    const WRITERS: usize = 3;
    const SMALL_GUEST: u64 = GUEST / 2;
    let donor = donor(SMALL_GUEST);
    let link = Throttle::new(donor.address(), RATE);
    let mut config = config(SMALL_GUEST, LOCAL, &[link.address]);
    config.compression = Compression::Off;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    let share = words.pages() / WRITERS;
    let finished = AtomicBool::new(false);
    let most = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn(move || {
                    for seed in [1, 2] {
                        for page in writer * share..(writer + 1) * share {
                            for word in 0..WORDS_PER_PAGE {
                                let value = pattern(seed, page, word);
                                words.at(page, word).store(value, Ordering::Relaxed);
                            }
                        }
                    }
                })
            })
            .collect();
        let (finished, most, fabric) = (&finished, &most, &running.fabric);
        scope.spawn(move || {
            while !finished.load(Ordering::Relaxed) {
                let resident = fabric.memory().resident_bytes().expect("fstat");
                most.fetch_max(resident, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        let _end = AtEnd(|| finished.store(true, Ordering::Relaxed));
        for writer in writers {
            writer.join().expect("writer");
        }
    });
    let most = most.into_inner();
    assert!(
        most <= LOCAL,
        "{most} bytes resident, {LOCAL} is the budget"
    );
    let stats = running.fabric.stats();
    let waited = stats.stalled_for_memory.get();
    assert!(waited > 0, "the network was fast enough");
    while running.events.try_recv().is_ok_and(|event| {
        // A throttled link must not count as broken.
        assert!(
            !matches!(event, FabricEvent::Link(LinkEvent::Down { .. })),
            "{event:?}"
        );
        true
    }) {}
    link.set_rate(FAST);
    for page in 0..WRITERS * share {
        verify_page(words, 2, page);
    }
    println!("{waited} faults waited for memory");
    running.fabric.shutdown();
}

/// Prefetches, evictions, discards of some pages and increments of others continue until the donor
/// is lost, and afterwards for as long as any thread has the pages it needs.
#[test]
fn a_donor_lost_amid_prefetches_evictions_and_discards_shows_nobody_a_wrong_byte() {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), Mischief::None, 0);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.grace = Duration::from_secs(1);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    let pages = words.pages();
    // A quarter each: sequential reads, random reads, writes, discards.
    let quarter = pages / 4;
    fill(words, 3);
    // Threads that wait for a page when the donor is lost wait until the process ends.
    let (wrong, wrong_words) = std::sync::mpsc::channel();
    let watch = move |wrong: std::sync::mpsc::Sender<String>, work: Box<dyn FnOnce() + Send>| {
        std::thread::spawn(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            if let Err(panic) = result {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                let _ = wrong.send(text);
            }
        });
    };
    watch(
        wrong.clone(),
        Box::new(move || {
            loop {
                (0..quarter).for_each(|page| verify_page(words, 3, page));
            }
        }),
    );
    watch(
        wrong.clone(),
        Box::new(move || {
            let mut random = Random(7);
            loop {
                verify_page(words, 3, quarter + random.below(quarter));
            }
        }),
    );
    watch(
        wrong.clone(),
        Box::new(move || {
            let mut random = Random(8);
            let last = WORDS_PER_PAGE - 1;
            let first = |page| pattern(3, page, last);
            let mut added = vec![0; quarter];
            loop {
                let index = random.below(quarter);
                let page = 2 * quarter + index;
                let before = words.at(page, last).fetch_add(1, Ordering::Relaxed);
                assert_eq!(before, first(page) + added[index], "page {page}");
                added[index] += 1;
                check_page(words, 3, page);
            }
        }),
    );
    let discarder = running.fabric.discarder();
    watch(
        wrong,
        Box::new(move || {
            let mut random = Random(9);
            loop {
                let first = 3 * quarter + random.below(quarter - 64);
                match discarder.discard(&[range(first, 64)]) {
                    Ok(()) => assert_all(words, first..first + 64, 0),
                    // The donor is unreachable, or the pager has ended.
                    Err(DiscardError::Late | DiscardError::Stopped) => {}
                    Err(error) => panic!("{error}"),
                }
                for page in first..first + 64 {
                    words.at(page, 5).store(page as u64, Ordering::Relaxed);
                }
                for page in first..first + 64 {
                    let found = words.at(page, 5).load(Ordering::Relaxed);
                    assert_eq!(found, page as u64, "page {page}");
                }
            }
        }),
    );
    let stats = running.fabric.stats();
    wait_until("all of it continues", || {
        stats.prefetch_used.get() > 3000
            && stats.evictions.get() > 20_000
            && stats.free_pages.dropped_here.get() > 1000
    });
    proxy.cut(true);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match running
            .events
            .recv_timeout(left)
            .expect("the event is reported")
        {
            FabricEvent::Link(LinkEvent::Lost { reason, .. }) => {
                assert!(reason.contains("not back within 1 s"), "{reason}");
                break;
            }
            FabricEvent::Link(_) => {}
            other => panic!("unexpected {other:?}"),
        }
    }
    if let Ok(wrong) = wrong_words.try_recv() {
        panic!("{wrong}");
    }
    // Dropping the fabric would let threads that wait for a page continue with zeroes.
    std::mem::forget(running.fabric);
}
