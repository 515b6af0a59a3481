//! Prefetched pages.

use super::*;

#[test]
fn loom_a_write_fault_against_a_page_that_is_fetched_ahead_and_dropped() {
    loom::model(|| {
        let world = World::remote();
        let prefetcher = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.fetch_ahead())
        };
        let evictor = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.drop_unused())
        };
        let served = world.serve_write_fault();
        prefetcher.join().unwrap();
        evictor.join().unwrap();
        if !served {
            // Mapped for reading by the prefetcher, or dropped: the write faults again.
            assert!(world.handed_back.load(SeqCst), "a fault was forgotten");
            assert!(world.serve_write_fault());
        }
        assert_eq!(world.mapping.load(SeqCst), WRITABLE);
        world.check(7);
        world.here.store(8, SeqCst);
        world.check(8);
    });
}

#[test]
fn loom_a_discard_against_a_page_that_is_fetched_ahead_and_touched() {
    // Three threads: all interleavings would take hours.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let world = World::remote();
        let prefetcher = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.fetch_ahead())
        };
        let evictor = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let discarded = world.discard();
                world.drop_unused();
                discarded
            })
        };
        let served = world.serve_write_fault();
        prefetcher.join().unwrap();
        // The holder of the page has released it.
        let mut discarded = evictor.join().unwrap();
        if !served {
            assert!(world.handed_back.load(SeqCst), "a fault was forgotten");
            assert!(world.serve_write_fault());
        }
        if !discarded {
            discarded = world.discard();
        }
        assert!(discarded, "the page is still held");
        // Its old bytes, which were in transit, have not returned.
        world.check(0);
        assert!(world.serve_write_fault());
        world.check(0);
        let state = world.entry.state();
        assert!(state.is_listed(), "a page with bytes that no queue has");
        assert_eq!(world.queues.load(SeqCst), 1);
    });
}
