//! Memory with one copy moves by its heat while threads increment words: no update is lost.

use super::rebalance::{donors, held, running};
use super::replicas::{GUEST, increment, replicated};
use fabric_test_support::delay::delayed;
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    DonorUse, DrainError, DrainState, FabricConfig, FabricEvent, HeatPolicy, OnLostMemory, Sealing,
    TransportKind,
};
use memory_fabric::link::LinkEvent;
use memory_fabric::view::FabricView;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(super) const LOCAL: u64 = 16 * MIB;

/// Room of each donor beyond its half of the memory.
const ROOM: u64 = 8 * MIB;

/// Delay of the answers of the slow donor.
pub(super) const DELAY_US: u64 = 4_000;

/// Returns whether all blocks of the fast donor are hot.
fn is_hot(view: &FabricView) -> bool {
    let fast = &view.placement().donors[0];
    fast.hot_bytes == Some(fast.home_bytes)
}

fn hot_blocks_move(seal: Sealing, seed: u64) {
    let all = donors::<2>();
    let delay_us = Arc::new(AtomicU64::new(DELAY_US));
    let slow = delayed(running(&all[1]).address(), delay_us);
    let addresses = [running(&all[0]).address(), slow];
    let mut config = FabricConfig {
        transport: TransportKind::Tcp,
        seal,
        checksum: true,
        ..config(GUEST, LOCAL, &addresses)
    };
    for one in &mut config.donors {
        one.bytes = Some(GUEST / 2 + ROOM);
    }
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    assert_eq!(held(&view), [GUEST / 2; 2]);
    let mut policy = HeatPolicy::default();
    let slow = view.nodes()[2].id;
    let mut stage = 0;
    increment(&fabric, seed, 40_000, |done| {
        match stage {
            // All blocks are in use: those of the slow donor move until the fast one is full.
            0 if done > 5_000 => {
                if held(&view) == [GUEST / 2 + ROOM, GUEST / 2 - ROOM] {
                    stage = 1;
                } else {
                    drains.place_by_heat(&mut policy).expect("one copy");
                }
            }
            // On a busy machine a block is cold for a while.
            1 if is_hot(&view) => {
                // What is hot makes no room for others.
                let mut look = || drains.place_by_heat(&mut policy).expect("one copy");
                let begun: usize = (0..8).map(|_| look()).sum();
                if !is_hot(&view) {
                    stage = 0;
                    return false;
                }
                assert_eq!(begun, 0);
                assert!(view.placement().moved_by_heat_bytes >= ROOM);
                let begun = drains.drain(slow, &[]).expect("the fast one lends more");
                // More if one that was cold has just left the fast one.
                assert!(
                    (GUEST / 2 - ROOM..GUEST / 2).contains(&begun.bytes),
                    "{begun:?}"
                );
                stage = 2;
            }
            2 => {
                // Not while a donor leaves.
                assert_eq!(drains.place_by_heat(&mut policy).expect("one copy"), 0);
                let is_over = view.drain().is_some_and(|drain| drain.is_over());
                stage += i32::from(is_over);
            }
            _ => {}
        }
        stage == 3
    });
    assert_eq!(view.drain().expect("one").state, DrainState::Done);
    // The fast one, by two loans.
    let held = held(&view);
    assert_eq!((held[1], held.iter().sum()), (0, GUEST), "{held:?}");
    let events: Vec<_> = fabric.events.try_iter().collect();
    let is_end = |event: &FabricEvent| matches!(event, FabricEvent::Drained(_));
    assert!(events.iter().all(is_end), "{events:?}");
    assert_eq!(fabric.fabric.stats().sealing.rejected.get(), 0);
    fabric.fabric.shutdown();
}

#[test]
fn hot_blocks_move_to_the_fast_donor_until_it_is_full() {
    hot_blocks_move(Sealing::Off, 1);
    hot_blocks_move(Sealing::On, 2);
}

#[test]
fn copies_do_not_move_by_heat() {
    let all = donors::<2>();
    let addresses = [0, 1].map(|at| running(&all[at]).address());
    let fabric = start(&replicated(&addresses));
    let drains = fabric.fabric.drains().expect("donors");
    let refused = drains.place_by_heat(&mut HeatPolicy::default());
    assert!(matches!(refused, Err(DrainError::Copies)), "{refused:?}");
    assert_eq!(fabric.fabric.view().placement().donors[0].hot_bytes, None);
    fabric.fabric.shutdown();
}

/// Two donors, each with room for all memory, and the delays of their answers.
struct Pair {
    donors: [Option<Donor>; 2],
    delays_us: [Arc<AtomicU64>; 2],
    fabric: Running,
}

impl Pair {
    /// The second one is slow.
    fn start(seal: Sealing, on_lost_memory: OnLostMemory) -> Self {
        let donors = donors::<2>();
        let delays_us: [Arc<AtomicU64>; 2] = Default::default();
        delays_us[1].store(DELAY_US, Ordering::SeqCst);
        let address = |at: usize| delayed(running(&donors[at]).address(), delays_us[at].clone());
        let mut config = FabricConfig {
            transport: TransportKind::Tcp,
            seal,
            checksum: true,
            grace: Duration::from_millis(300),
            on_lost_memory,
            ..config(GUEST, LOCAL, &[0, 1].map(address))
        };
        for one in &mut config.donors {
            one.bytes = Some(GUEST);
        }
        let fabric = start(&config);
        Self {
            donors,
            delays_us,
            fabric,
        }
    }

    /// Returns the events but the ends of drains.
    fn events(&self) -> Vec<FabricEvent> {
        let events = self.fabric.events.try_iter();
        let is_end = |event: &FabricEvent| matches!(event, FabricEvent::Drained(_));
        events.filter(|event| !is_end(event)).collect()
    }
}

/// Heat empties the slow donor while threads increment words. It is lost then, and nothing with it.
fn empty_donor_is_lost(seal: Sealing, seed: u64) {
    let mut pair = Pair::start(seal, OnLostMemory::End);
    let view = pair.fabric.fabric.view().clone();
    let drains = pair.fabric.fabric.drains().expect("donors");
    let emptied = view.nodes()[2].id;
    let mut policy = HeatPolicy::default();
    let mut stage = 0;
    let donors = &mut pair.donors;
    increment(&pair.fabric, seed, 60_000, |done| {
        match stage {
            0 if done > 5_000 => {
                drains.place_by_heat(&mut policy).expect("one copy");
                if held(&view) == [GUEST, 0] {
                    stage = 3;
                }
            }
            3 => {
                assert_eq!(held(&view), [GUEST, 0], "it holds nothing");
                drop(donors[1].take());
                stage = 4;
            }
            4 if view.placement().donors[1].usage == DonorUse::Left => {
                for _ in 0..8 {
                    assert_eq!(drains.place_by_heat(&mut policy).expect("one copy"), 0);
                }
                let gone = drains.drain(emptied, &[]).expect_err("it has left");
                assert!(matches!(gone, DrainError::NoDonor(_)), "{gone}");
                stage = 5;
            }
            _ => {}
        }
        stage == 5
    });
    let words = Words::of(&pair.fabric.fabric);
    fill(words, seed);
    verify(words, seed);
    let events = pair.events();
    assert!(events.is_empty(), "the guest ran on: {events:?}");
    assert_eq!(held(&view)[0], GUEST);
    assert_eq!(pair.fabric.fabric.stats().sealing.rejected.get(), 0);
    pair.fabric.fabric.shutdown();
}

#[test]
fn a_donor_that_heat_has_emptied_is_not_missed_when_it_is_lost() {
    empty_donor_is_lost(Sealing::Off, 10);
    empty_donor_is_lost(Sealing::On, 11);
}

/// Returns whether a page is lost; otherwise it is as it was filled.
fn is_lost(words: Words, page: usize, seed: u64) -> bool {
    let Some(found) = words.read(page) else {
        return true;
    };
    let wanted = (0..WORDS_PER_PAGE).map(|word| pattern(seed, page, word));
    assert!(found.into_iter().eq(wanted), "page {page}");
    false
}

/// Has blocks begin to move off the slow donor, and kills it when some have, and others have not.
fn kill_source(pair: &mut Pair, deadline: Instant) {
    let view = pair.fabric.fabric.view().clone();
    let drains = pair.fabric.fabric.drains().expect("donors");
    let mut policy = HeatPolicy::default();
    while drains.place_by_heat(&mut policy).expect("one copy") == 0 {
        assert!(Instant::now() < deadline, "nothing is hot");
        std::thread::yield_now();
    }
    // A block takes 16 answers and more: a third of a second.
    pair.delays_us[1].store(20_000, Ordering::SeqCst);
    while view.placement().moved_by_heat_bytes < 4 * MIB {
        assert!(Instant::now() < deadline, "nothing moves");
        std::thread::yield_now();
    }
    drop(pair.donors[1].take());
}

fn source_is_lost(seal: Sealing, on_lost_memory: OnLostMemory, seed: u64) -> (Pair, FabricEvent) {
    let mut pair = Pair::start(seal, on_lost_memory);
    let words = Words::of(&pair.fabric.fabric);
    fill(words, seed);
    let deadline = Instant::now() + PATIENCE;
    let finished = AtomicBool::new(false);
    let event = std::thread::scope(|scope| {
        for reader in 0..4 {
            let finished = &finished;
            scope.spawn(move || {
                let mut random = Random(seed * 10 + reader);
                while !finished.load(Ordering::Relaxed) && Instant::now() < deadline {
                    is_lost(words, random.below(words.pages()), seed);
                }
            });
        }
        kill_source(&mut pair, deadline);
        let left = || deadline.saturating_duration_since(Instant::now());
        let event = loop {
            match pair.fabric.events.recv_timeout(left()).expect("its loss") {
                FabricEvent::Link(LinkEvent::Down { .. }) => {}
                other => break other,
            }
        };
        finished.store(true, Ordering::Relaxed);
        event
    });
    (pair, event)
}

#[test]
fn when_the_source_of_moves_is_lost_what_has_moved_is_there() {
    for (seal, seed) in [(Sealing::Off, 20), (Sealing::On, 21)] {
        let (pair, event) = source_is_lost(seal, OnLostMemory::Poison, seed);
        let FabricEvent::Poisoned(lost) = event else {
            panic!("{event:?}");
        };
        let words = Words::of(&pair.fabric.fabric);
        let view = pair.fabric.fabric.view().clone();
        let found = (0..words.pages()).filter(|&page| is_lost(words, page, seed));
        assert_eq!(found.count() as u64, lost.lost_pages, "{lost:?}");
        let held = held(&view);
        assert!(held[0] >= GUEST / 2 + 4 * MIB, "{held:?}");
        assert_eq!(held[0] + held[1], GUEST);
        let lost_bytes = lost.lost_pages << 12;
        assert!((1..=held[1]).contains(&lost_bytes), "{lost:?} of {held:?}");
        // The order has ended, and others can follow.
        let drains = pair.fabric.fabric.drains().expect("donors");
        let first = view.nodes()[1].id;
        let refused = drains.drain(first, &[]).expect_err("no other donor");
        assert!(matches!(refused, DrainError::TooLittle { .. }), "{refused}");
        assert_eq!(pair.fabric.fabric.stats().sealing.rejected.get(), 0);
        pair.fabric.fabric.shutdown();
    }
}
