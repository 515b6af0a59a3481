//! Prefetching: right bytes, and only where it helps.

use fabric_test_support::*;
use memory_fabric::fabric::TransportKind;
use memory_fabric::page::{PageIndex, PageRange};
use memory_fabric::stats::PagerStats;
use std::sync::atomic::Ordering;

const GUEST: u64 = 64 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Fills the memory and reads it once, so that all but the last pages are clean and remote.
fn written_and_read(running: &Running) -> Words {
    let words = Words::of(&running.fabric);
    fill(words, 1);
    verify(words, 1);
    words
}

/// Differences of counters between two points in time.
#[derive(Clone, Copy, Debug)]
struct Counts {
    remote: u64,
    minor: u64,
    issued: u64,
    used: u64,
    wasted: u64,
}

fn counts(stats: &PagerStats) -> Counts {
    Counts {
        remote: stats.remote.summary().count,
        minor: stats.minor.summary().count,
        issued: stats.prefetch_issued.get(),
        used: stats.prefetch_used.get(),
        wasted: stats.prefetch_wasted.get(),
    }
}

impl Counts {
    fn since(self, before: Self) -> Self {
        Self {
            remote: self.remote - before.remote,
            minor: self.minor - before.minor,
            issued: self.issued - before.issued,
            used: self.used - before.used,
            wasted: self.wasted - before.wasted,
        }
    }
}

#[test]
fn a_sequential_reader_finds_nearly_every_page_here() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = written_and_read(&running);
    let stats = running.fabric.stats();
    let before = counts(stats);
    verify(words, 1);
    let during = counts(stats).since(before);
    println!("{during:?}");
    let pages = words.pages() as u64;
    assert!(during.used > pages / 2, "{during:?} of {pages}");
    assert!(during.remote < pages / 4, "{during:?} of {pages}");
    assert!(during.wasted < pages / 50, "{during:?} of {pages}");
    let nodes = running.fabric.shutdown();
    let count = nodes[1].own_count.expect("the donor reported its counters");
    assert_eq!(
        count.pages_read, nodes[1].pages_fetched,
        "both count runs by pages"
    );
}

#[test]
fn strides_up_and_down_are_fetched_ahead_too() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = written_and_read(&running);
    let stats = running.fabric.stats();
    let pages = words.pages();
    for stride in [3, -3, -1_isize] {
        let touched = pages / stride.unsigned_abs();
        let first = if stride > 0 { 0 } else { pages - 2 };
        let before = counts(stats);
        for step in 0..touched - 1 {
            let page = first.strict_add_signed(stride * step.cast_signed());
            check_page(words, 1, page);
        }
        let during = counts(stats).since(before);
        println!("{during:?}");
        let touched = touched as u64;
        assert!(during.used > touched / 2, "by {stride}: {during:?}");
        assert!(during.wasted <= touched / 30, "by {stride}: {during:?}");
        // The pages of a stream that has proved itself are mapped several at once.
        assert!(during.minor * 4 < during.used, "by {stride}: {during:?}");
    }
    running.fabric.shutdown();
}

#[test]
fn random_touches_fetch_nothing_else() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = written_and_read(&running);
    let stats = running.fabric.stats();
    let before = counts(stats);
    let mut random = Random(5);
    for _ in 0..20_000 {
        check_page(words, 1, random.below(words.pages()));
    }
    let during = counts(stats).since(before);
    assert!(during.remote > 5_000, "{during:?}");
    assert!(during.issued < during.remote / 50, "{during:?}");
    running.fabric.shutdown();
}

#[test]
fn nothing_is_fetched_ahead_when_that_is_off() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.prefetch = false;
    let running = start(&config);
    written_and_read(&running);
    assert_eq!(counts(running.fabric.stats()).issued, 0);
    running.fabric.shutdown();
}

/// Several readers of the same pages with small offsets, and writers of other pages among them:
/// faults race with prefetches and evictions of the same pages.
fn readers_race(running: &Running, threads: usize) {
    let words = written_and_read(running);
    let pages = words.pages();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for pass in 0..3 {
                    for page in 0..pages {
                        let page = (page + thread * 16 + pass * 1000) % pages;
                        check_page(words, 1, page);
                    }
                }
            });
        }
        // One thread increments and decrements the first word of every 64th page.
        scope.spawn(move || {
            for pass in 0..4_u64 {
                for page in (5..pages).step_by(64) {
                    let word = words.at(page, WORDS_PER_PAGE - 1);
                    let added = if pass % 2 == 0 {
                        1 << 40
                    } else {
                        0_u64.wrapping_sub(1 << 40)
                    };
                    word.fetch_add(added, Ordering::Relaxed);
                }
            }
        });
    });
    verify(words, 1);
    let during = counts(running.fabric.stats());
    println!(
        "{during:?}, {} late",
        running.fabric.stats().prefetch_late.get()
    );
    assert!(during.used > 10_000, "{during:?}");
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert!(
        resident <= LOCAL,
        "{resident} bytes resident, {LOCAL} is the budget"
    );
}

#[test]
fn faults_and_guesses_race_for_the_same_pages() {
    let donor = donor(GUEST);
    readers_race(&start(&config(GUEST, LOCAL, &[donor.address()])), 4);
}

#[test]
fn they_race_over_loopback_and_without_continue_write_protected() {
    let mut config = config(GUEST, LOCAL, &[]);
    config.transport = TransportKind::Loopback;
    readers_race(&start_as_on_old_kernels(&config), 3);
}

#[test]
fn connections_that_break_under_prefetches_lose_nothing() {
    let donors = [donor(32 * MIB), donor(32 * MIB)];
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    let mut config = config(GUEST, LOCAL, &addresses);
    config.checksum = true;
    let running = start(&config);
    let words = written_and_read(&running);
    let stats = running.fabric.stats();
    let before = counts(stats);
    for pass in 0..4 {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| verify(words, 1));
            let mut broken = 0;
            while !reader.is_finished() {
                // Whenever some hundreds of pages have arrived.
                if stats.prefetch_issued.get() - before.issued > (pass * 20 + broken + 1) * 700
                    && broken < 20
                {
                    donors[usize::try_from(broken).expect("small") % 2].break_connections();
                    broken += 1;
                }
                std::thread::yield_now();
            }
            reader.join().expect("every byte right");
            assert!(broken > 5, "broken {broken} times only");
        });
    }
    let during = counts(stats).since(before);
    assert!(during.used > 10_000, "{during:?}");
    running.fabric.shutdown();
}

#[test]
fn a_hot_set_survives_a_scan_with_prefetching() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = written_and_read(&running);
    let stats = running.fabric.stats();
    // A quarter of the cache, accessed continuously.
    let hot = words.pages() / 16;
    let before = counts(stats);
    let mut touches = 0_u64;
    for page in hot..words.pages() {
        check_page(words, 1, page);
        for step in 0..64 {
            std::hint::black_box(
                words
                    .at((page * 64 + step) % hot, 0)
                    .load(Ordering::Relaxed),
            );
            touches += 1;
        }
    }
    let during = counts(stats).since(before);
    println!("{during:?} in {touches} touches");
    // Every hot page is accessed again within 16 pages of the scan.
    assert!(
        during.remote < hot as u64 * 4,
        "{during:?}, {hot} hot pages"
    );
    running.fabric.shutdown();
}

#[test]
fn a_working_set_is_recorded_in_order_and_replayed_before_it_is_touched() {
    let order: Vec<usize> = (0..24).map(|step| (step * 37 % 100) * 20).collect();
    let touch = |words: Words| {
        for &page in &order {
            for step in 0..20 {
                assert_eq!(words.at(page + step, 0).load(Ordering::Relaxed), 0);
            }
        }
    };
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.record = true;
    let running = start(&config);
    touch(Words::of(&running.fabric));
    let (runs, cut) = running.fabric.working_set().expect("recorded");
    let zero_faults = running.fabric.stats().zero.summary().count;
    running.fabric.shutdown();
    assert!(!cut);
    // Each stretch starts where it was accessed first, or slightly before.
    let mut starts = runs.iter();
    for &page in &order {
        let near = |first: usize| first <= page && page < first + 16;
        assert!(
            starts.any(|run| near(run.first.index())),
            "page {page} of {runs:?}"
        );
    }

    config.record = false;
    config.prefetch = false;
    config.replay = runs.clone();
    let running = start(&config);
    let stats = running.fabric.stats();
    let all: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
    wait_until(|| stats.replayed.get() == all);
    touch(Words::of(&running.fabric));
    let faults = stats.zero.summary().count + stats.minor.summary().count;
    assert_eq!(faults, 0, "without replay there were {zero_faults}");
    running.fabric.shutdown();
}

#[test]
fn a_replay_takes_no_memory_that_is_not_plentiful_and_harms_no_bytes() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    let pages = u32::try_from(GUEST / 4096).expect("small");
    // Four times the capacity, partly twice, and pages that the guest does not have.
    let run = |first: u32, count| PageRange::new(PageIndex::new(first), count);
    config.replay = vec![
        run(0, pages),
        run(100, 5000),
        run(pages - 1, 1),
        run(pages, 9),
    ];
    let running = start(&config);
    let stats = running.fabric.stats();
    // It races with the first writes to all pages.
    let words = Words::of(&running.fabric);
    fill(words, 3);
    verify(words, 3);
    let replayed = stats.replayed.get();
    assert!(replayed <= LOCAL / 4096, "{replayed} pages");
    running.fabric.shutdown();

    let running = start(&config);
    let stats = running.fabric.stats();
    wait_until(|| running.fabric.cached_pages() > LOCAL / 4096 / 2);
    assert_eq!(stats.evictions.get(), 0, "made room for a guess");
    fill(Words::of(&running.fabric), 4);
    verify(Words::of(&running.fabric), 4);
    running.fabric.shutdown();
}

fn wait_until(condition: impl Fn() -> bool) {
    let started = std::time::Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "it does not come about");
        std::thread::yield_now();
    }
}
