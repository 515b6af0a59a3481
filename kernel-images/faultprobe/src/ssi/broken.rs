//! Memories that break a promise each, on which the probe must find it.

use std::cell::RefCell;
use std::thread;

use super::cells::{Cells, Pages};

/// Additions and exchanges are a load and a store, between which others come.
#[derive(Debug)]
pub struct Torn(pub Pages);

impl Cells for Torn {
    fn load(&self, at: usize) -> u64 {
        self.0.load(at)
    }

    fn store(&self, at: usize, value: u64) {
        self.0.store(at, value);
    }

    fn add(&self, at: usize, value: u64) -> u64 {
        let old = self.0.load(at);
        thread::yield_now();
        self.0.store(at, old + value);
        old
    }

    fn compare_exchange(&self, at: usize, expected: u64, new: u64) -> bool {
        let is_there = self.0.load(at) == expected;
        thread::yield_now();
        if is_there {
            self.0.store(at, new);
        }
        is_there
    }

    fn fence(&self) {
        self.0.fence();
    }
}

thread_local! {
    /// The store that this thread has not shown to others yet.
    static PENDING: RefCell<Option<(usize, u64)>> = const { RefCell::new(None) };
}

/// A store becomes visible after the next one, and no fence changes that.
#[derive(Debug)]
pub struct Late(pub Pages);

impl Late {
    fn take() -> Option<(usize, u64)> {
        PENDING.with(RefCell::take)
    }
}

impl Cells for Late {
    fn load(&self, at: usize) -> u64 {
        let own = PENDING.with(|pending| *pending.borrow());
        match own {
            Some((own, value)) if own == at => value,
            _ => self.0.load(at),
        }
    }

    fn store(&self, at: usize, value: u64) {
        match Self::take() {
            Some((older, before)) if older != at => {
                self.0.store(at, value);
                thread::yield_now();
                self.0.store(older, before);
            }
            // Stores to one cell stay in order.
            older => {
                if let Some((at, before)) = older {
                    self.0.store(at, before);
                }
                PENDING.with(|pending| pending.replace(Some((at, value))));
            }
        }
    }

    fn add(&self, at: usize, value: u64) -> u64 {
        self.fence();
        self.0.add(at, value)
    }

    fn compare_exchange(&self, at: usize, expected: u64, new: u64) -> bool {
        self.0.compare_exchange(at, expected, new)
    }

    fn fence(&self) {}
}

/// A page arrives without what was last written to one of its cells.
#[derive(Debug)]
pub struct Lossy(pub Pages);

impl Cells for Lossy {
    fn load(&self, at: usize) -> u64 {
        self.0.load(at)
    }

    fn store(&self, at: usize, value: u64) {
        if at != 256 {
            self.0.store(at, value);
        }
    }

    fn add(&self, at: usize, value: u64) -> u64 {
        self.0.add(at, value)
    }

    fn compare_exchange(&self, at: usize, expected: u64, new: u64) -> bool {
        self.0.compare_exchange(at, expected, new)
    }

    fn fence(&self) {
        self.0.fence();
    }
}
