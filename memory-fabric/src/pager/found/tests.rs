//! What the file has of a page whose bytes are elsewhere is never what the guest sees.

use super::*;
use crate::fabric::TransportKind;
use crate::page_map::Kind;
use crate::support::{
    MIB, Running, WORDS_PER_PAGE, Words, assert_all, config, donor, pattern, start,
    start_as_on_old_kernels, start_without_write_protection, verify_page,
};
use std::sync::atomic::Ordering;

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;
/// Pages that the guest writes, twice what there is room for.
const WRITTEN: usize = 8192;
const SEED: u64 = 3;

fn shared(running: &Running) -> &Shared {
    let shared = running.fabric.view().pager();
    shared.expect("a pager")
}

fn index(page: usize) -> PageIndex {
    PageIndex::new(u32::try_from(page).expect("a small guest"))
}

/// Behind the pager's back, as the kernel does it. It would make zeroes; where they belong, they
/// would show nothing.
fn put_into_the_file(running: &Running, pages: impl IntoIterator<Item = usize>) {
    for page in pages {
        let written = shared(running)
            .memory
            .write(index(page), &[0xee; PAGE_SIZE]);
        written.expect("written");
    }
}

fn write(words: Words, page: usize, seed: u64) {
    for word in 0..WORDS_PER_PAGE {
        let value = pattern(seed, page, word);
        words.at(page, word).store(value, Ordering::Relaxed);
    }
}

/// First touches: the page itself is found, or neighbours that are filled along with it, one or
/// all of them.
fn untouched_pages_are_zero(running: &Running, first: usize) {
    let words = Words::of(&running.fabric);
    let found: [&[usize]; 5] = [&[3], &[0, 7], &[3, 4, 15], &[2, 3], &[0, 1, 2, 3, 4, 5]];
    for (window, found) in found.into_iter().enumerate() {
        for writes in [false, true] {
            let window = first + (2 * window + usize::from(writes)) * 16;
            put_into_the_file(running, found.iter().map(|page| window + page));
            if writes {
                words.at(window + 3, 9).fetch_or(0, Ordering::Relaxed);
            }
            assert_eq!(words.at(window + 3, 9).load(Ordering::Relaxed), 0);
            assert_all(words, window..window + 16, 0);
        }
    }
}

fn pages_that_are_found_are_written_over(running: Running) {
    let words = Words::of(&running.fabric);
    // While memory is plentiful, and neighbours are filled too.
    untouched_pages_are_zero(&running, WRITTEN + 1024);
    assert!(shared(&running).memory.writes_by_view());
    for page in 0..WRITTEN {
        write(words, page, SEED);
    }
    untouched_pages_are_zero(&running, WRITTEN + 2048);

    let is_remote = |&page: &usize| {
        let state = shared(&running).map.entry(index(page)).state();
        state.kind() == Kind::Remote
    };
    let gone: Vec<usize> = (0..WRITTEN).filter(is_remote).step_by(8).collect();
    assert!(gone.len() > 400, "{} pages", gone.len());
    put_into_the_file(&running, gone.iter().copied());
    for (turn, &page) in gone.iter().enumerate() {
        if turn % 2 == 0 {
            words.at(page, 7).fetch_or(0, Ordering::Relaxed);
        }
        verify_page(words, SEED, page);
        let state = shared(&running).map.entry(index(page)).state();
        // It could not be mapped write-protected, so its writes are not seen.
        let seen = shared(&running).continue_write_protected || state.kind() != Kind::Resident;
        assert!(seen || state.is_dirty(), "page {page}: {state:?}");
    }
    // Writes to them are seen, wherever the pages have been since.
    for &page in &gone {
        write(words, page, SEED + 1);
    }
    for page in 0..WRITTEN {
        let written_again = gone.binary_search(&page).is_ok();
        verify_page(words, SEED + u64::from(written_again), page);
    }
    for &page in &gone {
        verify_page(words, SEED + 1, page);
    }
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert!(resident <= LOCAL, "{resident} bytes, {LOCAL} is the budget");
    running.fabric.shutdown();
}

#[test]
fn pages_that_are_found_in_the_file_are_written_over() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.prefetch = false;
    pages_that_are_found_are_written_over(start(&config));
}

#[test]
fn they_are_without_continue_write_protected() {
    let mut config = config(GUEST, LOCAL, &[]);
    config.transport = TransportKind::Loopback;
    config.prefetch = false;
    pages_that_are_found_are_written_over(start_as_on_old_kernels(&config));
}

/// What a kernel does that loses write protection: a write to a page that was read is not seen.
#[test]
fn writes_that_the_kernel_does_not_show_are_kept_without_write_protection() {
    let mut config = config(GUEST, LOCAL, &[]);
    config.transport = TransportKind::Loopback;
    config.prefetch = false;
    let running = start_without_write_protection(&config);
    let words = Words::of(&running.fabric);
    for page in 0..WRITTEN {
        write(words, page, SEED);
    }
    for page in 0..WRITTEN {
        verify_page(words, SEED, page);
        // Here, unless it was evicted just now; then the write is an ordinary fault.
        let target = shared(&running).memory.guest_page(index(page));
        shared(&running).uffd.allow_writes(target).expect("allowed");
        write(words, page, SEED + 1);
    }
    for page in 0..WRITTEN {
        verify_page(words, SEED + 1, page);
    }
    assert_eq!(shared(&running).stats.evictions_clean.get(), 0);
    running.fabric.shutdown();
}
