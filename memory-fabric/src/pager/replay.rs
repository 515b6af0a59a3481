//! Filling pages with zeroes because an earlier run touched them.

use super::found::make_zero;
use super::mailbox::Arrival;
use super::{PagerError, Shared};
use crate::page::{PageIndex, PageRange};
use crate::page_map::Kind;

/// Returns whether a page has its home elsewhere and is untouched.
pub(super) fn can_be_filled(shared: &Shared, page: PageIndex) -> bool {
    shared.homes.is_paged(page) && shared.map.entry(page).state().kind() == Kind::Untouched
}

/// Takes the untouched pages at the start of a part while memory is plentiful. Returns their
/// number.
pub(super) fn take_untouched(shared: &Shared, part: PageRange) -> u32 {
    let mut taken = 0;
    for page in part.iter() {
        if !can_be_filled(shared, page) || !shared.budget.is_plentiful() {
            break;
        }
        if shared.budget.charge_ahead(1).is_none() {
            break;
        }
        let entry = shared.map.entry(page);
        let seen = entry.state();
        if seen.kind() != Kind::Untouched || !entry.begin_install(seen) {
            if shared.budget.release(1) {
                shared.faults.wake();
            }
            break;
        }
        taken += 1;
    }
    taken
}

/// Fills pages that the caller holds with zeroes, and maps them.
pub(super) fn fill(shared: &Shared, run: PageRange) -> Result<(), PagerError> {
    make_zero(shared, run)?;
    if let Some(recorder) = &shared.recorder {
        recorder.record(run);
    }
    for page in run.iter() {
        shared.release(page, Arrival::Touched)?;
    }
    shared.stats.replayed.add(run.count.into());
    Ok(())
}
