//! A donor is lost for good, and the VM continues without the pages that only it had.

use fabric_test_support::*;
use memory_fabric::EXTENTS_MAX;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{FabricEvent, LostMemory, OnLostMemory};
use memory_fabric::link::LinkEvent;
use std::sync::atomic::Ordering;
use std::time::Duration;

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;
/// Pages from this one on were never written.
const WRITTEN: usize = 11_000;
/// What is written in the second half, which one of two donors has, and cannot be here all at once.
const AWAY: u64 = WRITTEN as u64 - (GUEST / 2 + LOCAL) / 4096;

fn running(donors: &[Donor]) -> Running {
    let addresses: Vec<_> = donors.iter().map(Donor::address).collect();
    let mut config = config(GUEST, LOCAL, &addresses);
    config.grace = Duration::from_millis(100);
    config.on_lost_memory = OnLostMemory::Poison;
    start(&config)
}

fn lost(running: &Running) -> LostMemory {
    loop {
        match running.events.recv_timeout(PATIENCE).expect("an event") {
            FabricEvent::Poisoned(lost) => return lost,
            FabricEvent::Link(LinkEvent::Down { .. }) => {}
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn fill_written(words: Words, seed: u64) {
    for page in 0..WRITTEN {
        for word in 0..WORDS_PER_PAGE {
            words
                .at(page, word)
                .store(pattern(seed, page, word), Ordering::Relaxed);
        }
    }
}

/// Reads every page; returns the number of those that are lost.
fn count_lost(words: Words, seed: u64) -> u64 {
    let mut lost = 0;
    for page in 0..words.pages() {
        let wanted = |word| {
            if page < WRITTEN {
                pattern(seed, page, word)
            } else {
                0
            }
        };
        match words.read(page) {
            Some(found) => {
                let is_right = found
                    .iter()
                    .enumerate()
                    .all(|(w, &found)| found == wanted(w));
                assert!(is_right, "page {page}");
            }
            None => lost += 1,
        }
    }
    lost
}

#[test]
fn exactly_the_pages_that_only_a_lost_donor_had_are_lost() {
    let mut donors = vec![donor(GUEST), donor(GUEST)];
    let running = running(&donors);
    let fabric = &running.fabric;
    let words = Words::of(fabric);
    fill_written(words, 5);
    // Most pages come, are read, and leave unchanged.
    assert_eq!(count_lost(words, 5), 0);
    let second = donors.pop();
    drop(second);
    let event = lost(&running);
    assert!(event.lost_pages >= AWAY, "{event:?}");
    assert!(
        event.kept_pages > 1000,
        "pages that are here, or were never written: {event:?}"
    );
    assert_eq!(count_lost(words, 5), event.lost_pages);
    let summary = fabric.view().lost();
    assert_eq!(summary.lost_pages, event.lost_pages);
    assert_eq!(summary.poisoned_pages, event.lost_pages, "each was touched");
    let extents = &summary.extents;
    assert_eq!(extents.bytes, event.lost_pages << 12, "{extents:?}");
    assert!((1..=EXTENTS_MAX).contains(&extents.ranges.len()));
    let listed: u64 = extents.ranges.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(listed == extents.bytes, extents.omitted == 0, "{extents:?}");
    for (start, bytes) in &extents.ranges {
        for page in start >> 12..(start + bytes) >> 12 {
            let page = usize::try_from(page).expect("a small number");
            assert!(words.read(page).is_none(), "page {page} is not lost");
        }
    }
    // Pages that stay are evicted no more, and those of the other donor still are.
    for _ in 0..3 {
        assert_eq!(count_lost(words, 5), event.lost_pages);
    }
    assert_eq!(fabric.view().lost().lost_pages, event.lost_pages);
    running.fabric.shutdown();
}

#[test]
fn what_waits_for_a_lost_page_is_released() {
    let mut donors = vec![donor(GUEST), donor(GUEST)];
    let running = running(&donors);
    let fabric = &running.fabric;
    let words = Words::of(fabric);
    fill_written(words, 6);
    std::thread::scope(|scope| {
        let second = donors.pop();
        drop(second);
        // While the donor is away, and after its loss.
        let readers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| count_lost(words, 6)))
            .collect();
        let event = lost(&running);
        for reader in readers {
            assert_eq!(reader.join().expect("every byte right"), event.lost_pages);
        }
    });
    running.fabric.shutdown();
}

#[test]
fn writers_lose_nothing_but_lost_pages() {
    let mut donors = vec![donor(GUEST), donor(GUEST)];
    let running = running(&donors);
    let fabric = &running.fabric;
    let words = Words::of(fabric);
    fill_written(words, 7);
    let second = donors.pop();
    drop(second);
    let event = lost(&running);
    let pages: Vec<usize> = (0..words.pages())
        .filter(|&page| words.read(page).is_some())
        .collect();
    assert_eq!((words.pages() - pages.len()) as u64, event.lost_pages);
    for round in 8..11 {
        for &page in &pages {
            for word in 0..WORDS_PER_PAGE {
                words
                    .at(page, word)
                    .store(pattern(round, page, word), Ordering::Relaxed);
            }
        }
        for &page in &pages {
            verify_page(words, round, page);
        }
    }
    assert_eq!(fabric.view().lost().lost_pages, event.lost_pages);
    running.fabric.shutdown();
}

#[test]
fn a_lost_page_that_the_guest_frees_is_usable_again() {
    let mut donors = vec![donor(GUEST), donor(GUEST)];
    let running = running(&donors);
    let fabric = &running.fabric;
    let words = Words::of(fabric);
    fill_written(words, 12);
    let second = donors.pop();
    drop(second);
    let event = lost(&running);
    let all = || 0..words.pages();
    let gone: Vec<usize> = all().filter(|&page| words.read(page).is_none()).collect();
    wait_until("all that is lost is listed", || {
        fabric.view().lost().extents.bytes == (gone.len() as u64) << 12
    });
    let half = &gone[..gone.len() / 2];
    for &page in half {
        fabric
            .discarder()
            .discard(&[range(page, 1)])
            .expect("discarded");
    }
    for &page in half {
        assert_all(words, page..page + 1, 0);
        words.at(page, 3).store(7, Ordering::Relaxed);
    }
    for &page in half {
        assert_eq!(words.at(page, 3).load(Ordering::Relaxed), 7);
    }
    let left = all().filter(|&page| words.read(page).is_none()).count();
    assert_eq!(left, gone.len() - half.len());
    let summary = fabric.view().lost();
    assert_eq!(summary.recovered_pages, half.len() as u64);
    assert_eq!(summary.lost_pages, event.lost_pages);
    assert_eq!(summary.extents.bytes, (left as u64) << 12);
    running.fabric.shutdown();
}

#[test]
fn without_it_a_lost_donor_is_reported_as_before() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.grace = Duration::from_millis(100);
    let running = start(&config);
    fill(Words::of(&running.fabric), 1);
    drop(donor);
    loop {
        match running.events.recv_timeout(PATIENCE).expect("an event") {
            FabricEvent::Link(LinkEvent::Lost { .. }) => break,
            FabricEvent::Link(LinkEvent::Down { .. }) => {}
            other => panic!("unexpected {other:?}"),
        }
    }
    running.fabric.shutdown();
}
