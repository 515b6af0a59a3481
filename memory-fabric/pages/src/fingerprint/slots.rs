//! Free slots: a stack from which several threads take and to which one thread returns, linked
//! through the free slots themselves, so that unused slots take no memory.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The free slots among `capacity` slots. The link of a free slot is in its first word.
#[derive(Debug)]
pub(crate) struct FreeSlots {
    /// The number of the top slot plus one, or 0, and in the upper half the number of changes of
    /// the stack, which detects a slot that was taken and returned in between.
    top: AtomicU64,
    /// The first slot that was never used.
    unused: AtomicU32,
    capacity: u32,
}

impl FreeSlots {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            top: AtomicU64::new(0),
            unused: AtomicU32::new(0),
            capacity,
        }
    }

    /// Takes a slot; returns `None` when all are in use. `word` returns a slot's first word.
    pub(crate) fn take<'a>(&self, word: impl Fn(u32) -> &'a AtomicU64) -> Option<u32> {
        // Acquire: pairs with the Release of `put`, so that the link is visible, and the
        // reads of the slot's previous owner have finished.
        let mut top = self.top.load(Ordering::Acquire);
        while let Some(slot) = slot_of(top) {
            // The link is meaningless when another thread took the slot in the meantime; then `top`
            // has changed.
            let below = word(slot).load(Ordering::Relaxed);
            let next = changed(top) | (below & u64::from(u32::MAX));
            match self
                .top
                .compare_exchange(top, next, Ordering::Acquire, Ordering::Acquire)
            {
                Ok(_) => return Some(slot),
                Err(now) => top = now,
            }
        }
        // Relaxed here and below: nothing was stored in such a slot.
        let mut unused = self.unused.load(Ordering::Relaxed);
        while unused < self.capacity {
            match self.unused.compare_exchange(
                unused,
                unused + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(unused),
                Err(now) => unused = now,
            }
        }
        None
    }

    /// Puts back a slot that was taken.
    pub(crate) fn put<'a>(&self, slot: u32, word: impl Fn(u32) -> &'a AtomicU64) {
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            word(slot).store(top & u64::from(u32::MAX), Ordering::Relaxed);
            let next = changed(top) | u64::from(slot + 1);
            // Release: pairs with the Acquire of `take`.
            match self
                .top
                .compare_exchange(top, next, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }
}

fn slot_of(top: u64) -> Option<u32> {
    let number = u32::try_from(top & u64::from(u32::MAX)).expect("32 bits");
    number.checked_sub(1)
}

/// Returns the upper half of a changed stack.
fn changed(top: u64) -> u64 {
    ((top >> 32).wrapping_add(1)) << 32
}
