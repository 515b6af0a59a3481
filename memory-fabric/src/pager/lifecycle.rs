//! Stopping the pager's threads, and reporting their failures.

use super::{FailureObserver, PagerError};
use crate::transport::PageTransport;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a stopping thread waits for outstanding requests, so that both ends count the same
/// pages, and for faults that are not served yet.
pub(crate) const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Whether the pager runs, stops or has failed.
pub(crate) struct Lifecycle {
    stopping: AtomicBool,
    /// Since when it stops.
    stopped_at: OnceLock<Instant>,
    /// Whether the fault thread has ended: nobody needs memory any more.
    faults_ended: AtomicBool,
    failed: FailureObserver,
}

impl Lifecycle {
    pub(crate) fn new(failed: FailureObserver) -> Self {
        Self {
            stopping: AtomicBool::new(false),
            stopped_at: OnceLock::new(),
            faults_ended: AtomicBool::new(false),
            failed,
        }
    }

    /// Requests that the threads end. The caller wakes them afterwards.
    pub(super) fn stop(&self) {
        self.stopped_at.get_or_init(Instant::now);
        // SeqCst: precedes the wake-ups, after which the threads read it.
        self.stopping.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Records that no fault is served any more. The caller wakes the evictor afterwards.
    pub(super) fn faults_end(&self) {
        self.faults_ended.store(true, Ordering::SeqCst);
    }

    /// Whether pages have to be evicted: also while the pager stops, as long as faults are served,
    /// which may wait for memory.
    pub(super) fn needs_memory(&self) -> bool {
        !(self.is_stopping() && self.faults_ended.load(Ordering::SeqCst))
    }

    /// Whether a stopping thread may end although it has work: [`DRAIN_TIME_MAX`] has passed.
    pub(super) fn is_late(&self) -> bool {
        let stopped_at = self.stopped_at.get();
        stopped_at.is_some_and(|at| at.elapsed() >= DRAIN_TIME_MAX)
    }

    /// Whether a stopping thread may end: nothing is outstanding on its transports, or it is late.
    pub(super) fn has_drained(&self, transports: &[Box<dyn PageTransport>]) -> bool {
        self.is_late()
            || transports
                .iter()
                .all(|transport| transport.in_flight() == 0)
    }

    /// Runs a thread of the pager and reports its error or panic. Unreported, it would leave the
    /// waiters for its pages blocked for ever.
    pub(super) fn supervise(
        &self,
        name: &'static str,
        run: impl FnOnce() -> Result<(), PagerError>,
    ) {
        // The thread's data is not used again.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => (self.failed)(error),
            Err(_) => (self.failed)(PagerError::Panicked(name)),
        }
    }
}
