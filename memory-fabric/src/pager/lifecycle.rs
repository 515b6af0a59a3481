//! Stopping the pager's threads, and reporting their failures.

use super::{FailureObserver, PagerError};
use crate::transport::PageTransport;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a stopping thread waits for outstanding requests, so that both ends count the same
/// pages.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Whether the pager runs, stops or has failed.
pub(crate) struct Lifecycle {
    stopping: AtomicBool,
    /// When a thread first noticed that.
    stopped_at: OnceLock<Instant>,
    failed: FailureObserver,
}

impl Lifecycle {
    pub(crate) fn new(failed: FailureObserver) -> Self {
        Self {
            stopping: AtomicBool::new(false),
            stopped_at: OnceLock::new(),
            failed,
        }
    }

    /// Requests that the threads end. The caller wakes them afterwards.
    pub(super) fn stop(&self) {
        // SeqCst: precedes the wake-ups, after which the threads read it.
        self.stopping.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Whether a stopping thread may end: nothing is outstanding on its transports, or
    /// [`DRAIN_TIME_MAX`] has passed.
    pub(super) fn has_drained(&self, transports: &[Box<dyn PageTransport>]) -> bool {
        let stopped_at = self.stopped_at.get_or_init(Instant::now);
        stopped_at.elapsed() >= DRAIN_TIME_MAX
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
