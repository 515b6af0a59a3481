//! Memory with one copy moves to donors that have less than their share while the guest runs: no update
//! is lost.

use super::drain_replicas::joins;
use super::rebalance::{donors, held, is_over, running, stopped_and_gone_on};
use super::replicas::{GUEST, increment};
use fabric_test_support::delay::delayed;
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    DrainError, DrainState, FabricConfig, FabricEvent, LocalUse, RebalanceState, Sealing,
    TransportKind,
};
use memory_fabric::page::{PageIndex, PageRange};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LOCAL: u64 = 16 * MIB;

fn of_two(donors: &[Option<Donor>], transport: TransportKind, seal: Sealing) -> FabricConfig {
    let addresses: Vec<_> = donors.iter().map(|one| running(one).address()).collect();
    FabricConfig {
        transport,
        seal,
        checksum: true,
        ..config(GUEST, LOCAL, &addresses)
    }
}

/// A donor joins two others while threads increment words, gets its share, and is drained again.
fn join_and_leave(transport: TransportKind, seal: Sealing, seed: u64) {
    let old = donors::<2>();
    let [new] = donors::<1>();
    let mut config = of_two(&old, transport, seal);
    let rest = GUEST / 2 + 8 * MIB;
    config
        .donors
        .iter_mut()
        .for_each(|one| one.bytes = Some(rest));
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let mut stage = 0;
    increment(&fabric, seed, 120_000, |done| {
        match stage {
            0 if done > 20_000 => {
                let to = joins(running(&new).address(), None);
                let begun = drains.rebalance(&[to]).expect("it joins");
                assert_eq!(begun.bytes, GUEST / 3, "{begun:?}");
                stage = 1;
            }
            1 if is_over(&view) => {
                let last = view.rebalance().expect("one");
                assert_eq!(last.state, RebalanceState::Done, "{last:?}");
                assert_eq!(last.moved_bytes, last.bytes);
                assert_eq!(held(&view), [GUEST / 3; 3]);
                assert_eq!(drains.rebalance(&[]).expect("done").bytes, 0);
                stage = 2;
            }
            // Each has room for 8 MiB, and for what has left it.
            2 if is_over(&view) => {
                let node = view.nodes()[3].id;
                drains.drain(node, &[]).expect("room");
                stage = 3;
            }
            3 if view.drain().is_some_and(|drain| drain.is_over()) => stage = 4,
            _ => {}
        }
        stage == 4
    });
    assert_eq!(running(&new).pool().leases(), 0, "seed {seed}");
    assert_eq!(held(&view)[..2].iter().sum::<u64>(), GUEST);
    let is_end =
        |event: &FabricEvent| matches!(event, FabricEvent::Rebalanced(_) | FabricEvent::Drained(_));
    let events: Vec<_> = fabric.events.try_iter().collect();
    assert!(events.len() == 3 && events.iter().all(is_end), "{events:?}");
    assert_eq!(fabric.fabric.stats().sealing.rejected.get(), 0);
    fabric.fabric.shutdown();
}

#[test]
fn a_donor_that_joins_gets_its_share_of_memory_with_one_copy() {
    join_and_leave(TransportKind::Tcp, Sealing::Off, 1);
    join_and_leave(TransportKind::Tcp, Sealing::On, 2);
    join_and_leave(TransportKind::Udp, Sealing::Off, 3);
}

/// The guest frees pages whose reads for a move are on their way: none of them is taken for one that a
/// donor has spoilt.
#[test]
fn pages_that_are_freed_while_their_block_moves_end_nothing() {
    let old = donors::<2>();
    let [new] = donors::<1>();
    let delay_us = Arc::<AtomicU64>::default();
    let mut config = of_two(&old, TransportKind::Tcp, Sealing::On);
    for donor in &mut config.donors {
        donor.address = delayed(donor.address, Arc::clone(&delay_us));
    }
    let fabric = start(&config);
    let words = Words::of(&fabric.fabric);
    let pages = usize::try_from(GUEST / 4096).expect("small");
    for page in 0..pages {
        words.at(page, 3).store(page as u64 + 1, Ordering::Relaxed);
    }
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    // So few pages of each block are left that all are read at once, and leave room for drops.
    let discarder = fabric.fabric.discarder();
    let of_blocks = |first: usize, count: u32| -> Vec<PageRange> {
        let blocks = (0..pages / 512).map(|block| u32::try_from(block * 512 + first));
        let starts = blocks.map(|start| PageIndex::new(start.expect("small")));
        starts.map(|start| PageRange::new(start, count)).collect()
    };
    discarder.discard(&of_blocks(16, 496)).expect("discarded");
    delay_us.store(100_000, Ordering::Relaxed);
    let to = joins(running(&new).address(), None);
    drains.rebalance(&[to]).expect("it joins");
    let begun = Instant::now();
    // Who moves a block posts the reads of the next one before it looks at what was freed.
    while view.rebalance().expect("one").moved_bytes == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no block moves");
        std::thread::yield_now();
    }
    discarder.discard(&of_blocks(0, 16)).expect("discarded");
    // Before memory is used: a donor that is taken for lost would never answer.
    let end = fabric.events.recv_timeout(Duration::from_secs(60));
    assert!(matches!(end, Ok(FabricEvent::Rebalanced(_))), "{end:?}");
    let last = view.rebalance().expect("one");
    assert_eq!(last.state, RebalanceState::Done, "{last:?}");
    delay_us.store(0, Ordering::Relaxed);
    for round in 0..2 {
        for page in 0..pages {
            let word = words.at(page, 3);
            let wanted = if round == 0 { 0 } else { page as u64 + 7 };
            assert_eq!(word.load(Ordering::Relaxed), wanted, "page {page}");
            word.store(page as u64 + 7, Ordering::Relaxed);
        }
    }
    assert_eq!(fabric.fabric.stats().sealing.rejected.get(), 0);
    fabric.fabric.shutdown();
}

/// Blocks move to a donor that joins, and return when it is drained, while threads increment words:
/// each time to slots that others have left, since there is no other room.
fn to_and_fro(transport: TransportKind, seal: Sealing, seed: u64) {
    const ROUNDS: u32 = 4;
    let old: [Option<Donor>; 2] = std::array::from_fn(|_| Some(donor(GUEST / 2)));
    let new = donor(GUEST / 2);
    let fabric = start(&of_two(&old, transport, seal));
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let (mut round, mut stage) = (0, 0);
    increment(&fabric, seed, 120_000, |done| {
        match stage {
            0 if done > 10_000 => {
                let begun = drains.rebalance(&[joins(new.address(), None)]);
                assert_eq!(begun.expect("it joins").bytes, GUEST / 3, "round {round}");
                stage = 1;
            }
            1 if is_over(&view) => {
                let last = view.rebalance().expect("one");
                assert_eq!(last.state, RebalanceState::Done, "{last:?}");
                let nodes = view.nodes();
                let node = nodes.last().expect("it joined").id;
                drains.drain(node, &[]).expect("room that blocks left");
                stage = 2;
            }
            2 if view.drain().is_some_and(|drain| drain.is_over()) => {
                let last = view.drain().expect("one");
                assert_eq!(last.state, DrainState::Done, "{last:?}");
                assert_eq!(held(&view)[..2], [GUEST / 2; 2], "round {round}");
                round += 1;
                stage = if round == ROUNDS { 3 } else { 0 };
            }
            _ => {}
        }
        stage == 3
    });
    for one in &old {
        let pool = running(one).pool();
        assert_eq!((pool.leases(), pool.lent_bytes()), (1, GUEST / 2));
    }
    assert_eq!(fabric.fabric.stats().sealing.rejected.get(), 0);
    fabric.fabric.shutdown();
}

#[test]
fn slots_that_blocks_have_left_are_used_again_and_no_update_is_lost() {
    to_and_fro(TransportKind::Tcp, Sealing::Off, 40);
    to_and_fro(TransportKind::Tcp, Sealing::On, 41);
    to_and_fro(TransportKind::Udp, Sealing::Off, 42);
}

#[test]
fn a_rebalancing_of_memory_with_one_copy_is_stopped_and_goes_on() {
    let held = stopped_and_gone_on(|all| of_two(all, TransportKind::Tcp, Sealing::Off));
    assert_eq!(held, [GUEST / 3; 3]);
}

/// Its answers are late, so that no block is there when it is lost.
#[test]
fn a_new_donor_that_is_lost_before_a_block_is_there_leaves_all_where_it_was() {
    let mut all = donors::<4>();
    let delay_us = Arc::<AtomicU64>::default();
    let slow = delayed(running(&all[2]).address(), Arc::clone(&delay_us));
    let mut config = of_two(&all[..2], TransportKind::Tcp, Sealing::Off);
    config.grace = Duration::from_millis(300);
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let mut stage = 0;
    increment(&fabric, 30, 100_000, |done| {
        match stage {
            0 if done > 20_000 => {
                delay_us.store(100_000, Ordering::Relaxed);
                drains.rebalance(&[joins(slow, None)]).expect("it joins");
                drop(all[2].take());
                stage = 1;
            }
            1 if is_over(&view) => {
                let last = view.rebalance().expect("one");
                let RebalanceState::Failed(why) = &last.state else {
                    panic!("{last:?}");
                };
                assert!(why.contains("16 MiB stay where they were"), "{why}");
                assert_eq!(last.moved_bytes, 0);
                assert_eq!(held(&view)[..2], [GUEST / 2; 2]);
                // It can be repeated, with another one.
                let to = joins(running(&all[3]).address(), None);
                drains.rebalance(&[to]).expect("it joins");
                stage = 2;
            }
            2 if is_over(&view) => stage = 3,
            _ => {}
        }
        stage == 3
    });
    let last = view.rebalance().expect("one");
    assert_eq!(last.state, RebalanceState::Done, "{last:?}");
    let events: Vec<_> = fabric.events.try_iter().collect();
    let is_end = |event: &FabricEvent| matches!(event, FabricEvent::Rebalanced(_));
    assert!(events.iter().all(is_end), "the guest ran on: {events:?}");
    fabric.fabric.shutdown();
}

#[test]
fn donors_that_the_guest_sees_are_not_rebalanced() {
    let all = donors::<2>();
    let mut config = of_two(&all, TransportKind::Tcp, Sealing::Off);
    config.local_use = LocalUse::Home;
    let fabric = start(&config);
    let drains = fabric.fabric.drains().expect("donors");
    let refused = drains.rebalance(&[]).expect_err("exposed");
    assert!(matches!(refused, DrainError::Exposed), "{refused}");
    fabric.fabric.shutdown();
}
