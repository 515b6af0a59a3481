//! The budget of local memory, and the reserve of free pages in it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Largest part of a budget that is kept free ahead of demand, as a divisor.
const RESERVE_SHARE_MAX: u64 = 8;

/// The limit of resident pages with their home elsewhere, and their current number.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Changes with memory of this node that is added to the guest.
    limit: AtomicU64,
    /// The limit without added memory. Added memory has its home here and is never evicted, so the
    /// evictor's reserve and the pages that it examines are fractions of this.
    cache: u64,
    /// Pages that the evictor keeps free; it is woken when fewer than half of them are.
    reserve: AtomicU64,
    reserve_min: u64,
    used: AtomicU64,
    /// Whether a fault waits for a page to become free.
    waiting: AtomicBool,
}

impl Budget {
    /// Creates a budget of `limit` pages. Initially the evictor keeps between 1/32 and 1/16 of them
    /// free, but at most 16 and 32 MiB.
    pub fn new(limit: u64) -> Self {
        let reserve = ((limit / 32).clamp(1, 4096) * 2).min(limit);
        Self {
            limit: AtomicU64::new(limit),
            cache: limit,
            reserve: AtomicU64::new(reserve),
            reserve_min: reserve,
            used: AtomicU64::new(0),
            waiting: AtomicBool::new(false),
        }
    }

    /// Takes a free page. Returns `None` when there is none; otherwise whether the evictor should
    /// be woken.
    pub fn charge(&self) -> Option<bool> {
        // SeqCst here and below: a fault without a free page sets `waiting` before it checks again,
        // and the evictor frees pages before it reads `waiting`. One of them sees the other.
        let limit = self.limit();
        let charge = |used| (used < limit).then_some(used + 1);
        let result = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, charge);
        result
            .ok()
            .map(|before| limit - before - 1 < self.reserve() / 2)
    }

    /// Like [`Self::charge`], and sets `waiting` when nothing is free.
    pub fn charge_or_wait(&self) -> Option<bool> {
        self.charge().or_else(|| {
            self.waiting.store(true, Ordering::SeqCst);
            self.charge()
        })
    }

    /// Takes `pages` free pages for prefetching, except from the last quarter of the reserve, which
    /// is for faults. Returns `None` when there are not enough; otherwise like [`Self::charge`].
    pub fn charge_ahead(&self, pages: u64) -> Option<bool> {
        let limit = self.limit();
        let most = limit.saturating_sub(self.reserve() / 4);
        let charge = |used| (used + pages <= most).then_some(used + pages);
        let result = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, charge);
        result
            .ok()
            .map(|before| limit - before - pages < self.reserve() / 2)
    }

    /// Returns the limit of untouched prefetched pages while memory is short. It is less than the
    /// budget, so that other pages can be evicted when the budget is exhausted.
    pub fn ahead_max(&self) -> u64 {
        self.reserve_min.min(self.cache / 2)
    }

    /// Frees pages; returns true when a fault waits for one.
    pub fn release(&self, pages: u64) -> bool {
        self.used.fetch_sub(pages, Ordering::SeqCst);
        self.waiting.swap(false, Ordering::SeqCst)
    }

    /// Returns the number of free pages.
    pub fn free(&self) -> u64 {
        self.limit().saturating_sub(self.used())
    }

    /// Returns the number of pages that are resident or in transit to this node.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// Returns the number of pages to free until the reserve is full.
    pub fn shortfall(&self) -> u64 {
        self.reserve().saturating_sub(self.free())
    }

    /// Returns whether the reserve is so low that the evictor should start.
    pub fn is_low(&self) -> bool {
        self.free() < (self.reserve() / 2).max(1)
    }

    /// Returns whether enough pages are free to fill untouched neighbours.
    pub fn is_plentiful(&self) -> bool {
        self.free() > self.reserve() * 2
    }

    pub fn limit(&self) -> u64 {
        // Relaxed: the evictor frees what is charged against an old limit.
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the limit of resident pages with their home elsewhere.
    pub fn cache(&self) -> u64 {
        self.cache
    }

    /// Raises the limit by memory that was added and has its home here; returns true when a fault
    /// waits for a page.
    pub fn grow(&self, pages: u64) -> bool {
        self.limit.fetch_add(pages, Ordering::SeqCst);
        self.waiting.swap(false, Ordering::SeqCst)
    }

    /// Lowers the limit. It may be exceeded until the evictor has freed the pages.
    pub fn shrink(&self, pages: u64) {
        self.limit.fetch_sub(pages, Ordering::SeqCst);
    }

    /// Returns the number of pages to keep free ahead of demand.
    pub fn reserve(&self) -> u64 {
        // Relaxed: a goal, not a promise.
        self.reserve.load(Ordering::Relaxed)
    }

    /// Adapts the reserve after it was refilled: doubles it when faults had to wait, and reduces it
    /// slightly when even half was never used.
    pub fn adapt_reserve(&self, faults_waited: bool, least_free: u64) {
        let now = self.reserve();
        let most = self.reserve_max();
        let next = if faults_waited {
            now * 2
        } else if least_free > now / 4 {
            now - now / 16
        } else {
            now
        };
        let next = next.clamp(self.reserve_min, most);
        self.reserve.store(next, Ordering::Relaxed);
    }

    fn reserve_max(&self) -> u64 {
        (self.cache / RESERVE_SHARE_MAX).max(self.reserve_min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spent_budget_refuses_and_remembers_who_waits() {
        let budget = Budget::new(2);
        assert!(budget.charge().is_some());
        assert_eq!(budget.charge(), Some(true));
        assert_eq!(budget.charge_or_wait(), None);
        assert!(budget.release(1), "a waiter exists");
        assert!(!budget.release(1), "reported once");
        assert_eq!(budget.free(), 2);
    }

    #[test]
    fn the_reserve_grows_while_faults_wait_and_shrinks_slowly() {
        let budget = Budget::new(64_000);
        let first = budget.reserve();
        budget.adapt_reserve(true, 0);
        assert_eq!(budget.reserve(), first * 2);
        for _ in 0..10 {
            budget.adapt_reserve(true, 0);
        }
        assert_eq!(budget.reserve(), 64_000 / RESERVE_SHARE_MAX);
        let most = budget.reserve();
        budget.adapt_reserve(false, most / 4);
        assert_eq!(budget.reserve(), most, "it was needed");
        for _ in 0..100 {
            budget.adapt_reserve(false, most);
        }
        assert_eq!(budget.reserve(), first);
    }

    #[test]
    fn memory_that_is_added_here_takes_nothing_from_the_cache() {
        let budget = Budget::new(4096);
        let most = 4096 / RESERVE_SHARE_MAX;
        let added = 16 * 4096;
        budget.grow(added);
        budget.used.store(added, Ordering::SeqCst);
        for _ in 0..10 {
            budget.adapt_reserve(true, 0);
        }
        assert_eq!(budget.reserve(), most);
        assert_eq!(budget.shortfall(), 0, "the cache is empty");
        assert_eq!((budget.cache(), budget.ahead_max()), (4096, 256));
        budget.used.store(0, Ordering::SeqCst);
        budget.shrink(added);
        assert_eq!(budget.reserve(), most);
    }

    #[test]
    fn guesses_leave_a_quarter_of_the_reserve_to_faults() {
        let budget = Budget::new(4096);
        assert_eq!(budget.reserve(), 256);
        assert_eq!(budget.charge_ahead(4000), Some(true), "128 is low");
        assert_eq!(budget.charge_ahead(33), None);
        assert_eq!(budget.charge_ahead(32), Some(true));
        assert!(budget.charge().is_some());
        assert_eq!(budget.free(), 63);
        // The reserve grows, and with it the part for faults.
        budget.release(2000);
        budget.adapt_reserve(true, 0);
        assert_eq!(budget.charge_ahead(2000 + 63 - 127), None);
        assert_eq!(budget.charge_ahead(2000 + 63 - 128), Some(true));
    }

    #[test]
    fn unused_guesses_never_fill_a_budget() {
        for limit in 1..200 {
            assert!(Budget::new(limit).ahead_max() < limit, "{limit}");
        }
    }
}
