//! Every interleaving of a fault thread, an evictor and a second fault on one page's state
//! word, with the mapping and the bytes modelled beside it.

mod ahead;
mod fingerprints;
mod lost;
mod moved;

use crate::page_map::{Kind, PageEntry, State};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use loom::thread;

/// A page with its surroundings: what the kernel, the donor and the guest hold.
struct World {
    entry: PageEntry,
    /// The guest view's mapping: one of the four below.
    mapping: AtomicU32,
    /// The page's bytes in the memfd; `GONE` when punched.
    here: AtomicU32,
    /// The page's bytes at home; `GONE` when the home is lost.
    home: AtomicU32,
    /// Whether the evictor handed a fault back.
    handed_back: AtomicBool,
    /// Number of queues that contain the page.
    queues: AtomicU32,
    /// The bytes of the fingerprint in each slot; `GONE` in a free one. There are two, since a slot
    /// is freed after its page was dropped, when the page may be fetched again.
    remembered: [AtomicU32; 2],
    /// Number of writes to its home.
    written: AtomicU32,
}

const GONE: u32 = u32::MAX;

const UNMAPPED: u32 = 0;
const READ_ONLY: u32 = 1;
const WRITABLE: u32 = 2;
const POISONED: u32 = 3;

impl World {
    /// A resident page with bytes 7, dirty or not.
    fn resident(dirty: bool) -> Arc<Self> {
        Self::in_queue(dirty, false)
    }

    /// The same, in a queue of the evictor, or about to be put into one.
    fn in_queue(dirty: bool, queued: bool) -> Arc<Self> {
        let entry = PageEntry::new();
        assert!(entry.begin_install(entry.state()));
        if dirty {
            entry.mark_dirty();
        }
        assert!(entry.list());
        assert!(!entry.finish_install());
        Arc::new(Self {
            entry,
            mapping: AtomicU32::new(if dirty { WRITABLE } else { READ_ONLY }),
            here: AtomicU32::new(7),
            home: AtomicU32::new(if dirty { 3 } else { 7 }),
            handed_back: AtomicBool::new(false),
            queues: AtomicU32::new(u32::from(queued)),
            remembered: [AtomicU32::new(GONE), AtomicU32::new(GONE)],
            written: AtomicU32::new(0),
        })
    }

    /// One write fault, as `pager::fault` serves it. Returns true when the page was mapped; false
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
                        self.release();
                        return true;
                    }
                }
                Kind::Remote if self.home.load(SeqCst) == GONE => {
                    let _ = self.entry.lose(seen);
                }
                Kind::Lost => {
                    if self.entry.begin_poison(seen) {
                        return self.poison();
                    }
                }
                Kind::Remote => {
                    if self.entry.begin_fetch(seen) {
                        assert_eq!(self.here.load(SeqCst), GONE, "fetched over bytes");
                        let came = self.home.load(SeqCst);
                        self.here.store(came, SeqCst);
                        self.entry.mark_dirty();
                        self.mapping.store(WRITABLE, SeqCst);
                        let free = |slot: &AtomicU32| {
                            slot.compare_exchange(GONE, came, SeqCst, SeqCst).is_ok()
                        };
                        let slot = self.remembered.iter().position(free);
                        let slot = slot.expect("one is free");
                        self.entry.set_fingerprint(u32::try_from(slot).unwrap());
                        self.release();
                        return true;
                    }
                }
                Kind::Dropping | Kind::Installing | Kind::Fetching => {
                    if self.entry.contend(seen) {
                        return false;
                    }
                }
                // The page was discarded: it is filled with zeroes, and is dirty.
                Kind::Untouched => {
                    if self.entry.begin_install(seen) {
                        assert_eq!(self.here.load(SeqCst), GONE, "zeros over bytes");
                        self.entry.mark_dirty();
                        self.here.store(0, SeqCst);
                        self.mapping.store(WRITABLE, SeqCst);
                        self.release();
                        return true;
                    }
                }
            }
        }
    }

    /// Releases the mapped page, as `pager::Shared::release` does. Returns whether a fault waits
    /// for it.
    fn release(&self) -> bool {
        let is_new = self.entry.list();
        let contended = self.entry.finish_install();
        if is_new {
            self.arrive();
        }
        contended
    }

    /// Puts the page into a queue.
    fn arrive(&self) {
        assert_eq!(self.queues.fetch_add(1, SeqCst), 0, "in two queues at once");
    }

    /// Takes the page out of its queue, as the evictor does when it reaches it; puts it back when
    /// it has bytes.
    fn pop(&self) {
        if self.queues.load(SeqCst) == 0 {
            return;
        }
        self.queues.fetch_sub(1, SeqCst);
        if !self.entry.unlist() {
            self.arrive();
        }
    }

    /// One discard, as `pager::evict::discard` makes it. Returns false when another thread holds
    /// the page, and it must be retried.
    fn discard(&self) -> bool {
        loop {
            let seen = self.entry.state();
            match seen.kind() {
                Kind::Untouched => return true,
                Kind::Remote => {
                    if self.entry.forget(seen) {
                        return true;
                    }
                }
                Kind::Resident | Kind::Probation | Kind::WritingBack => {
                    if self.entry.begin_discard(seen) {
                        self.mapping.store(UNMAPPED, SeqCst);
                        self.here.store(GONE, SeqCst);
                        if self.finish_drop(Kind::Untouched) {
                            self.handed_back.store(true, SeqCst);
                        }
                        return true;
                    }
                }
                Kind::Lost => {
                    if self.entry.begin_recovery(seen) {
                        self.recover();
                        return true;
                    }
                }
                Kind::Fetching | Kind::Installing | Kind::Dropping => return false,
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
        assert!(!world.entry.finish_drop(Kind::Remote).is_contended());
        world
    }

    /// One prefetched page, as `pager::prefetch` does it.
    fn fetch_ahead(&self) {
        let seen = self.entry.state();
        if seen.kind() != Kind::Remote || !self.entry.begin_fetch(seen) {
            return;
        }
        assert_eq!(self.here.load(SeqCst), GONE, "fetched over bytes");
        self.here.store(self.home.load(SeqCst), SeqCst);
        assert!(self.entry.list(), "a remote page is in no queue");
        if !self.entry.finish_ahead(false) {
            self.mapping.store(READ_ONLY, SeqCst);
            assert!(self.release(), "waiters are woken");
            self.handed_back.store(true, SeqCst);
        }
        self.arrive();
    }

    /// The oldest prefetched page, one too many, as `pager::ahead` takes it out.
    fn drop_unused(&self) {
        if self.queues.load(SeqCst) == 0 {
            return;
        }
        self.queues.fetch_sub(1, SeqCst);
        if self.entry.unlist() {
            return;
        }
        if self.entry.begin_drop(Kind::Probation) {
            assert_eq!(
                self.mapping.load(SeqCst),
                UNMAPPED,
                "dropped a page that is mapped"
            );
            self.here.store(GONE, SeqCst);
            if self.finish_drop(Kind::Remote) {
                self.handed_back.store(true, SeqCst);
            }
        } else {
            self.arrive();
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
            let seen = self.entry.state();
            if seen.kind() != Kind::Probation {
                return;
            }
            let here = self.here.load(SeqCst);
            let slot = seen.fingerprint().map(|slot| slot as usize);
            if slot.is_some_and(|slot| self.remembered[slot].load(SeqCst) == here) {
                self.entry.begin_drop(Kind::Probation)
            } else {
                if !self.entry.begin_write_back() {
                    return;
                }
                let seen = self.entry.state();
                if seen.kind() != Kind::WritingBack {
                    return;
                }
                let here = self.here.load(SeqCst);
                if !self.remember_sent(seen, here) {
                    return;
                }
                self.home.store(here, SeqCst);
                self.written.fetch_add(1, SeqCst);
                self.entry.begin_drop(Kind::WritingBack)
            }
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
            if self.finish_drop(Kind::Remote) {
                self.handed_back.store(true, SeqCst);
            }
        }
    }

    /// Remembers what is about to be written back, as `FingerprintTable::replace` does.
    fn remember_sent(&self, seen: State, here: u32) -> bool {
        if let Some(slot) = seen.fingerprint() {
            if self.entry.state() != seen {
                return false;
            }
            self.remembered[slot as usize].store(here, SeqCst);
            return true;
        }
        let free = |slot: &AtomicU32| slot.compare_exchange(GONE, here, SeqCst, SeqCst).is_ok();
        let slot = self.remembered.iter().position(free).expect("one is free");
        let attached = self
            .entry
            .attach_fingerprint(seen, u32::try_from(slot).unwrap());
        if !attached {
            self.remembered[slot].store(GONE, SeqCst);
        }
        attached
    }

    /// Ends a drop, and frees the slot; returns whether a fault waits.
    fn finish_drop(&self, to: Kind) -> bool {
        let before = self.entry.finish_drop(to);
        self.free_slot(before);
        before.is_contended()
    }

    fn free_slot(&self, before: State) {
        if let Some(slot) = before.fingerprint() {
            self.remembered[slot as usize].store(GONE, SeqCst);
        }
    }

    fn check(&self, wanted: u32) {
        let kind = self.entry.state().kind();
        let bytes = match kind {
            Kind::Untouched => 0,
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
        // The write that faulted proceeds, unless the page was unmapped again in the meantime.
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

/// A discard concurrent with a write fault, during whatever `before` and `after` do to the page:
/// the fault gets the bytes or zeroes, and the page is zero after the discard.
fn discard_against_fault(dirty: bool, before: fn(&World), after: fn(&World)) {
    loom::model(move || {
        let world = World::in_queue(dirty, true);
        let evictor = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                before(&world);
                let discarded = world.discard();
                after(&world);
                world.pop();
                discarded
            })
        };
        let served = world.serve_write_fault();
        let mut discarded = evictor.join().unwrap();
        if !served {
            assert!(world.handed_back.load(SeqCst), "a fault was forgotten");
            assert!(world.serve_write_fault());
        }
        // The holder has released the page by now.
        if !discarded {
            discarded = world.discard();
        }
        assert!(discarded, "the page is still held");
        world.check(0);
        assert!(world.serve_write_fault());
        world.check(0);
        let state = world.entry.state();
        assert_eq!(state.is_listed(), world.queues.load(SeqCst) == 1);
        assert!(state.is_listed(), "a page with bytes that no queue has");
    });
}

#[test]
fn loom_a_write_fault_against_the_discard_of_a_page() {
    for dirty in [false, true] {
        discard_against_fault(dirty, |_| {}, |_| {});
    }
}

#[test]
fn loom_a_write_fault_against_a_discard_during_a_write_back() {
    let begin = |world: &World| {
        if world.entry.begin_probation() {
            world.mapping.store(UNMAPPED, SeqCst);
            if world.entry.begin_write_back() {
                world.home.store(world.here.load(SeqCst), SeqCst);
            }
        }
    };
    // The donor confirms the write: that must not bring the bytes back.
    let complete = |world: &World| {
        if world.entry.begin_drop(Kind::WritingBack) {
            world.queues.fetch_sub(1, SeqCst);
            world.here.store(GONE, SeqCst);
            if world.finish_drop(Kind::Remote) {
                world.handed_back.store(true, SeqCst);
            }
        }
    };
    discard_against_fault(true, begin, complete);
}

#[test]
fn loom_a_page_that_arrives_while_it_is_discarded_is_in_one_queue() {
    // Three threads: all interleavings would take hours.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        // Mapped by a fault thread, which has not put it into a queue yet.
        let world = World::resident(false);
        let evictor = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let discarded = world.discard();
                world.pop();
                discarded
            })
        };
        let second = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.serve_write_fault())
        };
        world.arrive();
        let discarded = evictor.join().unwrap();
        if !second.join().unwrap() {
            assert!(world.handed_back.load(SeqCst), "a fault was forgotten");
        }
        // Unless the second fault held it at that moment.
        assert!(discarded || world.discard());
        world.pop();
        let listed = world.entry.state().is_listed();
        assert_eq!(listed, world.queues.load(SeqCst) == 1);
        let has_bytes = !matches!(world.entry.state().kind(), Kind::Untouched);
        assert_eq!(listed, has_bytes);
    });
}
