//! How much memory may be here, and how much of it is held free.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The largest part of a budget that is held free ahead of demand: 1 / so many.
const RESERVE_SHARE_MAX: u64 = 8;

/// How many pages at home elsewhere may be resident here, and how many are.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Grows and shrinks with memory of this node that is added to the guest.
    limit: AtomicU64,
    /// The limit without that. Added memory is at home here and never evicted, so what the evictor holds
    /// free, and looks at for that, is a part of this.
    cache: u64,
    /// Pages that the evictor sees to being free, woken when fewer than half of them are.
    reserve: AtomicU64,
    reserve_min: u64,
    /// How many times that is kept at the least; see [`Policy`](crate::policy::Policy).
    reserve_factor: AtomicU64,
    used: AtomicU64,
    /// Whether a fault waits for a page to become free.
    waiting: AtomicBool,
}

impl Budget {
    /// A budget of `limit` pages. The evictor keeps between 1/32 and 1/16 of them free, but
    /// at most 16 and 32 MiB, to begin with.
    pub fn new(limit: u64) -> Self {
        let reserve = ((limit / 32).clamp(1, 4096) * 2).min(limit);
        Self {
            limit: AtomicU64::new(limit),
            cache: limit,
            reserve: AtomicU64::new(reserve),
            reserve_min: reserve,
            reserve_factor: AtomicU64::new(1),
            used: AtomicU64::new(0),
            waiting: AtomicBool::new(false),
        }
    }

    /// Takes a page out of what is free. `None` when nothing is; otherwise whether the
    /// evictor should be woken.
    pub fn charge(&self) -> Option<bool> {
        // SeqCst here and below: a fault that finds nothing free says that it waits before
        // it looks again, and the evictor frees before it looks for waiters. One of them
        // sees the other.
        let limit = self.limit();
        let charge = |used| (used < limit).then_some(used + 1);
        let result = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, charge);
        result
            .ok()
            .map(|before| limit - before - 1 < self.reserve() / 2)
    }

    /// As [`Self::charge`], leaving word that somebody waits when nothing is free.
    pub fn charge_or_wait(&self) -> Option<bool> {
        self.charge().or_else(|| {
            self.waiting.store(true, Ordering::SeqCst);
            self.charge()
        })
    }

    /// Takes `pages` for what nobody has asked for yet: not from the last quarter of the reserve,
    /// which is for faults. `None` when that is all there is; otherwise as for
    /// [`Self::charge`].
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

    /// Most pages that nobody has asked for yet, while memory is short. Less than the budget,
    /// so that there are others to evict when all of it is taken.
    pub fn ahead_max(&self) -> u64 {
        self.reserve_min.min(self.cache / 2)
    }

    /// Gives pages back; true when somebody waits for one.
    pub fn release(&self, pages: u64) -> bool {
        self.used.fetch_sub(pages, Ordering::SeqCst);
        self.waiting.swap(false, Ordering::SeqCst)
    }

    /// Pages free now.
    pub fn free(&self) -> u64 {
        self.limit().saturating_sub(self.used())
    }

    /// Pages resident or on their way here.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// Pages to free now, so that the reserve is full.
    pub fn shortfall(&self) -> u64 {
        self.reserve().saturating_sub(self.free())
    }

    /// Whether the reserve has fallen so low that the evictor should start.
    pub fn is_low(&self) -> bool {
        self.free() < (self.reserve() / 2).max(1)
    }

    /// Whether so much is free that pages may be made which nobody asked for.
    pub fn is_plentiful(&self) -> bool {
        self.free() > self.reserve() * 2
    }

    pub fn limit(&self) -> u64 {
        // Relaxed: what is charged against an old one is freed by the evictor.
        self.limit.load(Ordering::Relaxed)
    }

    /// How many pages may be here whose home is elsewhere.
    pub fn cache(&self) -> u64 {
        self.cache
    }

    /// So many pages more may be here from now on, of memory that was added and is at home here; true when
    /// somebody waits for one.
    pub fn grow(&self, pages: u64) -> bool {
        self.limit.fetch_add(pages, Ordering::SeqCst);
        self.waiting.swap(false, Ordering::SeqCst)
    }

    /// So many pages fewer. More may be here for a while, until the evictor has freed them.
    pub fn shrink(&self, pages: u64) {
        self.limit.fetch_sub(pages, Ordering::SeqCst);
    }

    /// Pages held free ahead of demand.
    pub fn reserve(&self) -> u64 {
        // Relaxed: a goal, not a promise.
        self.reserve.load(Ordering::Relaxed)
    }

    /// Fits the reserve to how the last filling of it went: twice as much when faults had to
    /// wait, a little less when even half was never touched.
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
        let next = next.clamp(self.reserve_least(), most);
        self.reserve.store(next, Ordering::Relaxed);
    }

    /// The evictor: keeps at least `factor` times the least reserve from now on.
    pub fn set_reserve_factor(&self, factor: u64) {
        // Relaxed: only the evictor uses it.
        if self.reserve_factor.swap(factor, Ordering::Relaxed) != factor {
            let reserve = self.reserve().max(self.reserve_least());
            self.reserve.store(reserve, Ordering::Relaxed);
        }
    }

    fn reserve_least(&self) -> u64 {
        let factor = self.reserve_factor.load(Ordering::Relaxed);
        (self.reserve_min * factor).min(self.reserve_max())
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
        assert!(!budget.release(1), "told once");
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
    fn a_slow_link_raises_the_least_reserve() {
        let budget = Budget::new(64_000);
        let least = budget.reserve();
        budget.set_reserve_factor(2);
        // 1 / 16 of the budget is the least, and 1 / 8 the most.
        let raised = budget.reserve();
        assert_eq!(raised, (least * 2).min(64_000 / RESERVE_SHARE_MAX));
        assert!(raised > least);
        for _ in 0..100 {
            budget.adapt_reserve(false, raised);
        }
        assert_eq!(budget.reserve(), raised, "it shrinks no further");
        budget.set_reserve_factor(1);
        for _ in 0..100 {
            budget.adapt_reserve(false, raised);
        }
        assert_eq!(budget.reserve(), least);
        for limit in 1..200 {
            let budget = Budget::new(limit);
            budget.set_reserve_factor(2);
            assert!(budget.reserve() <= limit, "{limit}");
        }
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
        // The reserve grows, and with it what is kept for faults.
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
