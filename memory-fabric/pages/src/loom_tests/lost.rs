//! A page whose home is lost.

use super::*;

impl World {
    /// Marks the page as lost if its bytes were only at home, as `pager::losses::sweep` does.
    /// Returns false when another thread holds it.
    fn sweep(&self) -> bool {
        loop {
            let seen = self.entry.state();
            match seen.kind() {
                Kind::Remote => {
                    let _ = self.entry.lose(seen);
                }
                Kind::Fetching | Kind::Installing | Kind::Dropping => return false,
                _ => return true,
            }
        }
    }

    /// Poisons the page that this thread holds, as `pager::fault` does. Returns true: its fault is
    /// served.
    pub(super) fn poison(&self) -> bool {
        assert_eq!(self.here.load(SeqCst), GONE, "poisoned over bytes");
        assert_ne!(self.mapping.load(SeqCst), WRITABLE, "poisoned while mapped");
        self.mapping.store(POISONED, SeqCst);
        // All that wait for the page are woken by the poison itself.
        let _ = self.entry.finish_poison();
        true
    }

    /// Makes a lost page that this thread holds usable again, as `pager::evict::discard` does.
    pub(super) fn recover(&self) {
        self.mapping.store(UNMAPPED, SeqCst);
        if self.finish_drop(Kind::Untouched) {
            self.handed_back.store(true, SeqCst);
        }
    }
}

#[test]
fn loom_a_lost_page_is_swept_and_used_and_freed_at_once() {
    // Three threads: all interleavings would take hours.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let world = World::remote();
        world.home.store(GONE, SeqCst);
        let sweeper = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.sweep())
        };
        let evictor = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.discard())
        };
        let served = world.serve_write_fault();
        let swept = sweeper.join().unwrap();
        let freed = evictor.join().unwrap();
        if !served {
            assert!(world.handed_back.load(SeqCst), "a fault was forgotten");
            assert!(world.serve_write_fault());
        }
        // The holders have released the page by now.
        assert!(swept || world.sweep());
        let kind = world.entry.state().kind();
        match world.mapping.load(SeqCst) {
            POISONED => assert_eq!(kind, Kind::Lost),
            // The guest freed the page, and used it again: it begins with zeroes.
            WRITABLE => {
                assert_eq!((kind, world.here.load(SeqCst)), (Kind::Resident, 0));
                assert!(freed);
            }
            // The guest freed the poisoned page.
            _ => assert!(freed && kind == Kind::Untouched),
        }
        // Once more, when nobody uses it any more.
        assert!(world.discard());
        assert_eq!(world.mapping.load(SeqCst), UNMAPPED);
        world.check(0);
        assert!(world.serve_write_fault());
        assert_eq!(world.mapping.load(SeqCst), WRITABLE);
        world.check(0);
    });
}
