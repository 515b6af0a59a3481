//! The pager: serves faults and makes room.

pub(crate) mod ahead;
mod budget;
mod detect;
pub(crate) mod evict;
pub(crate) mod fault;
pub(crate) mod forecast;
mod found;
pub(crate) mod lanes;
mod policies;
pub(crate) mod prefetch;
pub(crate) mod queue;
mod ranking;
mod replay;
#[cfg(test)]
mod testing;
pub(crate) mod wait;

use crate::guest_memory::GuestMemory;
use crate::heat::Touches;
use crate::homes::{Home, HomeTable};
use crate::nodes::Nodes;
use crate::page::PageIndex;
use crate::page_map::PageMap;
use crate::stats::PagerStats;
use crate::transport::PageTransport;
use crate::uffd::Uffd;
use crate::working_set::Recorder;
pub(crate) use budget::Budget;
use crossbeam_channel::Sender;
pub(crate) use policies::Policies;
use queue::Arrivals;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
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
    pub homes: Arc<HomeTable>,
    pub nodes: Arc<Nodes>,
    pub map: PageMap,
    pub uffd: Uffd,
    pub stats: Arc<PagerStats>,
    pub touches: Touches,
    pub budget: Budget,
    pub policies: Arc<Policies>,
    /// Pages that became resident.
    pub arrivals: Arrivals,
    /// Those among them that were here not long ago.
    pub returns: Arrivals,
    /// What tells such pages.
    pub evicted: EvictionClock,
    /// Pages that were fetched before anybody asked for them.
    pub ahead: Arrivals,
    /// Whether pages that are touched are going to be written.
    pub forecast: forecast::WriteForecast,
    /// Faults that met a page being dropped, back to the fault thread.
    pub retries: Sender<PageIndex>,
    /// Rung to wake the fault thread.
    pub fault_wake: EventFd,
    /// Rung to wake the evictor.
    pub evict_wake: EventFd,
    /// Whether it was rung for want of memory, and has not been answered yet.
    pub evict_told: AtomicBool,
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

    /// Tells the evictor that memory is short; a system call only when it was not told already.
    pub fn tell_evictor(&self) {
        // SeqCst here and below: whoever finds the evictor told took its memory before the
        // evictor looks at the budget again.
        if !self.evict_told.swap(true, Ordering::SeqCst) {
            let _ = self.evict_wake.write(1);
        }
    }

    /// The evictor, before it looks at the budget again: takes note of having been told.
    pub fn answer_evict_bell(&self) {
        // In this order: told meanwhile, it is awake to see why, and the bell is silent.
        let _ = self.evict_wake.read();
        self.evict_told.store(false, Ordering::SeqCst);
    }

    /// The place of the link to a home that is another node.
    pub fn link_to(&self, home: Home) -> usize {
        let link = self.nodes.link_to(home.node);
        link.expect("every node that is a home is the local one, or has a link")
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

    /// Lets go of a page that the caller holds and has mapped, and wakes who waits for it. One
    /// that has come here by that goes into `queue`.
    pub fn let_go(&self, page: PageIndex, queue: &Arrivals) -> Result<(), PagerError> {
        let entry = self.map.entry(page);
        // Before it is let go of; see `page_map`.
        let is_new = entry.list();
        let contended = entry.finish_install();
        if is_new {
            queue.push(&self.map, page);
        }
        if !contended {
            return Ok(());
        }
        let woken = self.uffd.wake(self.memory.guest_page(page));
        woken.map_err(|source| PagerError::Userfaultfd {
            call: "WAKE",
            page,
            source,
        })
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

/// Counts evictions, so that a page that is fetched again tells how long it was away.
#[derive(Debug, Default)]
pub(crate) struct EvictionClock {
    now: AtomicU32,
    /// Evictions ago up to which a page counts as one that should have stayed.
    recent: AtomicU32,
}

impl EvictionClock {
    /// The evictor: a number for a page that is evicted now.
    pub fn tick(&self) -> u32 {
        // Relaxed here and below: a guess that is a little off does no harm.
        self.now.fetch_add(1, Ordering::Relaxed)
    }

    /// The evictor: a number for a page that goes without ever having been used. It counts as
    /// one of long ago.
    pub fn never_used(&self) -> u32 {
        self.now.load(Ordering::Relaxed).wrapping_sub(u32::MAX / 2)
    }

    /// The evictor: how many pages are known to be used. What was away for fewer evictions
    /// would have been found here, had it been one of them.
    pub fn set_recent(&self, settled: usize) {
        let recent = u32::try_from(settled).unwrap_or(u32::MAX);
        self.recent.store(recent, Ordering::Relaxed);
    }

    /// Whether a page was evicted not long ago.
    pub fn is_recent(&self, stamp: u32) -> bool {
        let away = self.now.load(Ordering::Relaxed).wrapping_sub(stamp);
        away < self.recent.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_away_for_less_than_the_settled_ones_is_recent() {
        let clock = EvictionClock::default();
        let stamp = clock.tick();
        assert!(!clock.is_recent(stamp), "nothing is known yet");
        clock.set_recent(10);
        assert!(clock.is_recent(stamp));
        for _ in 0..10 {
            clock.tick();
        }
        assert!(!clock.is_recent(stamp));
        clock.set_recent(1 << 30);
        assert!(clock.is_recent(stamp));
        assert!(!clock.is_recent(clock.never_used()));
    }
}
