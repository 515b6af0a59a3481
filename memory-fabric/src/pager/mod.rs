//! The pager: serves faults and makes room.

pub(crate) mod ahead;
mod detect;
pub(crate) mod evict;
pub(crate) mod fault;
pub(crate) mod prefetch;
pub(crate) mod queue;
pub(crate) mod wait;

use crate::guest_memory::GuestMemory;
use crate::layout::Layout;
use crate::page::PageIndex;
use crate::page_map::PageMap;
use crate::stats::PagerStats;
use crate::transport::PageTransport;
use crate::uffd::Uffd;
use crate::working_set::Recorder;
use crossbeam_channel::Sender;
use queue::Arrivals;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// A failure after which the VM's memory can no longer be served.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// A userfaultfd call failed that may not.
    #[error("{call} failed on {page}")]
    Userfaultfd {
        /// What was tried.
        call: &'static str,
        /// On which page.
        page: PageIndex,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The descriptor, or waiting for it, failed.
    #[error("{0} failed")]
    System(&'static str, #[source] std::io::Error),
    /// A thread of the pager ended by a bug of its own.
    #[error("thread {0} panicked")]
    Panicked(&'static str),
    /// A fault outside the guest's memory.
    #[error("fault at host address {0:#x}, which is no guest memory at home elsewhere")]
    Stray(usize),
}

/// How long the end of the pager waits for requests that are under way, so that both sides have
/// counted the same.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Takes a failure of the pager. Called once by each thread that fails.
pub(crate) type FailureObserver = Arc<dyn Fn(PagerError) + Send + Sync>;

/// What the pager's threads share.
pub(crate) struct Shared {
    pub memory: Arc<GuestMemory>,
    pub layout: Arc<Layout>,
    pub map: PageMap,
    pub uffd: Uffd,
    pub stats: Arc<PagerStats>,
    pub budget: Budget,
    pub arrivals: Arrivals,
    /// Pages that were fetched before anybody asked for them.
    pub ahead: Arrivals,
    /// Faults that met a page being dropped, back to the fault thread.
    pub retries: Sender<PageIndex>,
    /// Rung to wake the fault thread.
    pub fault_wake: EventFd,
    /// Rung to wake the evictor.
    pub evict_wake: EventFd,
    /// Wakes the prefetcher.
    pub prefetch_bell: prefetch::Bell,
    /// Records first touches, when that is asked for.
    pub recorder: Option<Recorder>,
    pub stopping: AtomicBool,
    /// When a thread first saw that.
    pub stopped_at: OnceLock<Instant>,
    pub failed: FailureObserver,
    /// Whether a page can be mapped by CONTINUE with write protection.
    pub continue_write_protected: bool,
    /// How long a thread looks for work before it sleeps.
    pub spin: Duration,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Makes the pager's threads end after what they are doing.
    pub fn stop(&self) {
        // SeqCst: before the bells, whose readers look at it.
        self.stopping.store(true, Ordering::SeqCst);
        let _ = self.fault_wake.write(1);
        let _ = self.evict_wake.write(1);
        self.prefetch_bell.ring();
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Whether nothing is outstanding on a thread's transports, or is waited for any more after
    /// the pager was told to stop.
    pub fn drained(&self, transports: &[Box<dyn PageTransport>]) -> bool {
        let stopped_at = self.stopped_at.get_or_init(Instant::now);
        stopped_at.elapsed() >= DRAIN_TIME_MAX
            || transports
                .iter()
                .all(|transport| transport.in_flight() == 0)
    }

    /// Runs a thread of the pager and tells of its failure, be it a panic: nobody else would,
    /// and those who wait for pages would wait for ever.
    pub fn report_failure(&self, name: &'static str, run: impl FnOnce() -> Result<(), PagerError>) {
        // The thread's data is not used again.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => (self.failed)(error),
            Err(_) => (self.failed)(PagerError::Panicked(name)),
        }
    }
}

/// How many pages at home elsewhere may be resident here, and how many are.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    /// The evictor is woken when fewer are free...
    low: u64,
    /// ...and works until so many are.
    high: u64,
    used: AtomicU64,
    /// Whether a fault waits for a page to become free.
    waiting: AtomicBool,
}

impl Budget {
    /// A budget of `limit` pages. The evictor keeps between 1/32 and 1/16 of them free, but
    /// at most 16 and 32 MiB.
    pub fn new(limit: u64) -> Self {
        let low = (limit / 32).clamp(1, 4096);
        Self {
            limit,
            low,
            high: (low * 2).min(limit),
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
        let charge = |used| (used < self.limit).then_some(used + 1);
        let result = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, charge);
        result.ok().map(|before| self.limit - before - 1 < self.low)
    }

    /// As [`Self::charge`], leaving word that somebody waits when nothing is free.
    pub fn charge_or_wait(&self) -> Option<bool> {
        self.charge().or_else(|| {
            self.waiting.store(true, Ordering::SeqCst);
            self.charge()
        })
    }

    /// Takes `pages` for what nobody has asked for yet: not from the last half of the reserve,
    /// which is for faults. `None` when that is all there is; otherwise as for
    /// [`Self::charge`].
    pub fn charge_ahead(&self, pages: u64) -> Option<bool> {
        let most = self.limit - self.low / 2;
        let charge = |used| (used + pages <= most).then_some(used + pages);
        let result = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, charge);
        result
            .ok()
            .map(|before| self.limit - before - pages < self.low)
    }

    /// Most pages that nobody has asked for yet, while memory is short.
    pub fn ahead_max(&self) -> u64 {
        self.high
    }

    /// Gives pages back; true when somebody waits for one.
    pub fn release(&self, pages: u64) -> bool {
        self.used.fetch_sub(pages, Ordering::SeqCst);
        self.waiting.swap(false, Ordering::SeqCst)
    }

    /// Pages free now.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }

    /// Pages resident or on their way here.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// Pages to free now, so that the reserve is full.
    pub fn shortfall(&self) -> u64 {
        self.high.saturating_sub(self.free())
    }

    /// Whether the reserve has fallen so low that the evictor should start.
    pub fn is_low(&self) -> bool {
        self.free() < self.low
    }

    /// Whether so much is free that pages may be made which nobody asked for.
    pub fn is_plentiful(&self) -> bool {
        self.free() > self.high * 2
    }

    pub fn limit(&self) -> u64 {
        self.limit
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
        assert!(budget.release(1), "somebody waits");
        assert!(!budget.release(1), "told once");
        assert_eq!(budget.free(), 2);
    }

    #[test]
    fn guesses_leave_half_of_the_reserve_to_faults() {
        let budget = Budget::new(4096);
        assert_eq!(budget.charge_ahead(4000), Some(true), "128 is low");
        assert_eq!(budget.charge_ahead(33), None);
        assert_eq!(budget.charge_ahead(32), Some(true));
        assert!(budget.charge().is_some());
        assert_eq!(budget.free(), 63);
    }
}
