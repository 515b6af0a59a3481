//! Pages that are dropped because they are equal to what their home holds, and the slots of
//! their fingerprints.

use super::*;
use crate::fingerprint::FreeSlots;
use loom::sync::atomic::AtomicU64;

/// A page whose fingerprint is known is evicted while a write fault comes in; then it is evicted
/// once more, changed or not.
fn fetched_page_against_eviction(changes: bool) {
    loom::model(move || {
        let world = World::remote();
        assert!(world.serve_write_fault());
        // The evictor has taken it out, to put it on probation.
        world.queues.store(0, SeqCst);
        let evictor = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.evict())
        };
        let served = world.serve_write_fault();
        evictor.join().unwrap();
        if !served {
            assert!(world.handed_back.load(SeqCst), "a fault was forgotten");
            assert!(world.serve_write_fault());
        }
        assert_eq!(world.written.load(SeqCst), 0, "nothing has changed yet");
        let mut wanted = 7;
        if changes && world.mapping.load(SeqCst) == WRITABLE {
            wanted = 8;
            world.here.store(8, SeqCst);
        }
        world.check(wanted);
        world.queues.store(0, SeqCst);
        world.evict();
        world.check(wanted);
        assert_eq!(world.written.load(SeqCst), u32::from(wanted == 8));
        if world.entry.state().kind() == Kind::Remote {
            let is_free = |slot: &AtomicU32| slot.load(SeqCst) == GONE;
            assert!(world.remembered.iter().all(is_free), "a slot of no page");
        }
    });
}

#[test]
fn loom_an_unchanged_page_is_dropped_without_a_write_back() {
    fetched_page_against_eviction(false);
}

#[test]
fn loom_a_changed_page_is_written_back_whenever_it_is_touched() {
    fetched_page_against_eviction(true);
}

/// A changed page is touched while it is written back, and evicted once more, without a change or
/// with one.
#[test]
fn loom_what_was_sent_is_not_sent_again() {
    for changes in [false, true] {
        loom::model(move || {
            // Home has 3, and the page was never fetched.
            let world = World::resident(true);
            let evictor = {
                let world = Arc::clone(&world);
                thread::spawn(move || world.evict())
            };
            let served = world.serve_write_fault();
            evictor.join().unwrap();
            if !served {
                assert!(world.handed_back.load(SeqCst), "a fault was forgotten");
                assert!(world.serve_write_fault());
            }
            let sent = world.written.load(SeqCst);
            assert!(sent <= 1);
            let mut wanted = 7;
            if changes && world.mapping.load(SeqCst) == WRITABLE {
                wanted = 8;
                world.here.store(8, SeqCst);
            }
            if world.entry.state().kind() == Kind::Resident {
                world.evict();
            }
            world.check(wanted);
            let due = if wanted == 8 { sent + 1 } else { 1 };
            assert_eq!(world.written.load(SeqCst), due);
        });
    }
}

#[test]
fn loom_a_slot_has_one_owner_at_a_time() {
    // Three threads: all interleavings would take hours.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let world = Arc::new((
            FreeSlots::new(2),
            [AtomicU64::new(0), AtomicU64::new(0)],
            [AtomicBool::new(false), AtomicBool::new(false)],
        ));
        let take = |world: &(FreeSlots, [AtomicU64; 2], [AtomicBool; 2])| {
            let (free, words, owned) = world;
            let slot = free.take(|slot| &words[slot as usize])?;
            assert!(!owned[slot as usize].swap(true, SeqCst), "two owners");
            // What is stored there.
            words[slot as usize].store(u64::MAX, SeqCst);
            Some(slot)
        };
        let put = |world: &(FreeSlots, [AtomicU64; 2], [AtomicBool; 2]), slot: u32| {
            let (free, words, owned) = world;
            assert!(owned[slot as usize].swap(false, SeqCst));
            free.put(slot, |slot| &words[slot as usize]);
        };
        // Both were used before, and are free.
        let (one, other) = (take(&world).unwrap(), take(&world).unwrap());
        assert!(take(&world).is_none());
        put(&world, one);
        put(&world, other);
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    let slot = take(&world).expect("one for each");
                    put(&world, slot);
                })
            })
            .collect();
        for taker in takers {
            taker.join().unwrap();
        }
        assert!(take(&world).is_some() && take(&world).is_some());
        assert!(take(&world).is_none());
    });
}
