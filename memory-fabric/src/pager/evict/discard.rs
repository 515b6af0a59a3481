//! Pages that the guest has freed: the evictor's part.
//!
//! The evictor discards the pages, because only the evictor unmaps pages and frees their bytes. It
//! waits for a page that another thread holds, such as one that is being fetched. A page in a queue
//! stays there; the evictor takes it out when it reaches it.
//!
//! The donor's copies are dropped by frames on the bulk connection, behind the write-backs that
//! were posted before. Such a frame waits until there is room for it, and the guest may use its
//! pages in the meantime; therefore only pages that are untouched when it is posted are named. Only
//! this thread could make their slots valid again, by a later write-back, which is posted behind
//! the frame.
//!
//! A block that moves to another home is read meanwhile, also pages that the guest frees then. Its
//! pages are named when it has moved: a sealed page that was dropped before its read would look like
//! one that the donor has spoilt.

use super::{Evictor, PagerError, Shared};
use crate::discard::{DiscardMode, Request, Stage};
use crate::homes::{BLOCK_PAGES, HomeTable};
use crate::page::{PageIndex, PageRange};
use crate::page_map::Kind;
use crate::transport::IN_FLIGHT_MAX;
use crate::wire::DROP_PAGES_MAX;
use crossbeam_channel::Sender;
use std::collections::VecDeque;
use std::sync::Arc;

/// Pages examined before the evictor does other work.
const SLICE: u32 = 512;

/// Limit of runs that wait to be dropped at home. Pages beyond it stay there, unused, until they
/// are written again or the lease ends.
const DROPS_MAX: usize = 1024;

/// Limit of outstanding requests on a transport for posting drops: the rest is for write-backs.
const IN_FLIGHT_FOR_DROPS: usize = IN_FLIGHT_MAX / 2;

/// Pending discards.
#[derive(Debug, Default)]
pub(super) struct Discards {
    current: Option<Progress>,
    /// Runs of pages that their homes have to drop.
    drops: VecDeque<PageRange>,
}

impl Discards {
    /// Sets the run with which dropping continues, unless it is empty.
    fn resume_with(&mut self, run: PageRange) {
        if run.count > 0 {
            self.drops.push_front(run);
        }
    }

    /// Records that a page's bytes at home are obsolete.
    fn drop_at_home(&mut self, page: PageIndex, shared: &Shared) {
        if shared.homes.remote_home_of(page).is_none() || shared.homes.is_lost(page) {
            return;
        }
        // A run that is not contiguous at home is split when it is posted.
        if let Some(last) = self.drops.back_mut()
            && last.end() == u64::from(page.number())
            && last.count < DROP_PAGES_MAX
        {
            last.count += 1;
        } else if self.drops.len() < DROPS_MAX {
            self.drops.push_back(PageRange::new(page, 1));
        }
    }
}

/// A request in progress.
#[derive(Debug)]
struct Progress {
    request: Arc<Request>,
    done: Sender<()>,
    /// The current range, and the number of its pages that are done.
    range: usize,
    offset: u32,
    /// Pages that another thread held.
    held: Vec<PageIndex>,
}

/// Result of taking a page.
enum Taken {
    /// It had no bytes anywhere.
    Nothing,
    /// It had no local bytes.
    Forgotten,
    /// It has local bytes, which the caller must free.
    WithBytes,
    /// Its bytes are lost; the caller must make it usable again.
    Lost,
    /// Another thread holds it.
    Held,
}

impl Evictor {
    /// Discards some pages if there is a request; returns true when there was work.
    pub(super) fn discard_freed(&mut self) -> Result<bool, PagerError> {
        let mut worked = self.post_drops();
        let mut current = match self.discards.current.take() {
            Some(current) => current,
            None => match self.inbox.next_discard() {
                Some((request, done)) => Progress {
                    request,
                    done,
                    range: 0,
                    offset: 0,
                    held: Vec::new(),
                },
                None => return Ok(worked),
            },
        };
        worked = true;
        let request = Arc::clone(&current.request);
        let mut stage = request.stage();
        match (*stage, request.mode) {
            (Stage::TimedOut, _) => return Ok(worked),
            (Stage::Open, DiscardMode::AllOrNothing { .. }) => {
                if !self.can_take_all(&request, &mut current.held) {
                    self.discards.current = Some(current);
                    // The thread that holds a page needs the CPU.
                    std::thread::yield_now();
                    return Ok(worked);
                }
                for range in &request.ranges {
                    let last = PageIndex::new(range.first.number() + (range.count - 1));
                    for block in HomeTable::block_of(range.first)..=HomeTable::block_of(last) {
                        self.shared.homes.set_leaving(block, true);
                    }
                }
                *stage = Stage::Committed;
            }
            _ => {}
        }
        if let Some(range) = request.ranges.get(current.range) {
            let (_, rest) = range.split_at(current.offset);
            let (slice, after) = rest.split_at(SLICE);
            current.offset += slice.count;
            if after.count == 0 {
                current.range += 1;
                current.offset = 0;
            }
            self.take_pages(slice.iter(), &mut current.held)?;
        } else {
            let held = std::mem::take(&mut current.held);
            let before = held.len();
            self.take_pages(held.into_iter(), &mut current.held)?;
            let is_done = current.held.is_empty() && self.is_complete(&request);
            if is_done || request.is_overdue() {
                // The waiter may have timed out.
                let _ = current.done.send(());
                self.post_drops();
                return Ok(worked);
            }
            if current.held.len() == before || current.held.is_empty() {
                // The threads that hold them need the CPU.
                std::thread::yield_now();
            }
        }
        self.discards.current = Some(current);
        Ok(worked)
    }

    /// Returns whether every page of a request can be discarded at once: no thread holds one, and
    /// no write-back of one is in progress. That remains true while this thread does nothing else,
    /// unless the guest touches the pages. `held` has a page that could not be taken, which is
    /// checked first.
    fn can_take_all(&self, request: &Request, held: &mut Vec<PageIndex>) -> bool {
        let is_held = |page: &PageIndex| {
            let kind = self.shared.map.entry(*page).state().kind();
            matches!(kind, Kind::Fetching | Kind::Installing | Kind::Dropping)
        };
        if held.iter().any(is_held) || self.is_written(request) {
            return false;
        }
        held.clear();
        let mut pages = request.ranges.iter().flat_map(|range| range.iter());
        held.extend(pages.find(is_held));
        held.is_empty()
    }

    /// Returns whether the request is complete: where it matters, no write-back of its pages is in
    /// progress, and their homes were notified.
    fn is_complete(&self, request: &Request) -> bool {
        let drops = &self.discards.drops;
        request.mode == DiscardMode::BestEffort
            || !self.is_written(request) && !drops.iter().any(|&run| request.meets(run))
    }

    /// Returns whether a write-back of a page of the request is in progress.
    fn is_written(&self, request: &Request) -> bool {
        let mut writing = self.writing.iter().flatten();
        writing.any(|&(page, _)| request.meets(PageRange::new(page, 1)))
    }

    /// Discards pages; those that another thread holds are added to `held`.
    fn take_pages(
        &mut self,
        pages: impl Iterator<Item = PageIndex>,
        held: &mut Vec<PageIndex>,
    ) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        // Neighbours are freed in one call.
        let mut run: Option<PageRange> = None;
        for page in pages {
            match take(&shared, page) {
                Taken::Nothing => {}
                Taken::Held => held.push(page),
                Taken::Forgotten => self.discards.drop_at_home(page, &shared),
                Taken::Lost => self.recover(page)?,
                Taken::WithBytes => {
                    run = match run {
                        Some(run) if run.end() == u64::from(page.number()) => {
                            Some(PageRange::new(run.first, run.count + 1))
                        }
                        Some(run) => {
                            self.free_run(run)?;
                            Some(PageRange::new(page, 1))
                        }
                        None => Some(PageRange::new(page, 1)),
                    };
                }
            }
        }
        run.map_or(Ok(()), |run| self.free_run(run))
    }

    /// Makes a lost page that this thread holds usable again: untouched.
    fn recover(&mut self, page: PageIndex) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        // Poison is in the mapping only.
        let zapped = shared.memory.zap(page, 1);
        zapped.map_err(|source| PagerError::Userfaultfd {
            call: "MADV_DONTNEED",
            page,
            source,
        })?;
        let before = shared.map.entry(page).finish_drop(Kind::Untouched);
        shared.losses.note_recovered();
        if before.is_contended() {
            shared.faults.retry(page);
        }
        // Its bytes stay here from now on.
        if shared.budget.grow(1) || before.is_contended() {
            shared.faults.wake();
        }
        Ok(())
    }

    /// Frees the bytes of pages that this thread holds.
    fn free_run(&mut self, run: PageRange) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        let punched = shared.memory.punch(run.first, run.count as usize);
        punched.map_err(|source| PagerError::Userfaultfd {
            call: "PUNCH_HOLE",
            page: run.first,
            source,
        })?;
        shared
            .stats
            .free_pages
            .dropped_here
            .add(u64::from(run.count));
        let mut contended = false;
        for page in run.iter() {
            let before = shared.map.entry(page).finish_drop(Kind::Untouched);
            shared.fingerprints.release(page, before);
            if before.is_contended() {
                contended = true;
                shared.faults.retry(page);
            }
            self.discards.drop_at_home(page, &shared);
        }
        if shared.budget.release(u64::from(run.count)) || contended {
            shared.faults.wake();
        }
        Ok(())
    }

    /// Sends drops to donors while there is room; returns true when any was posted.
    fn post_drops(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut worked = false;
        let mut moving = Vec::new();
        while let Some(run) = self.discards.drops.pop_front() {
            let left = BLOCK_PAGES - run.first.number() % BLOCK_PAGES;
            let (run, beyond) = run.split_at(left);
            self.discards.resume_with(beyond);
            if self.relocation.holds(HomeTable::block_of(run.first)) {
                moving.push(run);
                continue;
            }
            // Only pages whose bytes at home no request will read; see above.
            let untouched = |page| shared.map.entry(page).state().kind() == Kind::Untouched;
            let skipped = run.iter().take_while(|&page| !untouched(page)).count();
            let (_, rest) = run.split_at(u32::try_from(skipped).unwrap_or(u32::MAX));
            if rest.count == 0 {
                continue;
            }
            let first = rest.first;
            // Node and slots come from one read: the block may get another home concurrently.
            let home = shared.homes.remote_home_of(first);
            let Some(home) = home.filter(|_| !shared.homes.is_lost(first)) else {
                // Its block was unplugged in the meantime, or its home was lost.
                continue;
            };
            let link = shared.homes.link_to_home(home);
            if self.transports[link].is_vacant() {
                // Nothing is left there that could forget them.
                continue;
            }
            if self.transports[link].in_flight() >= IN_FLIGHT_FOR_DROPS {
                self.discards.resume_with(rest);
                break;
            }
            let count = rest.iter().take_while(|&page| untouched(page)).count();
            let most = u32::try_from(count).unwrap_or(u32::MAX);
            let count = shared.homes.contiguous(first, home, most);
            let (part, after) = rest.split_at(count);
            self.discards.resume_with(after);
            if part.count > 0 {
                self.transports[link]
                    .post_drop(home.offset_of(first), part.count)
                    .expect("a free place was seen");
                worked = true;
            }
        }
        for run in moving.into_iter().rev() {
            self.discards.resume_with(run);
        }
        if worked {
            for transport in &mut self.transports {
                transport.flush();
            }
        }
        worked
    }
}

/// Takes a page from the guest.
fn take(shared: &Shared, page: PageIndex) -> Taken {
    let entry = shared.map.entry(page);
    loop {
        let seen = entry.state();
        match seen.kind() {
            Kind::Untouched => return Taken::Nothing,
            Kind::Remote => {
                if entry.forget(seen) {
                    return Taken::Forgotten;
                }
            }
            Kind::Resident | Kind::Probation | Kind::WritingBack => {
                if entry.begin_discard(seen) {
                    return Taken::WithBytes;
                }
            }
            Kind::Lost => {
                if entry.begin_recovery(seen) {
                    return Taken::Lost;
                }
            }
            Kind::Fetching | Kind::Installing | Kind::Dropping => return Taken::Held,
        }
    }
}
