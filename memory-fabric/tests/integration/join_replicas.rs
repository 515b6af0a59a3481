//! Donors that join replicated memory for one that is drained: no update is lost, and each block keeps
//! two copies.

use super::drain_replicas::{assert_drained, joins};
use super::replicas::{GUEST, assert_one_loss, increment, replicated};
use fabric_test_support::delay::delayed;
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{DrainState, Sealing, TransportKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn donors<const N: usize>() -> [Option<Donor>; N] {
    std::array::from_fn(|_| Some(donor(GUEST)))
}

fn running(donor: &Option<Donor>) -> &Donor {
    donor.as_ref().expect("running")
}

/// Both donors of the start are drained onto two new ones while threads increment words, and then
/// one of these is killed.
fn replace_both(transport: TransportKind, seal: Sealing, seed: u64) {
    let mut old = donors::<2>();
    let mut new = donors::<2>();
    let mut config = replicated(&[running(&old[0]).address(), running(&old[1]).address()]);
    config.transport = transport;
    config.seal = seal;
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let nodes = [1, 2].map(|link: usize| view.nodes()[link].id);
    let mut stage = 0;
    increment(&fabric, seed, 200_000, |done| {
        let is_over = view.drain().is_none_or(|drain| drain.is_over());
        let replicas = view.replicas().expect("replicated");
        if stage < 3 {
            assert_eq!(replicas.degraded_bytes, 0, "each block keeps two copies");
            assert_eq!((replicas.losses, replicas.out.len()), (0, 0));
        }
        match stage {
            0 | 1 if is_over && done > 20_000 => {
                if stage == 1 {
                    assert_drained(&view, running(&old[0]), 0);
                }
                let to = joins(running(&new[stage]).address(), None);
                drains.drain(nodes[stage], &[to]).expect("it joins");
                stage += 1;
            }
            2 if is_over => {
                assert_drained(&view, running(&old[1]), 1);
                drop(old[0].take());
                drop(old[1].take());
                drop(new[0].take());
                stage = 3;
            }
            _ => {}
        }
        stage == 3
    });
    assert_one_loss(&fabric, seed);
    let donors = view.placement().donors;
    assert_eq!(donors.len(), 4);
    fabric.fabric.shutdown();
    assert_eq!(running(&new[1]).pool().leases(), 0);
}

#[test]
fn both_donors_of_the_start_leave_for_new_ones_and_one_of_these_may_be_killed() {
    for seed in 1..=2 {
        replace_both(TransportKind::Tcp, Sealing::Off, seed);
    }
}

#[test]
fn donors_join_sealed_memory_and_over_udp() {
    replace_both(TransportKind::Tcp, Sealing::On, 3);
    replace_both(TransportKind::Udp, Sealing::Off, 4);
}

#[test]
fn a_new_donor_that_is_killed_while_copies_move_there_loses_nothing_and_another_may_join() {
    let old = donors::<2>();
    let [mut lost, third] = donors::<2>();
    let addresses = [running(&old[0]).address(), running(&old[1]).address()];
    // Until it is killed, each block takes more than half a second: 16 pages in 20 ms.
    let delay_us = Arc::<AtomicU64>::default();
    let slow = delayed(running(&lost).address(), Arc::clone(&delay_us));
    let mut config = replicated(&addresses);
    config.grace = Duration::from_millis(200);
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let node = view.nodes()[1].id;
    let mut stage = 0;
    increment(&fabric, 5, 150_000, |done| {
        let drain = view.drain();
        let degraded = view.replicas().expect("replicated").degraded_bytes;
        match stage {
            0 if done > 20_000 => {
                // Before copies move.
                let (pool, delay_us) = (Arc::clone(running(&lost).pool()), Arc::clone(&delay_us));
                let slowed = std::thread::spawn(move || {
                    let deadline = Instant::now() + Duration::from_secs(60);
                    while pool.leases() == 0 {
                        assert!(Instant::now() < deadline, "it does not join");
                        std::thread::yield_now();
                    }
                    delay_us.store(20_000, Ordering::Relaxed);
                });
                drains.drain(node, &[joins(slow, None)]).expect("it joins");
                slowed.join().expect("no panic");
                stage = 1;
            }
            1 if drain.as_ref().is_some_and(|drain| drain.moved_bytes > 0) => {
                drop(lost.take());
                delay_us.store(0, Ordering::Relaxed);
                stage = 2;
            }
            2 if drain.as_ref().is_some_and(|drain| drain.is_over()) => {
                let state = drain.expect("one").state;
                assert!(matches!(state, DrainState::Failed(_)), "{state:?}");
                stage = 3;
            }
            // What it had is made again on the donor that was to leave.
            3 if degraded == 0 => {
                let to = joins(running(&third).address(), None);
                drains.drain(node, &[to]).expect("it joins");
                stage = 4;
            }
            4 if drain.as_ref().is_some_and(|drain| drain.is_over()) => {
                let drain = drain.expect("one");
                assert_eq!((drain.state, degraded), (DrainState::Done, 0));
                stage = 5;
            }
            _ => {}
        }
        stage == 5
    });
    let pool = running(&old[0]).pool();
    assert_eq!((pool.leases(), pool.lent_bytes()), (0, 0));
    fabric.fabric.shutdown();
}

#[test]
fn copies_go_to_a_new_donor_of_another_zone_than_the_copy_that_stays() {
    let old = donors::<2>();
    let new = donors::<2>();
    let mut config = replicated(&[running(&old[0]).address(), running(&old[1]).address()]);
    for (donor, zone) in config.donors.iter_mut().zip(["a", "b"]) {
        donor.zone = Some(zone.to_owned());
    }
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let node = view.nodes()[1].id;
    // The first one has as much room, and has to hold nothing.
    let to = ["b", "c"].into_iter().zip(&new);
    let to: Vec<_> = to
        .map(|(zone, donor)| joins(running(donor).address(), Some(zone)))
        .collect();
    let mut has_begun = false;
    increment(&fabric, 6, 50_000, |done| {
        if done > 10_000 && !has_begun {
            drains.drain(node, &to).expect("they join");
            has_begun = true;
        }
        has_begun && view.drain().is_some_and(|drain| drain.is_over())
    });
    assert_drained(&view, running(&old[0]), 0);
    let placement = view.placement();
    let zones = placement.donors.iter().map(|donor| donor.zone.as_deref());
    assert_eq!(
        zones.collect::<Vec<_>>(),
        [Some("a"), Some("b"), Some("b"), Some("c")]
    );
    let held = placement
        .donors
        .iter()
        .map(|donor| donor.home_bytes + donor.copy_bytes);
    let held: Vec<u64> = held.collect();
    assert_eq!((held[0], held[2]), (0, 0), "{placement:?}");
    assert_eq!(held[1], held[3], "{placement:?}");
    assert_eq!(view.replicas().expect("replicated").in_one_zone_bytes, 0);
    fabric.fabric.shutdown();
}
