//! Donors of replicated memory that are drained while the guest runs: each block keeps two copies, and
//! no update is lost.

use super::replicas::{GUEST, assert_one_loss, events, increment, replicated};
use super::stripes::striped;
use fabric_homes::NodeId;
use fabric_test_support::delay::delayed;
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    DonorAddress, DrainError, DrainState, FabricConfig, HotplugError, Sealing, TransportKind,
};
use memory_fabric::view::FabricView;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Drains one of three donors while threads increment words, and kills another one after it.
fn drain_one(transport: TransportKind, is_sealed: bool, seed: u64) {
    let mut donors = [Some(donor(GUEST)), Some(donor(GUEST)), Some(donor(GUEST))];
    let addresses = donors.each_ref().map(|donor| {
        let donor = donor.as_ref().expect("running");
        donor.address()
    });
    let mut config = replicated(&addresses);
    config.transport = transport;
    config.seal = match is_sealed {
        true => Sealing::On,
        false => Sealing::Off,
    };
    let running = start(&config);
    let view = running.fabric.view().clone();
    let drains = running.fabric.drains().expect("donors");
    let mut random = Random(seed);
    let first = random.below(3);
    let second = (first + 1 + random.below(2)) % 3;
    let node = view.nodes()[1 + first].id;
    let mut stage = 0;
    increment(&running, seed, 200_000, |done| {
        if stage == 0 && done > 20_000 {
            drains.drain(node, &[]).expect("the others have room");
            stage = 1;
        }
        let is_done = view.drain().is_some_and(|drain| drain.is_over());
        if stage == 1 && is_done {
            let replicas = view.replicas().expect("replicated");
            assert_eq!((replicas.losses, replicas.out.len()), (0, 0));
            assert_drained(&view, donors[first].as_ref().expect("running"), first);
            drop(donors[first].take());
            // Both copies are elsewhere, so one of the others may be lost as well.
            drop(donors[second].take());
            stage = 2;
        } else if stage == 1 {
            let replicas = view.replicas().expect("replicated");
            assert_eq!(replicas.degraded_bytes, 0, "each block keeps two copies");
        }
        stage == 2
    });
    assert_one_loss(&running, seed);
    running.fabric.shutdown();
}

/// Asserts that a donor has left and holds nothing.
pub(super) fn assert_drained(view: &FabricView, donor: &Donor, link: usize) {
    let drain = view.drain().expect("a drain");
    assert_eq!(drain.state, DrainState::Done, "{drain:?}");
    assert_eq!(drain.moved_bytes, drain.bytes, "{drain:?}");
    assert!(drain.bytes >= 16 * MIB, "{drain:?}");
    assert_eq!((donor.pool().leases(), donor.pool().lent_bytes()), (0, 0));
    assert!(view.links()[link].is_none());
}

#[test]
fn a_donor_leaves_while_both_copies_of_each_block_are_kept() {
    for seed in 1..=2 {
        drain_one(TransportKind::Tcp, false, seed);
    }
}

#[test]
fn one_leaves_sealed_memory_and_over_udp() {
    drain_one(TransportKind::Tcp, true, 3);
    drain_one(TransportKind::Udp, false, 4);
}

#[test]
fn a_donor_that_cannot_leave_is_refused_with_numbers_and_used_on() {
    let donors = [donor(GUEST), donor(GUEST)];
    let addresses = donors.each_ref().map(|donor| donor.address());
    let mut config = replicated(&addresses);
    config.seal = Sealing::Auto;
    let running = start(&config);
    let drains = running.fabric.drains().expect("donors");
    let node = running.fabric.view().nodes()[1].id;
    let text = drains.drain(node, &[]).expect_err("no third donor");
    let text = text.to_string();
    assert!(text.contains("room for 0 MiB"), "{text}");
    let refused = |to: &str, part: &str| {
        let to = joins(to.parse().expect("an address"), None);
        let text = drains.drain(node, &[to]).expect_err(part);
        assert!(text.to_string().contains(part), "{text}");
    };
    refused("127.0.0.1:9", "127.0.0.1:9");
    refused("192.0.2.1:9", "start the VM with --seal on");
    // A donor of the VM gets no second lease, which would be lost with the first.
    refused(&addresses[1].to_string(), "room for 0 MiB");
    let small = donor(8 * MIB);
    refused(&small.address().to_string(), "40 MiB more by --to");
    assert_eq!(small.pool().leases(), 0);
    let text = drains.drain(NodeId(9), &[]).expect_err("nobody");
    assert!(text.to_string().contains("no donor of this VM"), "{text}");
    increment(&running, 5, 50_000, |_| true);
    assert!(events(&running).is_empty());
    running.fabric.shutdown();
}

pub(super) fn joins(address: SocketAddr, zone: Option<&str>) -> DonorAddress {
    DonorAddress {
        name: None,
        zone: zone.map(str::to_owned),
        address,
        fingerprint: None,
        bytes: None,
    }
}

#[test]
fn a_donor_that_is_killed_while_it_leaves_loses_nothing() {
    let mut donors = [Some(donor(GUEST)), Some(donor(GUEST)), Some(donor(GUEST))];
    let mut addresses = donors.each_ref().map(|donor| {
        let donor = donor.as_ref().expect("running");
        donor.address()
    });
    // Until the donor is killed, each block takes more than half a second: 16 pages in 20 ms.
    let delay_us = Arc::<AtomicU64>::default();
    for other in &mut addresses[1..] {
        *other = delayed(*other, Arc::clone(&delay_us));
    }
    let mut config = replicated(&addresses);
    config.grace = Duration::from_millis(200);
    let running = start(&config);
    let view = running.fabric.view().clone();
    let drains = running.fabric.drains().expect("donors");
    let node = view.nodes()[1].id;
    let mut is_killed = false;
    increment(&running, 6, 150_000, |done| {
        if done > 20_000 && !is_killed {
            delay_us.store(20_000, Ordering::Relaxed);
            drains.drain(node, &[]).expect("the others have room");
            drop(donors[0].take());
            delay_us.store(0, Ordering::Relaxed);
            is_killed = true;
        }
        let replicas = view.replicas().expect("replicated");
        let is_over = view.drain().is_some_and(|drain| drain.is_over());
        is_killed && is_over && replicas.degraded_bytes == 0
    });
    let drain = view.drain().expect("a drain");
    match &drain.state {
        DrainState::Failed(why) => assert!(why.contains("was lost"), "{why}"),
        // All of its copies were made again before the end of the drain was noticed.
        DrainState::Done => assert!(drain.moved_bytes < drain.bytes, "{drain:?}"),
        DrainState::Moving | DrainState::Leaving => panic!("{drain:?}"),
    }
    running.fabric.shutdown();
}

/// Kills a donor without room elsewhere while threads increment words, has one join, and kills another
/// one when all is whole.
fn join_for_lost(count: usize, config: impl Fn(&[SocketAddr]) -> FabricConfig, seed: u64) {
    let mut donors: Vec<_> = (0..count).map(|_| Some(donor(GUEST))).collect();
    let addresses: Vec<_> = donors.iter().flatten().map(Donor::address).collect();
    let spare = donor(GUEST);
    let joining = joins(spare.address(), None);
    let mut config = config(&addresses);
    config.grace = Duration::from_millis(200);
    let running = start(&config);
    let view = running.fabric.view().clone();
    let drains = running.fabric.drains().expect("donors");
    // Not even the part of one of the donors that can join.
    let small = donor(2 * MIB);
    let mut stage = 0;
    increment(&running, seed, 200_000, |done| {
        if stage == 0 && done > 20_000 {
            drop(donors[0].take());
            wait_until("copies have no place", || {
                view.replicas().is_some_and(|now| now.displaced_bytes > 0)
            });
            let refused = drains.join_for_copies(&joins(small.address(), None));
            assert!(
                matches!(refused, Err(DrainError::TooSmall { .. })),
                "{refused:?}"
            );
            assert_eq!(small.pool().leases(), 0);
            let lent = drains.join_for_copies(&joining).expect("it lends");
            assert_eq!(lent, spare.pool().lent_bytes());
            stage = 1;
        }
        let replicas = view.replicas().expect("replicated");
        let is_whole = replicas.repaired_bytes > 0 && replicas.degraded_bytes == 0;
        if stage == 1 && is_whole {
            // What it had is on the one that joined, so another one may be lost as well.
            drop(donors[1].take());
            stage = 2;
        }
        stage == 2
    });
    assert_eq!(spare.pool().leases(), 1);
    let again = drains.join_for_copies(&joining).expect_err("it is one");
    assert!(again.to_string().contains("already"), "{again}");
    assert_eq!(spare.pool().leases(), 1);
    running.fabric.shutdown();
    assert_eq!(spare.pool().leases(), 0);
    let ended = drains.join_for_copies(&joining).expect_err("it has ended");
    assert!(
        matches!(ended, DrainError::Change(HotplugError::Ended)),
        "{ended}"
    );
    assert_eq!(spare.pool().leases(), 0);
}

#[test]
fn copies_of_a_killed_donor_are_made_again_on_one_that_joins() {
    join_for_lost(2, replicated, 7);
}

#[test]
fn pieces_of_a_killed_donor_are_made_again_on_one_that_joins() {
    join_for_lost(3, |donors| striped("2+1", donors), 8);
}

#[test]
fn without_copies_no_donor_joins_for_them() {
    let donors = [donor(GUEST), donor(GUEST)];
    let running = start(&config(GUEST, 16 * MIB, &[donors[0].address()]));
    let drains = running.fabric.drains().expect("donors");
    let joining = joins(donors[1].address(), None);
    let text = drains.join_for_copies(&joining).expect_err("one copy");
    assert!(text.to_string().contains("one copy of each page"), "{text}");
    assert_eq!(donors[1].pool().leases(), 0);
    running.fabric.shutdown();
}
