//! Donors that are lost for good, and the pages that are lost with them.
//!
//! When a donor is lost, each block with its home there is marked in the home table: nothing is
//! fetched from there or written to it any more, and pages of the block with local bytes stay here.
//! Then its transports are removed from the pager's threads, which give up outstanding requests.
//! Last, [`sweep`] marks the pages whose bytes were only there as lost. A page that another thread
//! held all the time is marked by the fault thread when it is touched.
//!
//! A lost page is poisoned when it is first touched: from then on the kernel reports each access as
//! an error of the memory.

use super::Shared;
use crate::extents::Extents;
use crate::homes::BLOCK_PAGES;
use crate::page::{PAGE_SHIFT, PageIndex};
use crate::page_map::{Kind, PageMap, State};
use crate::stats::Counter;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

/// How long [`sweep`] waits for pages that other threads hold. They hold a page for microseconds,
/// once they have given up its request.
const HELD_TIME_MAX: Duration = Duration::from_secs(2);

/// Lost donors, and the number of pages that were lost.
#[derive(Debug)]
pub(crate) struct Losses {
    /// For each link, whether its donor is lost.
    links: Box<[AtomicBool]>,
    /// Pages that became lost.
    pub lost: Counter,
    /// Of these, pages that were poisoned because the guest used them, each time.
    pub poisoned: Counter,
    /// Lost pages that the guest has freed, which are usable again.
    pub recovered: Counter,
    /// Where the pages are that are lost.
    found: Mutex<Found>,
}

/// What the last look at all pages of lost blocks has found.
#[derive(Debug, Default)]
struct Found {
    /// The pages that had been lost by then, and recovered: only these change where lost pages are.
    counts: (u64, u64),
    extents: Extents,
}

impl Found {
    /// Returns what was found last, or if pages were lost or recovered since, what `look` finds, which
    /// is kept if that says so.
    fn get(&mut self, counts: (u64, u64), look: impl FnOnce() -> (Extents, bool)) -> Extents {
        if self.counts != counts {
            let (extents, is_kept) = look();
            if !is_kept {
                return extents;
            }
            *self = Self { counts, extents };
        }
        self.extents.clone()
    }
}

impl Losses {
    pub fn new(links: usize) -> Self {
        Self {
            links: (0..links).map(|_| AtomicBool::new(false)).collect(),
            lost: Counter::default(),
            poisoned: Counter::default(),
            recovered: Counter::default(),
            found: Mutex::default(),
        }
    }

    /// Records that the donor of a link is lost. Returns false if it was before.
    pub fn set_lost(&self, link: usize) -> bool {
        // Release: pairs with the Acquire below; the homes are marked after it.
        let was_lost = self.links[link].swap(true, Ordering::AcqRel);
        // A block that moves there meanwhile is marked by who moves it, or its home is seen.
        fence(Ordering::SeqCst);
        !was_lost
    }

    /// Returns whether the donor of a link is lost.
    pub fn is_lost(&self, link: usize) -> bool {
        self.links
            .get(link)
            .is_some_and(|lost| lost.load(Ordering::Acquire))
    }

    /// Returns the links of lost donors.
    pub fn links(&self) -> impl Iterator<Item = usize> {
        (0..self.links.len()).filter(|&link| self.is_lost(link))
    }

    /// Marks a remote page as lost, unless it is no longer in the state `seen`.
    pub fn lose(&self, map: &PageMap, page: PageIndex, seen: State) {
        if map.entry(page).lose(seen) {
            self.note_changed(&self.lost);
        }
    }

    /// Counts a page that is recovered.
    pub fn note_recovered(&self) {
        self.note_changed(&self.recovered);
    }

    /// Counts a page whose state has changed.
    fn note_changed(&self, counter: &Counter) {
        // Pairs with that in `counts`: a look that begins with this count finds the state.
        fence(Ordering::Release);
        counter.increment();
    }

    fn counts(&self) -> (u64, u64) {
        let counts = (self.lost.get(), self.recovered.get());
        fence(Ordering::Acquire);
        counts
    }
}

/// What a [`sweep`] found.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Swept {
    /// Pages of the blocks that are lost.
    pub lost: u64,
    /// All others.
    pub kept: u64,
}

/// Marks the remote pages of these blocks, whose home is lost, as lost.
pub(crate) fn sweep(shared: &Shared, blocks: &[u32]) -> Swept {
    let deadline = Instant::now() + HELD_TIME_MAX;
    let mut swept = Swept::default();
    for &block in blocks {
        for page in shared.homes.pages_of(block).iter() {
            match settle(shared, page, deadline) {
                Some(Kind::Lost) => swept.lost += 1,
                Some(_) => swept.kept += 1,
                None => {}
            }
        }
    }
    swept
}

/// Returns where the pages are that are lost. Looks at each page of blocks whose home is lost, if that
/// has changed since the last look.
pub(crate) fn extents(shared: &Shared) -> Extents {
    let losses = &shared.losses;
    let mut found = fabric_host::lock(&losses.found);
    found.get(losses.counts(), || look(shared))
}

/// Returns where the pages are that are lost, and whether no thread holds one that may be.
fn look(shared: &Shared) -> (Extents, bool) {
    let homes = &shared.homes;
    let span = homes.ram_span_pages().div_ceil(u64::from(BLOCK_PAGES));
    let blocks = 0..u32::try_from(span).unwrap_or(u32::MAX);
    let pages = blocks.map(|block| homes.pages_of(block));
    let lost = pages.filter(|pages| pages.count > 0 && homes.is_lost(pages.first));
    let pages = lost.flat_map(|pages| pages.iter());
    let mut is_settled = true;
    let lost = pages.filter(|page| match shared.map.entry(*page).state().kind() {
        Kind::Lost => true,
        // It may be a lost one that is being poisoned.
        Kind::Fetching | Kind::Installing | Kind::Dropping => {
            is_settled = false;
            false
        }
        _ => false,
    });
    // All of these pages are memory of the guest.
    let memory = 0..homes.span_pages() << PAGE_SHIFT;
    let numbers = lost.map(|page| page.number()..page.number() + 1);
    let extents = Extents::new(numbers, std::slice::from_ref(&memory));
    (extents, is_settled)
}

/// Marks a page as lost if its bytes are nowhere; returns its kind, or `None` when its block has
/// moved to another donor in the meantime.
fn settle(shared: &Shared, page: PageIndex, deadline: Instant) -> Option<Kind> {
    let entry = shared.map.entry(page);
    loop {
        let seen = entry.state();
        match seen.kind() {
            _ if !shared.homes.is_lost(page) => return None,
            Kind::Remote => shared.losses.lose(&shared.map, page, seen),
            Kind::Fetching | Kind::Installing | Kind::Dropping if Instant::now() < deadline => {
                std::thread::yield_now();
            }
            kind => return Some(kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_looked_at_only_when_some_were_lost_or_recovered_since() {
        let mut found = Found::default();
        let mut looks = 0;
        let mut get = |counts, bytes, is_kept| {
            let extents = found.get(counts, || {
                looks += 1;
                let extents = Extents {
                    bytes,
                    ..Extents::default()
                };
                (extents, is_kept)
            });
            (extents.bytes, looks)
        };
        assert_eq!(get((0, 0), 1, true), (0, 0), "nothing was lost");
        assert_eq!(get((3, 0), 3, true), (3, 1));
        assert_eq!(get((3, 0), 9, true), (3, 1));
        assert_eq!(get((3, 1), 2, false), (2, 2), "a page was held");
        assert_eq!(get((3, 1), 2, true), (2, 3));
        assert_eq!(get((3, 1), 9, true), (2, 3));
        assert_eq!(get((4, 1), 3, true), (3, 4));
    }
}
