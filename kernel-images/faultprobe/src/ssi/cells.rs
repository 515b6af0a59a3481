//! Memory that the CPUs share: 64-bit cells on pages, each access one instruction.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Cells of a page.
pub const PAGE_CELLS: usize = 512;

/// Returns the index of a page's cell.
pub const fn at(page: usize, cell: usize) -> usize {
    page * PAGE_CELLS + cell
}

/// Memory under test, which the tests of the probe replace by broken ones.
pub trait Cells: Send + Sync + 'static {
    /// Reads a cell by a plain load, which later accesses of this CPU do not overtake.
    fn load(&self, at: usize) -> u64;
    /// Writes a cell by a plain store, which does not overtake earlier accesses of this CPU.
    fn store(&self, at: usize, value: u64);
    /// Adds to a cell atomically and returns what it held.
    fn add(&self, at: usize, value: u64) -> u64;
    /// Replaces the expected value atomically; returns whether it was there.
    fn compare_exchange(&self, at: usize, expected: u64, new: u64) -> bool;
    /// Completes earlier stores before later loads.
    fn fence(&self);
}

#[repr(align(4096))]
#[derive(Debug)]
struct Page([AtomicU64; PAGE_CELLS]);

/// The memory of this machine. On x86, loads that acquire and stores that release are plain moves.
#[derive(Debug)]
pub struct Pages(Vec<Page>);

impl Pages {
    /// Allocates pages of zeroes.
    pub fn new(pages: usize) -> Self {
        let page = || Page([const { AtomicU64::new(0) }; PAGE_CELLS]);
        Self((0..pages).map(|_| page()).collect())
    }

    #[inline]
    fn cell(&self, at: usize) -> &AtomicU64 {
        &self.0[at / PAGE_CELLS].0[at % PAGE_CELLS]
    }
}

impl Cells for Pages {
    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.cell(at).load(Ordering::Acquire)
    }

    #[inline]
    fn store(&self, at: usize, value: u64) {
        self.cell(at).store(value, Ordering::Release);
    }

    #[inline]
    fn add(&self, at: usize, value: u64) -> u64 {
        self.cell(at).fetch_add(value, Ordering::AcqRel)
    }

    #[inline]
    fn compare_exchange(&self, at: usize, expected: u64, new: u64) -> bool {
        let cell = self.cell(at);
        cell.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_and_their_cells_are_separate() {
        let pages = Pages::new(3);
        assert_eq!(std::ptr::from_ref(&pages.0[1]).addr() % 4096, 0);
        assert_eq!(size_of::<Page>(), 4096);
        pages.store(at(1, 511), 7);
        assert_eq!(pages.add(at(1, 511), 2), 7);
        assert!(pages.compare_exchange(at(1, 511), 9, 1));
        assert!(!pages.compare_exchange(at(1, 511), 9, 2));
        assert_eq!(
            [at(1, 510), at(1, 511), at(2, 0)].map(|at| pages.load(at)),
            [0, 1, 0]
        );
    }
}
