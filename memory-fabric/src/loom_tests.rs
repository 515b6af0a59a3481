//! Every interleaving of a fault thread, an evictor and a second fault on one page's state
//! word, with the mapping and the bytes modelled beside it.

use crate::page_map::{Kind, PageEntry};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use loom::thread;

/// A page with its surroundings: what the kernel, the donor and the guest hold.
struct World {
    entry: PageEntry,
    /// The guest view's mapping: one of the three below.
    mapping: AtomicU32,
    /// The page's bytes in the memfd; `GONE` when punched.
    here: AtomicU32,
    /// The page's bytes at home.
    home: AtomicU32,
    /// A fault was handed back by the evictor.
    handed_back: AtomicBool,
}

const GONE: u32 = u32::MAX;

const UNMAPPED: u32 = 0;
const READ_ONLY: u32 = 1;
const WRITABLE: u32 = 2;

impl World {
    /// A resident page with bytes 7, dirty or not.
    fn resident(dirty: bool) -> Arc<Self> {
        let entry = PageEntry::new();
        assert!(entry.begin_install(entry.state()));
        if dirty {
            entry.mark_dirty();
        }
        assert!(!entry.finish_install());
        Arc::new(Self {
            entry,
            mapping: AtomicU32::new(if dirty { WRITABLE } else { READ_ONLY }),
            here: AtomicU32::new(7),
            home: AtomicU32::new(if dirty { 3 } else { 7 }),
            handed_back: AtomicBool::new(false),
        })
    }

    /// One write fault, as `pager::fault` serves it. True when the page was mapped; false
    /// when the fault was left to the evictor.
    fn serve_write_fault(&self) -> bool {
        loop {
            let seen = self.entry.state();
            match seen.kind() {
                Kind::Resident | Kind::Probation | Kind::WritingBack => {
                    if self.entry.begin_install(seen) {
                        self.entry.mark_dirty();
                        assert_ne!(self.here.load(SeqCst), GONE, "mapped a page without bytes");
                        self.mapping.store(WRITABLE, SeqCst);
                        let _ = self.entry.finish_install();
                        return true;
                    }
                }
                Kind::Remote => {
                    if self.entry.begin_fetch(seen) {
                        assert_eq!(self.here.load(SeqCst), GONE, "fetched over bytes");
                        self.here.store(self.home.load(SeqCst), SeqCst);
                        self.entry.mark_dirty();
                        self.mapping.store(WRITABLE, SeqCst);
                        let _ = self.entry.finish_install();
                        return true;
                    }
                }
                Kind::Dropping | Kind::Installing | Kind::Fetching => {
                    if self.entry.contend(seen) {
                        return false;
                    }
                }
                Kind::Untouched => unreachable!("the page has bytes"),
            }
        }
    }

    /// A remote page with bytes 7 at home.
    fn remote() -> Arc<Self> {
        let world = Self::resident(false);
        assert!(world.entry.begin_probation());
        assert!(world.entry.begin_drop(Kind::Probation));
        world.mapping.store(UNMAPPED, SeqCst);
        world.here.store(GONE, SeqCst);
        assert!(!world.entry.finish_drop(Kind::Remote));
        world
    }

    /// One page fetched ahead, as `pager::prefetch` does it.
    fn fetch_ahead(&self) {
        let seen = self.entry.state();
        if seen.kind() != Kind::Remote || !self.entry.begin_fetch(seen) {
            return;
        }
        assert_eq!(self.here.load(SeqCst), GONE, "fetched over bytes");
        self.here.store(self.home.load(SeqCst), SeqCst);
        if !self.entry.finish_ahead(false) {
            self.mapping.store(READ_ONLY, SeqCst);
            assert!(self.entry.finish_install(), "who waits is woken");
            self.handed_back.store(true, SeqCst);
        }
    }

    /// One page fetched ahead and not used, as `pager::evict` drops it.
    fn drop_unused(&self) {
        let seen = self.entry.state();
        if seen.is_ahead() && self.entry.begin_drop(Kind::Probation) {
            assert_eq!(
                self.mapping.load(SeqCst),
                UNMAPPED,
                "dropped a page that is mapped"
            );
            self.here.store(GONE, SeqCst);
            if self.entry.finish_drop(Kind::Remote) {
                self.handed_back.store(true, SeqCst);
            }
        }
    }

    /// One eviction, as `pager::evict` makes it.
    fn evict(&self) {
        if !self.entry.begin_probation() {
            return;
        }
        self.mapping.store(UNMAPPED, SeqCst);
        let dirty = self.entry.state().is_dirty();
        let dropped = if dirty {
            if !self.entry.begin_write_back() {
                return;
            }
            self.home.store(self.here.load(SeqCst), SeqCst);
            self.entry.begin_drop(Kind::WritingBack)
        } else {
            self.entry.begin_drop(Kind::Probation)
        };
        if dropped {
            assert_eq!(
                self.mapping.load(SeqCst),
                UNMAPPED,
                "dropped a page that is mapped"
            );
            self.here.store(GONE, SeqCst);
            if self.entry.finish_drop(Kind::Remote) {
                self.handed_back.store(true, SeqCst);
            }
        }
    }

    fn check(&self, wanted: u32) {
        let kind = self.entry.state().kind();
        let bytes = match kind {
            Kind::Remote => self.home.load(SeqCst),
            _ => self.here.load(SeqCst),
        };
        assert_eq!(bytes, wanted, "in state {:?}", self.entry.state());
        if self.mapping.load(SeqCst) == WRITABLE {
            assert!(
                self.entry.state().is_dirty(),
                "a clean page is mapped writable"
            );
        }
    }
}

fn fault_against_eviction(dirty: bool) {
    loom::model(move || {
        let world = World::resident(dirty);
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
        // The write that faulted goes on, unless the page was unmapped again meanwhile.
        if world.mapping.load(SeqCst) != UNMAPPED {
            assert_eq!(world.mapping.load(SeqCst), WRITABLE);
            world.here.store(8, SeqCst);
            world.check(8);
        } else {
            world.check(7);
        }
    });
}

#[test]
fn loom_a_write_fault_against_the_eviction_of_a_clean_page() {
    fault_against_eviction(false);
}

#[test]
fn loom_a_write_fault_against_the_eviction_of_a_dirty_page() {
    fault_against_eviction(true);
}

#[test]
fn loom_two_faults_on_one_page_leave_one_owner_and_wake_both() {
    loom::model(|| {
        let world = World::resident(true);
        assert!(world.entry.begin_probation());
        world.mapping.store(UNMAPPED, SeqCst);
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.serve_write_fault())
        };
        let first = world.serve_write_fault();
        let second = other.join().unwrap();
        assert!(first || second, "nobody mapped the page");
        assert_eq!(world.mapping.load(SeqCst), WRITABLE);
        world.check(7);
    });
}

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
