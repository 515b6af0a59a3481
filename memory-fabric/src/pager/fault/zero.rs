//! First touches: pages of zeroes.

use super::{FaultThread, Pending};
use crate::homes::HomeTable;
use crate::page::{PageIndex, PageRange};
use crate::page_map::Kind;
use crate::pager::PagerError;
use crate::pager::found::make_zero;
use crate::pager::mailbox::Arrival;
use std::time::Instant;

/// Pages in the aligned window that a first touch may fill at once: 64 KiB, the size of the
/// kernel's own fault-around for files. A power of two.
const ZERO_AROUND: u32 = 16;

impl FaultThread {
    /// Fills a page that this thread holds, and its untouched neighbours while memory is plentiful:
    /// a guest that uses memory for the first time mostly continues with neighbours. Pages that
    /// stay unused contain only zeroes, and their eviction causes no traffic.
    #[inline]
    pub(super) fn fill_with_zeros(&self, pending: Pending) -> Result<(), PagerError> {
        let shared = &self.shared;
        let taken_up_at = Instant::now();
        let run = self.take_untouched_around(pending.page);
        if let Some(recorder) = &shared.recorder {
            recorder.record(run);
        }
        make_zero(shared, run)?;
        for page in run.iter() {
            shared.release(page, Arrival::Touched)?;
        }
        shared.stats.zero_around.add(u64::from(run.count) - 1);
        let stats = &shared.stats;
        stats
            .zero_stages
            .record(&stats.zero, pending.read_at, taken_up_at);
        shared.touches.record(pending.page, taken_up_at);
        Ok(())
    }

    /// Takes the untouched pages around `page` in its [`ZERO_AROUND`] window; returns the whole
    /// run, including `page`.
    fn take_untouched_around(&self, page: PageIndex) -> PageRange {
        // Within a block, which has one home.
        let block = HomeTable::block_of(page);
        let pages = self.shared.homes.pages_of(block);
        let window = page.number() & !(ZERO_AROUND - 1);
        let mut first = page.number();
        let mut end = u64::from(first) + 1;
        while end < pages.end().min(u64::from(window) + u64::from(ZERO_AROUND))
            && u32::try_from(end).is_ok_and(|next| self.take_untouched(PageIndex::new(next)))
        {
            end += 1;
        }
        while first > pages.first.number().max(window)
            && self.take_untouched(PageIndex::new(first - 1))
        {
            first -= 1;
        }
        let count = u32::try_from(end - u64::from(first)).expect("at most a window");
        PageRange::new(PageIndex::new(first), count)
    }

    /// Takes a page if it is untouched and memory is plentiful.
    fn take_untouched(&self, page: PageIndex) -> bool {
        let shared = &self.shared;
        let entry = shared.map.entry(page);
        let seen = entry.state();
        if seen.kind() != Kind::Untouched
            || !shared.budget.is_plentiful()
            || shared.budget.charge().is_none()
        {
            return false;
        }
        let taken = entry.begin_install(seen);
        if !taken {
            self.uncharge();
        }
        taken
    }
}
