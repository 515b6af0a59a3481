//! Memory with one copy moves by its heat while threads increment words: no update is lost.

use super::rebalance::{donors, held, running};
use super::replicas::{GUEST, increment, replicated};
use fabric_test_support::delay::delayed;
use fabric_test_support::*;
use memory_fabric::fabric::{
    DrainError, DrainState, FabricConfig, FabricEvent, HeatPolicy, Sealing, TransportKind,
};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const LOCAL: u64 = 16 * MIB;

/// Room of each donor beyond its half of the memory.
const ROOM: u64 = 8 * MIB;

/// Delay of the answers of the slow donor.
const DELAY_US: u64 = 4_000;

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
                drains.place_by_heat(&mut policy).expect("one copy");
                let found = view.placement();
                if found.moved_by_heat_bytes == ROOM {
                    assert_eq!(held(&view), [GUEST / 2 + ROOM, GUEST / 2 - ROOM]);
                    let hot = found.donors[0].hot_bytes.expect("one copy");
                    assert!(hot >= ROOM, "those that moved are hot: {found:?}");
                    stage = 1;
                }
            }
            1 => {
                // What is hot makes no room for others.
                for _ in 0..8 {
                    assert_eq!(drains.place_by_heat(&mut policy).expect("one copy"), 0);
                }
                let begun = drains.drain(slow, &[]).expect("the fast one lends more");
                assert_eq!(begun.bytes, GUEST / 2 - ROOM);
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
