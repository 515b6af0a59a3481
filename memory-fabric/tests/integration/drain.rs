//! Donors that are drained while the guest runs: no update is lost, and they hold nothing at the
//! end.

use super::replicas::increment;
use fabric_homes::NodeId;
use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    DonorAddress, DrainError, DrainState, DrainSummary, Drains, FabricConfig, FabricEvent,
    LocalUse, Sealing, TransportKind,
};
use memory_fabric::link::LinkEvent;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;
const FIRST: NodeId = NodeId(1);
const SECOND: NodeId = NodeId(2);

fn at(address: SocketAddr) -> DonorAddress {
    DonorAddress {
        name: None,
        zone: None,
        address,
        fingerprint: None,
        bytes: None,
    }
}

fn between(transport: TransportKind, donors: &[&Donor]) -> FabricConfig {
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    FabricConfig {
        transport,
        checksum: true,
        ..config(GUEST, LOCAL, &addresses)
    }
}

fn drains(running: &Running) -> Drains {
    running.fabric.drains().expect("there are donors")
}

fn summary(running: &Running) -> DrainSummary {
    running.fabric.view().drain().expect("one has begun")
}

fn wait_for_end(running: &Running) -> DrainSummary {
    wait_until("the drain ends", || {
        matches!(
            summary(running).state,
            DrainState::Done | DrainState::Failed(_)
        )
    });
    summary(running)
}

fn assert_no_outage(running: &Running) {
    let events: Vec<_> = running.events.try_iter().collect();
    let is_end = |event: &FabricEvent| matches!(event, FabricEvent::Drained(_));
    assert!(events.iter().all(is_end), "{events:?}");
}

/// Returns the state with which each drain ended, as the monitor was notified of it.
fn ends(events: &[FabricEvent]) -> Vec<(NodeId, DrainState)> {
    let ended = events.iter().filter_map(|event| match event {
        FabricEvent::Drained(drain) => Some((drain.node, drain.state.clone())),
        _ => None,
    });
    ended.collect()
}

/// Drains both donors of the start onto two new ones, one after the other, while threads increment
/// words.
fn drain_both(transport: TransportKind, seal: Sealing, seed: u64) {
    let old = [donor(GUEST), donor(GUEST)];
    let new = [donor(GUEST), donor(GUEST)];
    let mut config = between(transport, &[&old[0], &old[1]]);
    config.seal = seal;
    let running = start(&config);
    let drains = drains(&running);
    let view = running.fabric.view().clone();
    let moment = 20_000 + Random(seed).next() % 40_000;
    let mut begun = 0;
    increment(&running, seed, 100_000, |done| {
        if begun == 0 && done > moment {
            let begins = drains.drain(FIRST, &[at(new[0].address())]);
            assert_eq!(begins.expect("it has room").bytes, GUEST / 2);
            begun = 1;
        }
        let is_done = |node| {
            let drain = view.drain();
            drain.is_some_and(|drain| drain.node == node && drain.state == DrainState::Done)
        };
        if begun == 1 && is_done(FIRST) {
            // Each donor has less than the whole.
            let to = [at(new[1].address())];
            drains.drain(SECOND, &to).expect("it has room");
            begun = 2;
        }
        begun == 2 && is_done(SECOND)
    });
    for donor in &old {
        let pool = donor.pool();
        assert_eq!((pool.leases(), pool.lent_bytes()), (0, 0), "seed {seed}");
    }
    for donor in &new {
        assert_eq!(donor.pool().lent_bytes(), GUEST / 2, "seed {seed}");
    }
    drop(old);
    fill(Words::of(&running.fabric), seed);
    verify(Words::of(&running.fabric), seed);
    let events: Vec<_> = running.events.try_iter().collect();
    let done = [FIRST, SECOND].map(|node| (node, DrainState::Done));
    assert_eq!((events.len(), ends(&events)), (2, done.to_vec()));
    assert_eq!(running.fabric.stats().sealing.rejected.get(), 0);
    let nodes = running.fabric.shutdown();
    let held: Vec<_> = nodes[1..].iter().map(|node| node.memory_bytes).collect();
    assert_eq!(held, [0, 0, GUEST / 2, GUEST / 2]);
    for node in &nodes[1..] {
        let own = node.own_count.expect("the donor reported its counters");
        assert_eq!(own.pages_written, node.pages_written_back, "{node:?}");
        assert_eq!(own.pages_read, node.pages_fetched, "{node:?}");
    }
    for donor in &new {
        wait_until("all leases have ended", || donor.pool().leases() == 0);
    }
}

#[test]
fn no_update_is_lost_when_both_donors_are_drained_onto_new_ones() {
    for seed in 1..=3 {
        drain_both(TransportKind::Tcp, Sealing::Off, seed);
    }
}

#[test]
fn nor_is_one_over_udp() {
    drain_both(TransportKind::Udp, Sealing::Off, 5);
}

#[test]
fn nor_is_one_with_sealed_pages_and_none_is_rejected() {
    drain_both(TransportKind::Tcp, Sealing::On, 6);
}

#[test]
fn a_donor_without_a_named_target_moves_to_what_the_others_have_left_and_lend_more() {
    let donors = [donor(2 * GUEST), donor(GUEST / 2 + 8 * MIB), donor(GUEST)];
    let mut config = between(TransportKind::Tcp, &[&donors[0], &donors[1]]);
    config.donors[0].bytes = Some(GUEST / 2);
    config.donors[1].bytes = Some(GUEST / 2 + 8 * MIB);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 1);
    // The first donor of the start has one block left, and can lend more: a second lease.
    drains(&running).drain(SECOND, &[]).expect("there is room");
    assert_eq!(wait_for_end(&running).state, DrainState::Done);
    verify(words, 1);
    assert_eq!(donors[1].pool().leases(), 0);
    assert_eq!(donors[0].pool().leases(), 2);
    let nodes = running.fabric.nodes();
    let bytes: Vec<_> = nodes.iter().map(|node| node.memory_bytes).collect();
    assert_eq!(bytes[1..], [GUEST / 2, 0, GUEST / 2]);
    // Then that second lease is drained.
    let third = [at(donors[2].address())];
    drains(&running).drain(NodeId(3), &third).expect("room");
    assert_eq!(wait_for_end(&running).state, DrainState::Done);
    assert_eq!(donors[0].pool().leases(), 1);
    verify(words, 1);
    running.fabric.shutdown();
}

#[test]
fn the_rest_of_a_loan_is_used_before_more_is_leased() {
    let donors = [donor(GUEST), donor(GUEST)];
    let mut config = between(TransportKind::Tcp, &[&donors[0], &donors[1]]);
    config
        .donors
        .iter_mut()
        .for_each(|donor| donor.bytes = Some(GUEST));
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 2);
    drains(&running).drain(FIRST, &[]).expect("there is room");
    assert_eq!(wait_for_end(&running).state, DrainState::Done);
    assert_eq!(
        (donors[0].pool().leases(), donors[1].pool().leases()),
        (0, 1)
    );
    assert_eq!(running.fabric.nodes()[2].memory_bytes, GUEST);
    verify(words, 2);
    // The first could lend again, but is gone.
    let [first, _second] = donors;
    drop(first);
    let error = drains(&running).drain(SECOND, &[]).expect_err("refused");
    let text = error.to_string();
    assert!(text.contains("48 MiB have to leave"), "{text}");
    let error = drains(&running).drain(FIRST, &[]).expect_err("refused");
    assert!(matches!(error, DrainError::NoDonor(FIRST)), "{error}");
    running.fabric.shutdown();
}

#[test]
fn a_drain_without_enough_room_is_refused_with_numbers_and_changes_nothing() {
    let donors = [donor(GUEST / 2), donor(GUEST / 2)];
    let small = donor(6 * MIB);
    let running = start(&between(TransportKind::Tcp, &[&donors[0], &donors[1]]));
    let words = Words::of(&running.fabric);
    fill(words, 3);
    let to = [at(small.address())];
    let error = drains(&running).drain(FIRST, &to).expect_err("too little");
    let text = error.to_string();
    for part in [
        "24 MiB have to leave node 1",
        "room for 6 MiB",
        "18 MiB more",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let error = drains(&running)
        .drain(FIRST, &[])
        .expect_err("nothing left");
    assert!(
        matches!(error, DrainError::TooLittle { room_mib: 0, .. }),
        "{error}"
    );
    wait_until("the lease is returned", || small.pool().leases() == 0);
    assert_eq!(running.fabric.view().drain(), None);
    assert_eq!(running.fabric.nodes().len(), 3);
    let bytes: Vec<_> = running.fabric.nodes()[1..]
        .iter()
        .map(|node| node.memory_bytes)
        .collect();
    assert_eq!(bytes, [GUEST / 2, GUEST / 2]);
    verify(words, 3);
    running.fabric.shutdown();
}

/// The drained donor cannot be reached, so that no block can move, and the target is lost.
#[test]
fn a_target_that_is_lost_before_anything_is_there_leaves_everything_where_it_was() {
    let donors = [donor(GUEST), donor(GUEST)];
    let (target, stranger, third) = (donor(GUEST), donor(GUEST), donor(GUEST));
    let near = Proxy::new(donors[0].address(), Mischief::None, 0);
    let far = Proxy::new(target.address(), Mischief::None, 0);
    let mut config = between(TransportKind::Tcp, &[&donors[0], &donors[1]]);
    config.donors[0].address = near.address;
    config.grace = Duration::from_secs(40);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 4);
    near.cut(true);
    let drains = drains(&running);
    drains.drain(FIRST, &[at(far.address)]).expect("room");
    far.cut(true);
    // Its lease is unknown there.
    far.redirect(stranger.address());
    far.cut(false);
    let end = wait_for_end(&running);
    let DrainState::Failed(why) = end.state else {
        panic!("{end:?}");
    };
    assert!(why.contains("24 MiB stay on node 1"), "{why}");
    assert_eq!(end.moved_bytes, 0);
    near.cut(false);
    verify(words, 4);
    let is_of_first = |event: &FabricEvent| match event {
        FabricEvent::Link(LinkEvent::Down { node, .. } | LinkEvent::Up { node }) => *node == FIRST,
        FabricEvent::Drained(drain) => drain.node == FIRST,
        _ => false,
    };
    let events: Vec<_> = running.events.try_iter().collect();
    assert!(events.iter().all(is_of_first), "{events:?}");
    assert_eq!(ends(&events), [(FIRST, DrainState::Failed(why))]);
    drains.drain(FIRST, &[at(third.address())]).expect("room");
    assert_eq!(wait_for_end(&running).state, DrainState::Done);
    verify(words, 4);
    running.fabric.shutdown();
}

#[test]
fn a_drained_donor_that_dies_halfway_is_lost_and_one_that_has_left_is_not_missed() {
    let mut donors = vec![donor(GUEST), donor(GUEST)];
    let (third, fourth) = (donor(GUEST), donor(GUEST));
    let mut config = between(TransportKind::Tcp, &[&donors[0], &donors[1]]);
    config.grace = Duration::from_millis(300);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 5);
    let drains = drains(&running);
    drains.drain(SECOND, &[at(third.address())]).expect("room");
    assert_eq!(wait_for_end(&running).state, DrainState::Done);
    drop(donors.pop());
    verify(words, 5);
    assert_no_outage(&running);
    drains.drain(FIRST, &[at(fourth.address())]).expect("room");
    let error = drains.drain(SECOND, &[]).expect_err("one at a time");
    let is_known = matches!(
        error,
        DrainError::Draining(FIRST) | DrainError::NoDonor(SECOND)
    );
    assert!(is_known, "{error}");
    drop(donors.pop());
    wait_until("its end or its loss", || {
        let lost = running.events.try_iter().any(|event| {
            matches!(event, FabricEvent::Link(LinkEvent::Lost { node, .. }) if node == FIRST)
        });
        lost || summary(&running).state == DrainState::Done
    });
    running.fabric.shutdown();
}

#[test]
fn a_donor_that_has_joined_and_holds_nothing_just_leaves() {
    let (first, second, new) = (donor(GUEST), donor(GUEST), donor(2 * MIB));
    let mut config = between(TransportKind::Tcp, &[&first, &second]);
    let donors = config.donors.iter_mut();
    donors.for_each(|one| one.bytes = Some(GUEST));
    let running = start(&config);
    let (drains, view) = (drains(&running), running.fabric.view().clone());
    // Its share is less than a block; twice, since its place is free again.
    for _ in 0..2 {
        let begun = drains.rebalance(&[at(new.address())]).expect("it joins");
        assert_eq!(begun.bytes, 0);
        wait_until("nothing moves", || {
            view.rebalance().is_some_and(|last| last.is_over())
        });
        assert_eq!(new.pool().leases(), 1);
        let joined = view.nodes()[3].id;
        let drained = drains.drain(joined, &[]).expect("it can leave");
        assert_eq!((drained.node, drained.bytes), (joined, 0));
        assert_eq!(wait_for_end(&running).state, DrainState::Done);
        assert_eq!(new.pool().leases(), 0);
    }
    running.fabric.shutdown();
}

#[test]
fn what_cannot_be_drained_is_refused() {
    let (first, second) = (donor(GUEST), donor(GUEST));
    let mut config = between(TransportKind::Tcp, &[&first, &second]);
    config.local_use = LocalUse::Home;
    let running = start(&config);
    let error = drains(&running).drain(FIRST, &[]).expect_err("exposed");
    assert!(matches!(error, DrainError::Exposed), "{error}");
    running.fabric.shutdown();
    config.local_use = LocalUse::Cache;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    words.at(0, 0).store(7, Ordering::Relaxed);
    for node in [NodeId(0), NodeId(5), NodeId(200)] {
        let error = drains(&running).drain(node, &[]).expect_err("no donor");
        assert!(matches!(error, DrainError::NoDonor(_)), "{error}");
    }
    assert_eq!(words.at(0, 0).load(Ordering::Relaxed), 7);
    running.fabric.shutdown();
    config.local_bytes = GUEST;
    assert!(start(&config).fabric.drains().is_none(), "all is local");
}
