//! Two copies of each page: no wrong byte and no pause when a donor is lost at any moment, and a
//! donor that missed write-backs is not read before it has them.

use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::*;
use memory_fabric::fabric::{FabricConfig, FabricEvent, Redundancy, TransportKind};
use memory_fabric::link::LinkEvent;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(super) const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;
const WRITERS: usize = 4;

pub(super) fn replicated(donors: &[SocketAddr]) -> FabricConfig {
    let mut config = config(GUEST, LOCAL, donors);
    config.redundancy = Redundancy::Copies;
    config.checksum = true;
    config
}

/// Increments random words with several threads until `increments` were made and `disturb`, which is
/// called with their number, has returned true; then every word must hold its number of increments.
/// When one of the threads panics, all end, and this panics with it.
pub(super) fn increment(
    running: &Running,
    seed: u64,
    increments: u64,
    mut disturb: impl FnMut(u64) -> bool + Send,
) {
    let words = Words::of(&running.fabric);
    let pages = words.pages();
    let (done, disturbed) = (AtomicU64::new(0), AtomicBool::new(false));
    let started = Instant::now();
    let write = |writer: usize, ended: &AtomicBool| {
        let mut random = Random(seed * 100 + writer as u64);
        let mut added = vec![0_u32; pages * WORDS_PER_PAGE];
        let is_due =
            || done.load(Ordering::Relaxed) < increments || !disturbed.load(Ordering::Relaxed);
        while is_due() && !ended.load(Ordering::Relaxed) {
            assert!(started.elapsed() < PATIENCE, "seed {seed} takes too long");
            // Some are sequential, so that pages are prefetched.
            let run = if random.below(64) == 0 { 48 } else { 1 };
            let first = random.below(pages - run);
            let word = random.below(WORDS_PER_PAGE);
            for page in first..first + run {
                for step in 0..8 {
                    let word = (word + step * 61) % WORDS_PER_PAGE;
                    words.at(page, word).fetch_add(1, Ordering::Relaxed);
                    added[page * WORDS_PER_PAGE + word] += 1;
                }
            }
            done.fetch_add(8 * run as u64, Ordering::Relaxed);
        }
        added
    };
    let (added, ()) = run_beside(WRITERS, write, |ended| {
        while !ended.load(Ordering::Relaxed) {
            let is_done = disturb(done.load(Ordering::Relaxed));
            disturbed.store(is_done, Ordering::Relaxed);
            std::thread::yield_now();
        }
    });
    let mut totals = vec![0_u64; pages * WORDS_PER_PAGE];
    for (index, added) in added.iter().flat_map(|added| added.iter().enumerate()) {
        totals[index] += u64::from(*added);
    }
    for (index, &total) in totals.iter().enumerate() {
        let (page, word) = (index / WORDS_PER_PAGE, index % WORDS_PER_PAGE);
        let found = words.at(page, word).load(Ordering::Relaxed);
        assert_eq!(found, total, "seed {seed}: page {page} word {word}");
    }
}

/// Returns the events until now.
pub(super) fn events(running: &Running) -> Vec<FabricEvent> {
    running.events.try_iter().collect()
}

fn next_event(running: &Running) -> FabricEvent {
    running.events.recv_timeout(PATIENCE).expect("an event")
}

pub(super) fn assert_one_loss(running: &Running, seed: u64) {
    let events = events(running);
    let losses = events
        .iter()
        .filter(|event| matches!(event, FabricEvent::Degraded { .. }));
    assert_eq!(losses.count(), 1, "seed {seed}: {events:?}");
    let paused = |event: &FabricEvent| matches!(event, FabricEvent::Link(_));
    assert!(!events.iter().any(paused), "seed {seed}: {events:?}");
}

/// Kills one of two donors while threads increment words.
fn kill_one(transport: TransportKind, seeds: RangeInclusive<u64>) {
    for seed in seeds {
        let mut donors = [Some(donor(GUEST)), Some(donor(GUEST))];
        let addresses = donors.each_ref().map(|donor| {
            let donor = donor.as_ref().expect("running");
            donor.address()
        });
        let mut config = replicated(&addresses);
        config.transport = transport;
        let running = start(&config);
        let mut random = Random(seed);
        let victim = random.below(2);
        let moment = 10_000 + random.next() % 120_000;
        increment(&running, seed, 150_000, |done| {
            if done >= moment {
                drop(donors[victim].take());
            }
            done >= moment
        });
        assert!(donors[victim].is_none(), "seed {seed}: nothing was killed");
        assert_one_loss(&running, seed);
        let replicas = running.fabric.view().replicas().expect("replicated");
        assert_eq!((replicas.losses, replicas.out.len()), (1, 1));
        assert_eq!(replicas.degraded_bytes, replicas.bytes);
        running.fabric.shutdown();
    }
}

#[test]
fn no_update_is_lost_when_one_of_two_donors_is_killed_at_any_moment() {
    kill_one(TransportKind::Tcp, 1..=8);
}

#[test]
fn nor_is_one_over_udp() {
    kill_one(TransportKind::Udp, 1..=2);
}

#[test]
fn each_page_is_written_to_both_donors_and_read_from_one() {
    let donors = [donor(GUEST), donor(GUEST)];
    let addresses = donors.each_ref().map(|donor| donor.address());
    let running = start(&replicated(&addresses));
    let words = Words::of(&running.fabric);
    fill(words, 3);
    verify(words, 3);
    let nodes = running.fabric.shutdown();
    for node in &nodes[1..] {
        let own = node.own_count.expect("the donor reported its counters");
        assert_eq!(own.pages_written, node.pages_written_back);
        assert_eq!(own.pages_read, node.pages_fetched);
        assert!(node.pages_written_back > 8_000, "{nodes:?}");
    }
    assert_eq!(nodes[1].pages_written_back, nodes[2].pages_written_back);
    let fetched = nodes[1].pages_fetched + nodes[2].pages_fetched;
    let written = nodes[1].pages_written_back;
    assert!(
        fetched >= 8_000 && fetched < written + written / 4,
        "{nodes:?}"
    );
}

#[test]
fn copies_of_a_killed_donor_move_to_the_others_and_a_second_one_may_be_killed() {
    for seed in 1..=2_u64 {
        let mut donors = [Some(donor(GUEST)), Some(donor(GUEST)), Some(donor(GUEST))];
        let addresses = donors.each_ref().map(|donor| {
            let donor = donor.as_ref().expect("running");
            donor.address()
        });
        let mut config = replicated(&addresses);
        config.grace = Duration::from_millis(200);
        let running = start(&config);
        let view = running.fabric.view().clone();
        let mut random = Random(seed);
        let first = random.below(3);
        let second = (first + 1 + random.below(2)) % 3;
        let mut killed = 0;
        increment(&running, seed, 200_000, |done| {
            if killed == 0 && done > 20_000 + random.next() % 50_000 {
                drop(donors[first].take());
                killed = 1;
            }
            let replicas = view.replicas().expect("replicated");
            let is_whole = replicas.repaired_bytes > 0 && replicas.degraded_bytes == 0;
            if killed == 1 && is_whole {
                drop(donors[second].take());
                killed = 2;
            }
            killed == 2
        });
        let paused = |event: &FabricEvent| matches!(event, FabricEvent::Link(_));
        let events = events(&running);
        assert!(!events.iter().any(paused), "seed {seed}: {events:?}");
        running.fabric.shutdown();
    }
}

/// Without zones, donors 0 and 2 of four that lend the same hold both copies of blocks.
#[test]
fn the_donors_of_a_zone_are_killed_at_once_and_nothing_is_lost() {
    for seed in 1..=2_u64 {
        let mut donors = [0; 4].map(|_| Some(donor(GUEST)));
        let addresses = donors.each_ref().map(|donor| {
            let donor = donor.as_ref().expect("running");
            donor.address()
        });
        let mut config = replicated(&addresses);
        config.grace = Duration::from_millis(200);
        for (donor, zone) in config.donors.iter_mut().zip(["a", "b", "a", "b"]) {
            donor.zone = Some(zone.to_owned());
        }
        let running = start(&config);
        let view = running.fabric.view().clone();
        let moment = 20_000 + Random(seed).next() % 50_000;
        let mut is_whole_again = false;
        increment(&running, seed, 200_000, |done| {
            if done >= moment && donors[0].is_some() {
                let killed = [donors[0].take(), donors[2].take()];
                std::thread::scope(|scope| {
                    for donor in killed {
                        scope.spawn(|| drop(donor));
                    }
                });
            }
            let replicas = view.replicas().expect("replicated");
            is_whole_again = replicas.losses == 2 && replicas.degraded_bytes == 0;
            is_whole_again
        });
        let paused = |event: &FabricEvent| matches!(event, FabricEvent::Link(_));
        let events = events(&running);
        assert!(!events.iter().any(paused), "seed {seed}: {events:?}");
        let replicas = view.replicas().expect("replicated");
        assert_eq!(replicas.in_one_zone_bytes, replicas.bytes, "seed {seed}");
        running.fabric.shutdown();
    }
}

/// Links are cut and restored in turn, each time only when all copies are valid again: the donor
/// that was away has missed write-backs, and is the only one with all bytes soon after.
fn cut_in_turn(times: u64, missed: u64) {
    let donors = [donor(GUEST), donor(GUEST)];
    let proxies = donors
        .each_ref()
        .map(|donor| Proxy::new(donor.address(), Mischief::None, 0));
    let addresses = proxies.each_ref().map(|proxy| proxy.address);
    let running = start(&replicated(&addresses));
    let view = running.fabric.view().clone();
    let mut cuts = 0_u64;
    let mut cut_at: Option<u64> = None;
    increment(&running, 7, 100_000, |done| {
        let at = usize::from(cuts % 2 == 1);
        let replicas = view.replicas().expect("replicated");
        match cut_at {
            None if replicas.degraded_bytes == 0 && done > 20_000 && cuts < times => {
                proxies[at].cut(true);
                cut_at = Some(done);
            }
            Some(before) if !replicas.out.is_empty() && done > before + missed => {
                proxies[at].cut(false);
                cut_at = None;
                cuts += 1;
                let deadline = Instant::now() + PATIENCE;
                while view.replicas().expect("replicated").degraded_bytes > 0 {
                    assert!(Instant::now() < deadline, "the copies are not restored");
                    std::thread::yield_now();
                }
            }
            _ => {}
        }
        cuts == times
    });
    let paused = |event: &FabricEvent| matches!(event, FabricEvent::Link(_));
    let events = events(&running);
    assert!(!events.iter().any(paused), "{events:?}");
    running.fabric.shutdown();
}

#[test]
fn a_donor_that_returns_is_not_read_before_it_has_what_it_missed() {
    cut_in_turn(4, 20_000);
}

#[test]
fn a_donor_that_was_away_for_a_moment_is_not_read_before_it_has_the_few_pages_it_missed() {
    cut_in_turn(6, 20);
}

#[test]
fn the_loss_of_both_donors_is_a_loss_that_is_named() {
    let (first, second) = (donor(GUEST), donor(GUEST));
    let mut config = replicated(&[first.address(), second.address()]);
    config.grace = Duration::from_millis(300);
    let running = start(&config);
    fill(Words::of(&running.fabric), 5);
    drop(first);
    let event = next_event(&running);
    let FabricEvent::Degraded { node, .. } = event else {
        panic!("{event:?}");
    };
    assert_eq!(node.0, 1);
    verify(Words::of(&running.fabric), 5);
    drop(second);
    let event = next_event(&running);
    assert!(
        matches!(event, FabricEvent::Link(LinkEvent::Down { node, .. }) if node.0 == 2),
        "{event:?}"
    );
    let event = next_event(&running);
    assert!(
        matches!(event, FabricEvent::Link(LinkEvent::Lost { node, .. }) if node.0 == 2),
        "{event:?}"
    );
    running.fabric.shutdown();
}

#[test]
fn discarded_pages_are_zero_and_new_ones_survive_a_loss() {
    let mut donors = vec![donor(GUEST), donor(GUEST)];
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    let running = start(&replicated(&addresses));
    let words = Words::of(&running.fabric);
    fill(words, 11);
    let half = words.pages() / 2;
    let discarder = running.fabric.discarder();
    discarder.discard(&[range(0, half)]).expect("discarded");
    for page in (0..half).step_by(2) {
        for word in 0..WORDS_PER_PAGE {
            words
                .at(page, word)
                .store(pattern(12, page, word), Ordering::Relaxed);
        }
    }
    // The second donor is left.
    drop(donors.remove(0));
    for page in 0..words.pages() {
        match page {
            _ if page >= half => verify_page(words, 11, page),
            _ if page % 2 == 0 => verify_page(words, 12, page),
            _ => assert_all(words, page..page + 1, 0),
        }
    }
    running.fabric.shutdown();
}

#[test]
fn donors_that_cannot_hold_two_copies_are_refused_with_numbers() {
    let (large, small) = (donor(2 * GUEST), donor(16 * MIB));
    let text = refusal(&replicated(&[large.address(), small.address()]));
    assert!(
        text.contains("48 MiB") && text.contains("of 16 MiB") && text.contains("by 16 MiB"),
        "{text}"
    );
    let text = refusal(&replicated(&[large.address()]));
    assert!(text.contains("name at least 2"), "{text}");
}
