//! Prefetched pages: mapping them when they are touched, and dropping unused ones.

use super::detect::CHAIN_MAX;
use super::found::failed;
use super::mailbox::{Arrival, EvictorInbox};
use super::queue::PageQueue;
use super::{PagerError, Shared};
use crate::page::{PageIndex, PageRange};
use crate::page_map::{Kind, State};
use crate::uffd::Protection;

/// Takes the neighbours that are to be mapped along with `page`, which the caller holds, in a stream
/// of this stride. Returns all of them, including `page`.
pub(super) fn take_neighbours(shared: &Shared, page: PageIndex, stride: i32) -> PageRange {
    if stride.unsigned_abs() != 1 {
        return PageRange::new(page, 1);
    }
    let taken = chained(shared, page, stride).take_while(|&page| take_chained(shared, page));
    let end = taken.last().unwrap_or(page);
    let first = page.min(end);
    PageRange::new(first, page.number().abs_diff(end.number()) + 1)
}

/// Maps the pages of a stream that are to be mapped along with `page` and are no neighbours of it.
pub(super) fn map_steps(
    shared: &Shared,
    page: PageIndex,
    stride: i32,
    write: bool,
) -> Result<(), PagerError> {
    if stride.unsigned_abs() == 1 {
        return Ok(());
    }
    for page in chained(shared, page, stride).take_while(|&page| take_chained(shared, page)) {
        let writable = write || shared.forecast.map_writable(1);
        map_held(shared, PageRange::new(page, 1), writable)?;
    }
    Ok(())
}

/// The pages that may be mapped along with `page`.
fn chained(shared: &Shared, page: PageIndex, stride: i32) -> impl Iterator<Item = PageIndex> {
    let end = shared.homes.span_pages();
    let next =
        move |&page: &PageIndex| page.number().checked_add_signed(stride).map(PageIndex::new);
    std::iter::successors(Some(page), next)
        .take_while(move |page| u64::from(page.number()) < end)
        .take(CHAIN_MAX as usize)
        .skip(1)
}

/// Takes a page to map it along with another one, if it is meant for that.
fn take_chained(shared: &Shared, page: PageIndex) -> bool {
    let entry = shared.map.entry(page);
    let seen = entry.state();
    let is_chained = seen.kind() == Kind::Probation && seen.is_ahead() && seen.is_chained();
    is_chained && entry.begin_install(seen)
}

/// Maps pages that the caller holds, whose bytes are in the file and which are not mapped, and
/// releases them. They are writable when the touch was a write: a guest that writes one page of a
/// stream mostly continues.
pub(super) fn map_held(shared: &Shared, run: PageRange, write: bool) -> Result<(), PagerError> {
    map_run(shared, run, write)?;
    release_run(shared, run)
}

/// The first part of [`map_held`], after which vCPUs that wait for the pages continue.
pub(super) fn map_run(shared: &Shared, run: PageRange, write: bool) -> Result<(), PagerError> {
    let protection = if write || !shared.continue_write_protected {
        for page in run.iter() {
            shared.map.entry(page).mark_dirty();
        }
        Protection::Writable
    } else {
        Protection::WriteProtected
    };
    let target = shared.memory.guest_page(run.first);
    let mapped = shared
        .uffd
        .map_existing_run(target, run.count as usize, protection);
    mapped.map_err(failed("CONTINUE", run.first))
}

/// The second part of [`map_held`].
pub(super) fn release_run(shared: &Shared, run: PageRange) -> Result<(), PagerError> {
    for page in run.iter() {
        shared.release(page, Arrival::Touched)?;
    }
    shared.stats.prefetch_used.add(run.count.into());
    Ok(())
}

/// The evictor's queue of prefetched pages, oldest first.
#[derive(Debug, Default)]
pub(super) struct AheadQueue {
    pages: PageQueue,
}

/// The handling of the oldest prefetched page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Oldest {
    /// It was touched: it is handled like any other page.
    Touched(PageIndex),
    /// The guest has freed it, so it has no local bytes.
    Gone,
    /// It was not touched, there are too many, and the caller now holds it, to drop it.
    Unused(PageIndex),
}

impl AheadQueue {
    /// Moves prefetched pages into the queue.
    pub(super) fn drain(&mut self, shared: &Shared, inbox: &EvictorInbox) {
        inbox.drain_into(Arrival::Prefetched, &shared.map, &mut self.pages);
    }

    /// Takes out the oldest page if it was touched, or is one too many.
    pub(super) fn next(&mut self, shared: &Shared) -> Option<Oldest> {
        let untouched = |state: State| state.kind() == Kind::Probation && state.is_ahead();
        let page = self.pages.first()?;
        let entry = shared.map.entry(page);
        let crowded = self.pages.len() as u64 > shared.budget.ahead_max();
        if untouched(entry.state()) && !crowded {
            return None;
        }
        let page = self.pages.pop(&shared.map)?;
        // Only this thread puts a touched page on probation, and not before the page has left this
        // queue.
        Some(if entry.unlist() {
            Oldest::Gone
        } else if shared.homes.is_lost(page) {
            // The home has no copy any more, so the page stays.
            Oldest::Touched(page)
        } else if entry.begin_drop(Kind::Probation) {
            Oldest::Unused(page)
        } else {
            Oldest::Touched(page)
        })
    }
}
