//! Memory moves to donors that have less than their share while the guest runs: no update is lost, and
//! each block keeps all its copies or pieces.

use super::drain_replicas::joins;
use super::replicas::{GUEST, assert_one_loss, increment, replicated};
use super::stripes::striped;
use fabric_test_support::delay::delayed;
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    DonorPlacement, DrainError, FabricConfig, RebalanceState, Sealing, TransportKind,
};
use memory_fabric::view::FabricView;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(super) fn donors<const N: usize>() -> [Option<Donor>; N] {
    std::array::from_fn(|_| Some(donor(GUEST)))
}

pub(super) fn running(donor: &Option<Donor>) -> &Donor {
    donor.as_ref().expect("running")
}

fn of_two(donors: &[Option<Donor>], transport: TransportKind, seal: Sealing) -> FabricConfig {
    let addresses: Vec<_> = donors
        .iter()
        .map(|donor| running(donor).address())
        .collect();
    let mut config = replicated(&addresses);
    config.transport = transport;
    config.seal = seal;
    config
}

/// Returns what each donor holds, in bytes.
pub(super) fn held(view: &FabricView) -> Vec<u64> {
    let placement = view.placement();
    let held = |donor: &DonorPlacement| donor.home_bytes + donor.copy_bytes;
    placement.donors.iter().map(held).collect()
}

pub(super) fn is_over(view: &FabricView) -> bool {
    view.rebalance().is_some_and(|last| last.is_over())
}

/// A donor joins two others while threads increment words; then one of the first is killed.
fn join_and_kill(transport: TransportKind, seal: Sealing, seed: u64) {
    let mut old = donors::<2>();
    let [new] = donors::<1>();
    let fabric = start(&of_two(&old, transport, seal));
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let mut stage = 0;
    increment(&fabric, seed, 150_000, |done| {
        if stage == 0 && done > 20_000 {
            let to = joins(running(&new).address(), None);
            let begun = drains.rebalance(&[to]).expect("it joins");
            assert!(begun.bytes > 16 * MIB, "{begun:?}");
            stage = 1;
        }
        if stage == 1 {
            let replicas = view.replicas().expect("replicated");
            assert_eq!(replicas.degraded_bytes, 0, "each block keeps two copies");
            if is_over(&view) {
                let last = view.rebalance().expect("one");
                assert_eq!(last.state, RebalanceState::Done, "{last:?}");
                assert_eq!(last.moved_bytes, last.bytes);
                let held = held(&view);
                let (least, most) = (held.iter().min(), held.iter().max());
                assert!(
                    most.expect("three") - least.expect("three") <= 4 * MIB,
                    "{held:?}"
                );
                drop(old[usize::from(seed % 2 == 1)].take());
                stage = 2;
            }
        }
        stage == 2
    });
    assert_one_loss(&fabric, seed);
    fabric.fabric.shutdown();
}

#[test]
fn a_donor_that_joins_gets_its_share_and_another_one_may_be_killed_then() {
    join_and_kill(TransportKind::Tcp, Sealing::Off, 1);
    join_and_kill(TransportKind::Tcp, Sealing::On, 2);
    join_and_kill(TransportKind::Udp, Sealing::Off, 3);
}

/// Kills a donor while memory moves: one of the first two, or the new one.
fn kill_meanwhile(victim: usize, seed: u64) {
    let mut all = donors::<3>();
    let delay_us = Arc::<AtomicU64>::default();
    let slow = delayed(running(&all[2]).address(), Arc::clone(&delay_us));
    let mut config = of_two(&all[..2], TransportKind::Tcp, Sealing::Off);
    config.grace = Duration::from_millis(200);
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let mut stage = 0;
    increment(&fabric, seed, 150_000, |done| {
        match stage {
            0 if done > 20_000 => {
                drains.rebalance(&[joins(slow, None)]).expect("it joins");
                // Each block takes more than half a second from now on: 16 pages in 20 ms.
                delay_us.store(20_000, Ordering::Relaxed);
                stage = 1;
            }
            1 if view.rebalance().is_some_and(|last| last.moved_bytes > 0) => {
                assert!(!is_over(&view), "it is slow");
                drop(all[victim].take());
                delay_us.store(0, Ordering::Relaxed);
                stage = 2;
            }
            2 if is_over(&view) => stage = 3,
            _ => {}
        }
        let degraded = view.replicas().expect("replicated").degraded_bytes;
        stage == 3 && degraded == 0
    });
    let last = view.rebalance().expect("one");
    let has_failed = matches!(last.state, RebalanceState::Failed(_));
    assert_eq!(has_failed, last.moved_bytes < last.bytes, "{last:?}");
    // What one of the first two had may be made again at the new one instead.
    assert!(has_failed || victim < 2, "{last:?}");
    assert_one_loss(&fabric, seed);
    fabric.fabric.shutdown();
}

#[test]
fn any_donor_may_be_killed_while_memory_moves() {
    for victim in 0..3 {
        kill_meanwhile(victim, 10 + victim as u64);
    }
}

/// Memory of two donors begins to move to a slow third one, is stopped, and goes on. Returns what each
/// donor holds then.
pub(super) fn stopped_and_gone_on(of_two: impl Fn(&[Option<Donor>]) -> FabricConfig) -> Vec<u64> {
    let all = donors::<3>();
    let delay_us = Arc::<AtomicU64>::default();
    let slow = delayed(running(&all[2]).address(), Arc::clone(&delay_us));
    let fabric = start(&of_two(&all[..2]));
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    assert!(!drains.stop_rebalancing());
    let mut stage = 0;
    let mut moved = 0;
    increment(&fabric, 20, 100_000, |done| {
        match stage {
            0 if done > 20_000 => {
                drains.rebalance(&[joins(slow, None)]).expect("it joins");
                delay_us.store(20_000, Ordering::Relaxed);
                let refused = drains.rebalance(&[]).expect_err("it is in progress");
                assert!(matches!(refused, DrainError::Rebalancing), "{refused}");
                let refused = drains.drain(view.nodes()[1].id, &[]);
                let refused = refused.expect_err("it is in progress");
                assert!(refused.to_string().contains("--stop"), "{refused}");
                stage = 1;
            }
            1 if view.rebalance().is_some_and(|last| last.moved_bytes > 0) => {
                assert!(drains.stop_rebalancing());
                delay_us.store(0, Ordering::Relaxed);
                stage = 2;
            }
            2 if is_over(&view) => {
                let last = view.rebalance().expect("one");
                assert_eq!(last.state, RebalanceState::Stopped, "{last:?}");
                assert!(last.moved_bytes < last.bytes, "{last:?}");
                moved = last.moved_bytes;
                let rest = drains.rebalance(&[]).expect("it goes on");
                assert_eq!(rest.bytes + moved, last.bytes);
                stage = 3;
            }
            3 if is_over(&view) => {
                let last = view.rebalance().expect("one");
                assert_eq!(last.state, RebalanceState::Done, "{last:?}");
                assert!(!drains.stop_rebalancing());
                stage = 4;
            }
            _ => {}
        }
        stage == 4
    });
    let held = held(&view);
    fabric.fabric.shutdown();
    held
}

#[test]
fn it_is_stopped_and_goes_on() {
    stopped_and_gone_on(|all| of_two(all, TransportKind::Tcp, Sealing::Off));
}

#[test]
fn a_donor_that_lends_nothing_is_named() {
    let all = donors::<2>();
    let addresses = [0, 1].map(|at| running(&all[at]).address());
    for config in [config(GUEST, 16 * MIB, &addresses), replicated(&addresses)] {
        let fabric = start(&config);
        let drains = fabric.fabric.drains().expect("donors");
        let nobody = joins("127.0.0.1:9".parse().expect("an address"), None);
        let refused = drains.rebalance(&[nobody]).expect_err("nobody is there");
        assert!(refused.to_string().contains("127.0.0.1:9"), "{refused}");
        // With less than is said, another boot of the guest would not have it.
        let small = donor(8 * MIB);
        let mut named = joins(small.address(), None);
        named.bytes = Some(10 * MIB);
        let refused = drains.rebalance(&[named.clone()]).expect_err("too little");
        assert!(refused.to_string().contains("8388608"), "{refused}");
        assert_eq!(small.pool().leases(), 0);
        // As it is, each has its share.
        assert_eq!(drains.rebalance(&[]).expect("nothing to do").bytes, 0);
        fabric.fabric.shutdown();
    }
}

/// Of six donors of stripes one is drained onto a new one, another joins, and two are killed at once.
fn replace_pieces(transport: TransportKind, seal: Sealing, seed: u64) {
    let mut old = donors::<6>();
    let new = donors::<2>();
    let addresses: Vec<_> = old.iter().map(|donor| running(donor).address()).collect();
    let mut config = striped("4+2", &addresses);
    config.transport = transport;
    config.seal = seal;
    let fabric = start(&config);
    let view = fabric.fabric.view().clone();
    let drains = fabric.fabric.drains().expect("donors");
    let node = view.nodes()[1].id;
    let mut stage = 0;
    increment(&fabric, seed, 150_000, |done| {
        let degraded = view.replicas().expect("redundant").degraded_bytes;
        assert!(
            stage > 3 || degraded == 0,
            "each block keeps all its pieces"
        );
        match stage {
            0 if done > 20_000 => {
                let refused = drains.drain(node, &[]).expect_err("no donor has none");
                assert!(refused.to_string().contains("room for 0 MiB"), "{refused}");
                let to = joins(running(&new[0]).address(), None);
                drains.drain(node, &[to]).expect("it joins");
                stage = 1;
            }
            1 if view.drain().is_some_and(|drain| drain.is_over()) => {
                let drain = view.drain().expect("one");
                assert!(drain.bytes >= 8 * MIB, "{drain:?}");
                assert_eq!(drain.moved_bytes, drain.bytes, "{drain:?}");
                assert_eq!(running(&old[0]).pool().leases(), 0);
                drop(old[0].take());
                let to = joins(running(&new[1]).address(), None);
                drains.rebalance(&[to]).expect("it joins");
                stage = 2;
            }
            2 if is_over(&view) => {
                let last = view.rebalance().expect("one");
                assert_eq!(last.state, RebalanceState::Done, "{last:?}");
                assert!(running(&new[1]).pool().leases() > 0);
                stage = 4;
                let (first, second) = (old[1].take(), old[2].take());
                std::thread::scope(|scope| {
                    scope.spawn(|| drop(first));
                    drop(second);
                });
            }
            _ => {}
        }
        stage == 4
    });
    fabric.fabric.shutdown();
}

#[test]
fn a_donor_of_pieces_leaves_for_a_new_one_and_another_joins_for_its_share() {
    replace_pieces(TransportKind::Tcp, Sealing::Off, 30);
    replace_pieces(TransportKind::Tcp, Sealing::On, 31);
    replace_pieces(TransportKind::Udp, Sealing::Off, 32);
}
