//! Pages that count as dirty and are equal to their home's copy are dropped; all others go home.

use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::FabricConfig;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Writes to each page without changing it, as the kernel thread of an asynchronous page fault
/// does: the pager maps the page writable and must take it for changed.
fn touch_by_write(words: Words, pages: impl IntoIterator<Item = usize>) {
    for page in pages {
        // The compiler must not know that nothing changes: it would leave the write out.
        let nothing = std::hint::black_box(0);
        words
            .at(page, page % WORDS_PER_PAGE)
            .fetch_or(nothing, Ordering::Relaxed);
    }
}

/// Changed pages that may stay: they wait to be written back until there are more.
const KEPT: u64 = LOCAL / 4096 / 16;

/// Touches pages until all have gone home that were changed, except those that wait for more.
fn all_go_home(running: &Running) {
    changed_go_home(running, |_| true);
}

/// The same, and touches only some pages. The order is random, so that pages which proved to be in
/// use leave as well.
fn changed_go_home(running: &Running, is_touched: impl Fn(usize) -> bool) {
    let words = Words::of(&running.fabric);
    let mut random = Random(5);
    let donors = &running.fabric.stats().donors;
    let written = || -> u64 { donors.iter().map(|d| d.pages_written_back.get()).sum() };
    let at_start = written();
    let mut idle = 0;
    // A busy machine needs more rounds, or more time for each, until the evictor has come to all pages.
    let deadline = Instant::now() + 2 * PATIENCE;
    for _ in (0..).take_while(|&round| round < 40 || Instant::now() < deadline) {
        let before = written();
        let pages = (0..words.pages()).map(|_| random.below(words.pages()));
        touch_by_write(words, pages.filter(|&page| is_touched(page)));
        // Each at most once, whatever the load: nothing changes here.
        let went_home = written() - at_start;
        assert!(went_home <= words.pages() as u64, "{went_home} pages");
        idle = if written() == before { idle + 1 } else { 0 };
        // A page may have been in use all the time.
        if idle == 4 {
            return;
        }
    }
    panic!("pages that do not change are written back again and again");
}

/// Every page has a pattern, and was written back since.
fn filled(running: &Running, seed: u64) {
    fill(Words::of(&running.fabric), seed);
    all_go_home(running);
}

fn without_prefetching(donor: &Donor) -> FabricConfig {
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.prefetch = false;
    config
}

fn writes_that_change_nothing_cause_no_traffic(donor: &Donor, config: &FabricConfig) {
    let running = start(config);
    let words = Words::of(&running.fabric);
    filled(&running, 11);
    let stats = running.fabric.stats();
    let fetched = || stats.donors[0].pages_fetched.get();
    let (fetched_before, written_before) = (fetched(), donor.pool().status().pages_written);
    let unchanged_before = stats.evictions_unchanged.get();
    for _ in 0..3 {
        touch_by_write(words, 0..words.pages());
    }
    let fetched = fetched() - fetched_before;
    let written = donor.pool().status().pages_written - written_before;
    let unchanged = stats.evictions_unchanged.get() - unchanged_before;
    println!("{fetched} pages fetched, {written} written back, {unchanged} were unchanged");
    assert!(fetched > 20_000, "only {fetched} pages were fetched");
    assert!(
        written * 100 <= fetched,
        "{written} pages written back, {fetched} fetched"
    );
    assert!(
        unchanged * 10 > fetched * 9,
        "only {unchanged} of {fetched}"
    );
    verify(words, 11);
    running.fabric.shutdown();
}

#[test]
fn writes_that_change_nothing_are_not_written_back() {
    let donor = donor(GUEST);
    writes_that_change_nothing_cause_no_traffic(&donor, &without_prefetching(&donor));
}

#[test]
fn neither_are_pages_that_were_prefetched() {
    let donor = donor(GUEST);
    let config = config(GUEST, LOCAL, &[donor.address()]);
    writes_that_change_nothing_cause_no_traffic(&donor, &config);
}

#[test]
fn reads_cause_no_write_back_where_the_kernel_cannot_continue_write_protected() {
    let donor = donor(GUEST);
    let running = start_as_on_old_kernels(&config(GUEST, LOCAL, &[donor.address()]));
    let words = Words::of(&running.fabric);
    filled(&running, 12);
    let (stats, status) = (running.fabric.stats(), || donor.pool().status());
    let (fetched_before, before) = (stats.donors[0].pages_fetched.get(), status().pages_written);
    verify(words, 12);
    verify(words, 12);
    let fetched = stats.donors[0].pages_fetched.get() - fetched_before;
    let written = status().pages_written - before;
    println!("{fetched} pages fetched, {written} written back");
    assert!(
        fetched > 10_000 && written * 100 <= fetched,
        "{written} of {fetched}"
    );
}

#[test]
fn a_page_that_was_changed_in_one_bit_goes_home_and_one_that_was_changed_back_does_not() {
    let donor = donor(GUEST);
    let running = start(&without_prefetching(&donor));
    let words = Words::of(&running.fabric);
    filled(&running, 13);
    let pages = words.pages();
    let bit_of = |page: usize| 1_u64 << (page * 7 % 64);
    let word_of = |page: usize| page * 31 % WORDS_PER_PAGE;
    let flip = |page| {
        words
            .at(page, word_of(page))
            .fetch_xor(bit_of(page), Ordering::Relaxed)
    };
    let status = || donor.pool().status().pages_written;
    let before = status();
    for page in 0..pages {
        // All are touched, so that all are evicted in turn.
        flip(page);
        if page % 3 != 0 {
            flip(page);
        }
    }
    // A changed page that is touched while it waits would count as used, and stay.
    changed_go_home(&running, |page| page % 3 != 0);
    let written = status() - before;
    println!("{written} of {pages} pages written back");
    let changed = pages as u64 / 3;
    assert!(
        written + KEPT >= changed && written <= changed + changed / 10,
        "{written} pages written back, {changed} were changed"
    );
    for page in (0..pages).step_by(3) {
        let found = words.at(page, word_of(page)).load(Ordering::Relaxed);
        assert_eq!(
            found,
            pattern(13, page, word_of(page)) ^ bit_of(page),
            "page {page}"
        );
        flip(page);
    }
    verify(words, 13);
    // Changed back, and at home: what was there before is of no use.
    all_go_home(&running);
    verify(words, 13);
}

#[test]
fn the_same_bytes_go_home_again_when_a_discard_has_dropped_them_there() {
    let donor = donor(GUEST);
    let running = start(&without_prefetching(&donor));
    let words = Words::of(&running.fabric);
    filled(&running, 14);
    let discarder = running.fabric.discarder();
    for round in 0..3 {
        for first in (0..words.pages()).step_by(256) {
            // Resident with a fingerprint, discarded here and at home, and written as before.
            touch_by_write(words, first..first + 128);
            discarder.discard(&[range(first, 128)]).expect("discarded");
            for page in first..first + 128 {
                for word in 0..WORDS_PER_PAGE {
                    let value = pattern(14, page, word);
                    words.at(page, word).store(value, Ordering::Relaxed);
                }
            }
        }
        touch_by_write(words, 0..words.pages());
        verify(words, 14);
        assert!(
            running.fabric.stats().free_pages.dropped_at_home.get() > 0,
            "{round}"
        );
    }
}

/// Threads change words of pages and change most of them back at once, while pages are evicted,
/// rescued, fetched and dropped as unchanged, and connections break.
#[test]
fn changes_that_race_with_the_comparison_are_not_lost() {
    const THREADS: usize = 5;
    const ROUNDS: usize = 40_000;
    /// Evenly over the run.
    const BREAKS: usize = 20;
    let donors = [donor(GUEST), donor(GUEST)];
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    let running = start(&config(GUEST, LOCAL, &addresses));
    let words = Words::of(&running.fabric);
    filled(&running, 15);
    let done = AtomicUsize::new(0);
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let done = &done;
                scope.spawn(move || {
                    let mut random = Random(thread as u64 + 1);
                    // Words of its own in every page, and which of its words are changed.
                    let word_of = |page: usize| (page % 50) * THREADS + thread;
                    let mut changed = vec![0_u64; words.pages()];
                    for _ in 0..ROUNDS {
                        done.fetch_add(1, Ordering::Relaxed);
                        // A part of the pages is used more, and often rescued.
                        let used = if random.below(3) == 0 { 12 } else { 1 };
                        let page = random.below(words.pages() / used);
                        let word = words.at(page, word_of(page));
                        let expected = pattern(15, page, word_of(page)) ^ changed[page];
                        assert_eq!(word.load(Ordering::Relaxed), expected, "page {page}");
                        let bit = 1 << random.below(64);
                        word.fetch_xor(bit, Ordering::Relaxed);
                        if random.below(8) == 0 {
                            changed[page] ^= bit;
                        } else {
                            if random.below(4) == 0 {
                                std::thread::yield_now();
                            }
                            word.fetch_xor(bit, Ordering::Relaxed);
                        }
                    }
                    for (page, changed) in changed.iter().enumerate() {
                        let found = words.at(page, word_of(page)).load(Ordering::Relaxed);
                        assert_eq!(found, pattern(15, page, word_of(page)) ^ changed);
                    }
                })
            })
            .collect();
        let (finished, done, donors) = (&finished, &done, &donors);
        scope.spawn(move || {
            let mut broken = 0;
            while !finished.load(Ordering::Relaxed) {
                let due = done.load(Ordering::Relaxed) * BREAKS / (THREADS * ROUNDS);
                if due > broken {
                    broken = due;
                    donors[due % 2].break_connections();
                }
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        finished.store(true, Ordering::Relaxed);
        for result in results {
            result.expect("a writer");
        }
    });
    let stats = running.fabric.stats();
    let written: u64 = stats
        .donors
        .iter()
        .map(|d| d.pages_written_back.get())
        .sum();
    let (unchanged, cancelled) = (
        stats.evictions_unchanged.get(),
        stats.evictions_cancelled.get(),
    );
    println!(
        "{unchanged} evictions of unchanged pages, {written} written back, {cancelled} cancelled"
    );
    assert!(unchanged > 10_000 && written > 10_000 && cancelled > 100);
}
