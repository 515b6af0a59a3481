//! Pages that the guest has freed: the evictor's part.
//!
//! The evictor takes the pages away, because it alone unmaps pages and frees their bytes. A page
//! that somebody else holds (one that is being fetched, say) is waited for. A page that is
//! in a queue stays there; the evictor takes it out when it comes across it.
//!
//! What the donor has of the pages is dropped by frames on the bulk connection, behind the
//! write-backs that were posted before. Such a frame waits until there is room for it, and the
//! guest may use its pages meanwhile; so only those are named that are untouched when it is
//! posted. This thread alone could make their slots valid again, by a later write-back, and that
//! is posted behind the frame.

use super::{Evictor, PagerError, Shared};
use crate::discard::Request;
use crate::homes::BLOCK_PAGES;
use crate::page::{PageIndex, PageRange};
use crate::page_map::Kind;
use crate::transport::IN_FLIGHT_MAX;
use crate::wire::DROP_PAGES_MAX;
use crossbeam_channel::Sender;
use std::collections::VecDeque;
use std::sync::Arc;

/// Pages looked at before the evictor sees to its other work.
const SLICE: u32 = 512;

/// Runs of pages that wait for being dropped at home, at the most. What comes beyond that stays
/// there, unused, until it is written again or the lease ends.
const DROPS_MAX: usize = 1024;

/// Requests outstanding on a transport up to which drops are posted: the rest is for write-backs.
const IN_FLIGHT_FOR_DROPS: usize = IN_FLIGHT_MAX / 2;

/// What there is to discard.
#[derive(Debug, Default)]
pub(super) struct Discards {
    current: Option<Progress>,
    /// Runs of pages whose homes are to drop them.
    drops: VecDeque<PageRange>,
}

impl Discards {
    /// The run with which dropping goes on; an empty one is none.
    fn resume_with(&mut self, run: PageRange) {
        if run.count > 0 {
            self.drops.push_front(run);
        }
    }

    /// Remembers that a page's bytes at home are of no use.
    fn drop_at_home(&mut self, page: PageIndex, shared: &Shared) {
        if shared.homes.remote_home_of(page).is_none() {
            return;
        }
        // Where the run is not stored one behind the other, it is split when it is posted.
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

/// A request that is being carried out.
#[derive(Debug)]
struct Progress {
    request: Arc<Request>,
    done: Sender<()>,
    /// The range that is next, and the pages of it that are done.
    range: usize,
    offset: u32,
    /// Pages that somebody else held.
    held: Vec<PageIndex>,
}

/// What became of a page.
enum Taken {
    /// It has no bytes anywhere.
    Nothing,
    /// It had none here.
    Forgotten,
    /// It has bytes here, which the caller must free.
    WithBytes,
    /// Somebody else holds it.
    Held,
}

impl Evictor {
    /// Discards some pages, if there is a request; true when there was something to do.
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
        let given_up = request.given_up();
        if *given_up {
            return Ok(worked);
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
            if current.held.is_empty() && (!request.settles || self.is_settled(&request)) {
                // That nobody waits any more is no error.
                let _ = current.done.send(());
                self.post_drops();
                return Ok(worked);
            }
            if current.held.len() == before || current.held.is_empty() {
                // Whoever holds them needs the processor.
                std::thread::yield_now();
            }
        }
        self.discards.current = Some(current);
        Ok(worked)
    }

    /// Whether nothing of a request is on its way home, and its homes were told what to drop.
    fn is_settled(&self, request: &Request) -> bool {
        let meets = |run: PageRange| {
            let after = |a: PageRange, b: PageRange| a.end() <= u64::from(b.first.number());
            let mut ranges = request.ranges.iter();
            ranges.any(|&range| !after(run, range) && !after(range, run))
        };
        let mut writing = self.writing.iter().flatten();
        !writing.any(|&(page, _)| meets(PageRange::new(page, 1)))
            && !self.discards.drops.iter().any(|&run| meets(run))
    }

    /// Discards pages; those that somebody else holds go to `held`.
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

    /// Tells donors what to drop, as far as there is room; true when something was posted.
    fn post_drops(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut worked = false;
        while let Some(run) = self.discards.drops.pop_front() {
            // Only pages whose bytes at home no request will ask for; see above.
            let untouched = |page| shared.map.entry(page).state().kind() == Kind::Untouched;
            let skipped = run.iter().take_while(|&page| !untouched(page)).count();
            let (_, rest) = run.split_at(u32::try_from(skipped).unwrap_or(u32::MAX));
            if rest.count == 0 {
                continue;
            }
            let first = rest.first;
            // Node and slots are of one look: a block may get another home meanwhile.
            let Some(home) = shared.homes.remote_home_of(first) else {
                // Of a block that was unplugged meanwhile.
                let left = BLOCK_PAGES - first.number() % BLOCK_PAGES;
                self.discards.resume_with(rest.split_at(left).1);
                continue;
            };
            let link = shared.nodes.link_to_home(home);
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
        if worked {
            for transport in &mut self.transports {
                transport.flush();
            }
        }
        worked
    }
}

/// Takes a page away from the guest.
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
            Kind::Fetching | Kind::Installing | Kind::Dropping => return Taken::Held,
        }
    }
}
