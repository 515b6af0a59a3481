//! The fault thread's part of prefetching.

use crate::page::PageIndex;
use crate::pager::Shared;
use crate::pager::detect::Detector;

/// Observes faults, and sends orders.
#[derive(Debug)]
pub(crate) struct FaultObserver {
    pub(super) detector: Detector,
    noted: Option<(u32, PageIndex)>,
}

impl FaultObserver {
    /// Creates the state without known streams.
    pub(crate) fn new() -> Self {
        Self {
            detector: Detector::new(),
            noted: None,
        }
    }

    /// Records that thread `source` touched `page`, replacing an earlier record.
    pub(in crate::pager) fn note(&mut self, source: u32, page: PageIndex) {
        self.noted = Some((source, page));
    }

    /// Returns the distance of pages that are mapped along with `page`: the stride of its stream.
    pub(in crate::pager) fn stride_to(&self, page: PageIndex) -> i32 {
        self.detector.stride_to(page.number()).unwrap_or(1)
    }

    /// Predicts from the last recorded touch.
    pub(in crate::pager) fn guess(&mut self, shared: &Shared) {
        let Some((source, page)) = self.noted.take() else {
            return;
        };
        let Some(order) = self.detector.observe(source, page.number()) else {
            return;
        };
        let stats = &shared.stats;
        self.detector
            .limit_windows(shared.policies.all().window_pages);
        self.detector
            .review(stats.prefetch_used.get(), stats.prefetch_wasted.get());
        shared.prefetcher.order(order);
    }
}
