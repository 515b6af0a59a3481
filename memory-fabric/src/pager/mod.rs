//! The pager: serves faults and frees memory.

pub(crate) mod ahead;
mod budget;
mod detect;
pub(crate) mod evict;
mod eviction_clock;
pub(crate) mod fault;
pub(crate) mod forecast;
mod found;
mod lifecycle;
pub(crate) mod losses;
pub(crate) mod mailbox;
mod policies;
pub(crate) mod prefetch;
mod queue;
mod ranking;
pub(crate) mod relocate;
mod replay;
#[cfg(test)]
mod testing;
mod transports;
pub(crate) mod wait;

use crate::fingerprint::FingerprintTable;
use crate::guest_memory::GuestMemory;
use crate::heat::Touches;
use crate::homes::HomeTable;
use crate::nodes::Nodes;
use crate::page::PageIndex;
use crate::page_map::PageMap;
use crate::stats::PagerStats;
use crate::uffd::Uffd;
use crate::wire::TrafficClass;
use crate::working_set::Recorder;
pub(crate) use budget::Budget;
pub(crate) use lifecycle::{DRAIN_TIME_MAX, Lifecycle};
pub(crate) use losses::Losses;
use mailbox::{Arrival, EvictorMailbox, FaultMailbox, Port, PrefetcherMailbox};
pub(crate) use policies::Policies;
use std::sync::Arc;
use std::time::Duration;

/// A failure after which the VM's memory can no longer be served.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// A userfaultfd call, or another call on guest memory, failed.
    #[error("{call} failed on {page}")]
    Userfaultfd {
        /// The call.
        call: &'static str,
        /// The page.
        page: PageIndex,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// Reading the descriptor, or waiting for it, failed.
    #[error("{0} failed")]
    System(&'static str, #[source] std::io::Error),
    /// A thread of the pager panicked.
    #[error("thread {0} panicked")]
    Panicked(&'static str),
    /// A fault outside the guest's memory.
    #[error("fault at host address {0:#x}, which is no guest memory at home elsewhere")]
    Stray(usize),
}

/// Receives a failure of the pager, once from each thread that fails.
pub(crate) type FailureObserver = Arc<dyn Fn(PagerError) + Send + Sync>;

/// State that the pager's threads share: constants, data with its own synchronization, and the
/// mailbox of each thread. State with one owner is in that thread's struct and inbox.
pub(crate) struct Shared {
    pub memory: Arc<GuestMemory>,
    pub homes: Arc<HomeTable>,
    pub nodes: Arc<Nodes>,
    pub map: PageMap,
    pub fingerprints: FingerprintTable,
    pub uffd: Uffd,
    pub stats: Arc<PagerStats>,
    pub touches: Touches,
    pub budget: Budget,
    pub policies: Arc<Policies>,
    pub forecast: forecast::WriteForecast,
    /// Records first touches, when the configuration requests it.
    pub recorder: Option<Recorder>,
    /// Whether a page that was fetched for a read is mapped write-protected.
    pub copy_write_protected: bool,
    /// Whether `UFFDIO_CONTINUE` can map a page write-protected.
    pub continue_write_protected: bool,
    /// How long a thread polls for work before it sleeps.
    pub spin: Duration,
    pub lifecycle: Lifecycle,
    /// Lost donors, and pages that were lost with them.
    pub losses: Losses,
    pub faults: FaultMailbox,
    pub evictor: EvictorMailbox,
    pub prefetcher: PrefetcherMailbox,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Makes the pager's threads end after their current work.
    pub fn stop(&self) {
        self.lifecycle.stop();
        self.faults.wake();
        self.evictor.port().wake();
        self.prefetcher.wake_if_asleep();
    }

    /// Returns the port of the thread that uses this class of traffic.
    pub fn port_of(&self, class: TrafficClass) -> &Port {
        match class {
            TrafficClass::Urgent => self.faults.port(),
            TrafficClass::Bulk => self.evictor.port(),
            TrafficClass::Prefetch | TrafficClass::Probe => self.prefetcher.port(),
        }
    }

    /// Releases a held, mapped page and wakes its waiters. A page in no queue of the evictor is
    /// sent to the evictor as `arrival`.
    pub fn release(&self, page: PageIndex, arrival: Arrival) -> Result<(), PagerError> {
        let entry = self.map.entry(page);
        // While the page is held; see `page_map`.
        let is_new = entry.list();
        let contended = entry.finish_install();
        if is_new {
            self.evictor.push(&self.map, page, arrival);
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
}
