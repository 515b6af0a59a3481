//! The slot that a block has left is used for another block.

use super::*;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

const OLD: u32 = 1;
const NEW: u32 = 2;

#[test]
fn loom_no_fetch_reads_a_slot_that_is_used_again() {
    loom::model(|| {
        let world = World::remote();
        // As the home table does, not sequentially consistent.
        let home = Arc::new(AtomicU32::new(OLD));
        // The bytes in the old slot; those in the new one are the same until it is used again.
        let slot = Arc::new(AtomicU32::new(7));
        let fault = {
            let (world, home, slot) = (Arc::clone(&world), Arc::clone(&home), Arc::clone(&slot));
            thread::spawn(move || {
                let seen = world.entry.state();
                assert!(world.entry.begin_fetch(seen));
                let came = match home.load(Acquire) {
                    OLD => slot.load(Relaxed),
                    _ => 7,
                };
                assert_eq!(came, 7, "these are the bytes of another block");
                let _ = world.entry.abandon_fetch();
            })
        };
        home.swap(NEW, AcqRel);
        if !world.entry.is_fetching_after_move() {
            slot.store(9, Release);
        }
        fault.join().unwrap();
        assert!(!world.entry.is_fetching_after_move());
    });
}
