//! The evictor: keeps a reserve of free memory, ahead of the faults that will want it.
//!
//! User space cannot see which pages a guest uses. So the oldest pages are unmapped and put
//! on probation: one that is touched again comes back by a minor fault, which costs no
//! traffic, and counts as used; one that is not goes home. A clean page is dropped, a page
//! of zeros becomes untouched again, any other is written back first.

use super::ahead::{AheadQueue, Oldest};
use super::queue::PageQueue;
use super::wait::Waiter;
use super::{PagerError, Shared};
use crate::layout::NodeId;
use crate::page::{PageIndex, PageRange, is_zero};
use crate::page_map::Kind;
use crate::transport::{Completion, IN_FLIGHT_MAX, PageSource, PageTransport, Ticket};
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// Share of the resident pages that are on probation while memory is short: 1 / so many.
/// More finds used pages more surely and costs more minor faults.
const PROBATION_SHARE: u64 = 8;

/// Pages put on probation or judged before the thread looks for completions again.
const BATCH: usize = 64;

/// The evictor's own data.
#[derive(Debug)]
pub(crate) struct Evictor {
    shared: Arc<Shared>,
    /// One for each donor, in order.
    transports: Vec<Box<dyn PageTransport>>,
    /// Mapped pages, oldest first.
    active: PageQueue,
    /// Unmapped pages, oldest first.
    probation: PageQueue,
    /// Pages that were fetched before anybody asked for them.
    ahead: AheadQueue,
    /// Write-backs, indexed by ticket.
    writing: Vec<Option<(PageIndex, usize)>>,
    free_tickets: Vec<u32>,
    /// Pages that this thread holds to drop them, and what they are then.
    dropping: Option<(PageRange, Kind)>,
    waiter: Waiter,
}

impl Evictor {
    pub(crate) fn new(shared: Arc<Shared>, transports: Vec<Box<dyn PageTransport>>) -> Self {
        let most = transports.len() * IN_FLIGHT_MAX;
        let tickets = u32::try_from(most).expect("a few donors");
        let waiter = Waiter::new(shared.spin, transports.len());
        Self {
            shared,
            transports,
            active: PageQueue::default(),
            probation: PageQueue::default(),
            ahead: AheadQueue::default(),
            writing: vec![None; most],
            free_tickets: (0..tickets).rev().collect(),
            dropping: None,
            waiter,
        }
    }

    /// Evicts until the pager stops or fails.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        shared.report_failure("pager-evict", || self.evict());
    }

    fn evict(&mut self) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        let fds = [shared.evict_wake.as_raw_fd()];
        // Between the two watermarks: once the reserve is low it is filled.
        let mut filling = false;
        loop {
            let mut worked = self.complete()?;
            filling = shared.budget.shortfall() > 0 && (filling || shared.budget.is_low());
            if filling && !shared.is_stopping() {
                shared.arrivals.drain_into(&shared.map, &mut self.active);
                worked |= self.settle_ahead()?;
                worked |= self.probe()?;
                worked |= self.judge()?;
            }
            if worked {
                self.waiter.worked();
                continue;
            }
            if shared.is_stopping() && shared.drained(&self.transports) {
                return Ok(());
            }
            let slept = self.waiter.idle(&fds, &self.transports);
            if slept.map_err(|error| PagerError::System("poll", error))? {
                // That nobody rang is no error.
                let _ = shared.evict_wake.read();
            }
        }
    }

    /// Makes pages that were fetched ahead and touched since pages as others are, and drops the
    /// oldest of the others when there are too many.
    fn settle_ahead(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        self.ahead.drain(&shared);
        let mut worked = false;
        for _ in 0..BATCH {
            match self.ahead.next(&shared) {
                None => break,
                Some(Oldest::Touched(page)) => self.active.push(&shared.map, page),
                Some(Oldest::Unused(page)) => {
                    self.discard(page, Kind::Remote)?;
                    shared.stats.evictions_clean.increment();
                    shared.stats.prefetch_wasted.increment();
                }
            }
            worked = true;
        }
        self.free_discarded()?;
        Ok(worked)
    }

    /// Puts the oldest mapped pages on probation, as far as too few are.
    fn probe(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        let wanted = self.probation_wanted();
        let mut worked = false;
        let mut run: Option<(PageIndex, usize)> = None;
        for _ in 0..BATCH.min(self.active.len()) {
            if self.probation.len() as u64 >= wanted {
                break;
            }
            let Some(page) = self.active.pop(&shared.map) else {
                break;
            };
            if !shared.map.entry(page).begin_probation() {
                // A fault thread holds it this moment: it is in use.
                self.active.push(&shared.map, page);
                continue;
            }
            worked = true;
            self.probation.push(&shared.map, page);
            // Neighbours are unmapped in one call.
            run = match run {
                Some((first, count)) if first.index() + count == page.index() => {
                    Some((first, count + 1))
                }
                Some((first, count)) => {
                    self.zap(first, count)?;
                    Some((page, 1))
                }
                None => Some((page, 1)),
            };
        }
        if let Some((first, count)) = run {
            self.zap(first, count)?;
        }
        Ok(worked)
    }

    /// How many pages should be on probation while memory is short.
    fn probation_wanted(&self) -> u64 {
        let budget = &self.shared.budget;
        (budget.limit() / PROBATION_SHARE).max(budget.shortfall())
    }

    fn zap(&self, first: PageIndex, count: usize) -> Result<(), PagerError> {
        let zapped = self.shared.memory.zap(first, count);
        zapped.map_err(|source| PagerError::Userfaultfd {
            call: "MADV_DONTNEED",
            page: first,
            source,
        })
    }

    /// Judges the pages that were longest on probation, as far as memory is wanted.
    fn judge(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        let under_way = self.writing.len() - self.free_tickets.len();
        let shortfall = shared.budget.shortfall().saturating_sub(under_way as u64);
        // Pages get the time that the whole queue takes to prove themselves.
        if (self.probation.len() as u64) < self.probation_wanted() && self.active.len() > 0 {
            return Ok(false);
        }
        let mut worked = false;
        for _ in 0..usize::try_from(shortfall).unwrap_or(BATCH).min(BATCH) {
            let Some(page) = self.probation.pop(&shared.map) else {
                break;
            };
            let entry = shared.map.entry(page);
            let seen = entry.state();
            if seen.kind() != Kind::Probation {
                shared.stats.evictions_cancelled.increment();
                self.active.push(&shared.map, page);
                worked = true;
                continue;
            }
            if !seen.is_dirty() {
                if entry.begin_drop(Kind::Probation) {
                    self.discard(page, Kind::Remote)?;
                    shared.stats.evictions_clean.increment();
                } else {
                    self.rescued(page);
                }
                worked = true;
                continue;
            }
            let donor = self.donor_of(page);
            if self.transports[donor].in_flight() == IN_FLIGHT_MAX {
                // Its home is busy: wait for that, in order.
                self.probation.push(&shared.map, page);
                break;
            }
            worked = true;
            self.send_home(page, donor)?;
        }
        self.free_discarded()?;
        for transport in &mut self.transports {
            transport.flush();
        }
        Ok(worked)
    }

    fn send_home(&mut self, page: PageIndex, donor: usize) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        let entry = shared.map.entry(page);
        if !entry.begin_write_back() {
            self.rescued(page);
            return Ok(());
        }
        let bytes = shared.memory.fabric_page(page);
        // SAFETY: the fabric view is mapped while `shared` lives, and the page's bytes are
        // here until this thread drops them. A fault may map the page for writing right now;
        // then these bytes are stale, but then the state has changed as well and what was
        // found here is not used.
        if is_zero(unsafe { &*bytes }) {
            if entry.begin_drop(Kind::WritingBack) {
                self.discard(page, Kind::Untouched)?;
                shared.stats.evictions_zero.increment();
            } else {
                self.rescued(page);
            }
            return Ok(());
        }
        let extent = shared
            .layout
            .extent_of(page)
            .expect("remote pages have an extent");
        let ticket = self
            .free_tickets
            .pop()
            .expect("one for each place on a transport");
        // SAFETY: as above.
        let source = unsafe { PageSource::new(bytes) };
        self.transports[donor]
            .post_write(Ticket(ticket), extent.offset_of(page), source)
            .expect("a free place was seen");
        self.writing[ticket as usize] = Some((page, donor));
        Ok(())
    }

    /// A page that was touched while it was to be evicted stays.
    fn rescued(&mut self, page: PageIndex) {
        self.shared.stats.evictions_cancelled.increment();
        self.active.push(&self.shared.map, page);
    }

    /// Drops the pages whose write-backs the donors have confirmed.
    fn complete(&mut self) -> Result<bool, PagerError> {
        let mut result = Ok(());
        let mut any = false;
        let mut transports = std::mem::take(&mut self.transports);
        for transport in &mut transports {
            transport.poll(&mut |completion| {
                any = true;
                let Completion::Written(Ticket(ticket)) = completion else {
                    unreachable!("only writes are posted here");
                };
                let (page, donor) = self.writing[ticket as usize]
                    .take()
                    .expect("a ticket in use");
                self.free_tickets.push(ticket);
                self.shared.stats.donors[donor]
                    .pages_written_back
                    .increment();
                if result.is_ok() {
                    result = self.written(page);
                }
            });
        }
        self.transports = transports;
        result?;
        self.free_discarded()?;
        Ok(any)
    }

    fn written(&mut self, page: PageIndex) -> Result<(), PagerError> {
        if self.shared.map.entry(page).begin_drop(Kind::WritingBack) {
            self.discard(page, Kind::Remote)
        } else {
            self.rescued(page);
            Ok(())
        }
    }

    /// Frees the bytes of a page that this thread holds: soon, along with its neighbours.
    fn discard(&mut self, page: PageIndex, to: Kind) -> Result<(), PagerError> {
        if let Some((run, kind)) = &mut self.dropping
            && *kind == to
            && run.end() == u64::from(page.number())
            && (run.count as usize) < BATCH
        {
            run.count += 1;
            return Ok(());
        }
        self.free_discarded()?;
        self.dropping = Some((PageRange::new(page, 1), to));
        Ok(())
    }

    /// Frees what was discarded. One call frees a whole run: each takes the file's lock, which
    /// those who make pages want too, and interrupts the other processors.
    fn free_discarded(&mut self) -> Result<(), PagerError> {
        let Some((run, to)) = self.dropping.take() else {
            return Ok(());
        };
        let shared = &self.shared;
        let punched = shared.memory.punch(run.first, run.count as usize);
        punched.map_err(|error| PagerError::Userfaultfd {
            call: "PUNCH_HOLE",
            page: run.first,
            source: error,
        })?;
        let mut wanted = false;
        for page in run.iter() {
            if shared.map.entry(page).finish_drop(to) {
                // The fault thread always takes these, so there is room soon.
                let _ = shared.retries.send(page);
                wanted = true;
            }
        }
        shared.stats.evictions.add(run.count.into());
        if shared.budget.release(run.count.into()) || wanted {
            let _ = shared.fault_wake.write(1);
        }
        Ok(())
    }

    fn donor_of(&self, page: PageIndex) -> usize {
        let extent = self
            .shared
            .layout
            .extent_of(page)
            .expect("remote pages have an extent");
        debug_assert_ne!(extent.home, NodeId::COMPUTE);
        usize::from(extent.home.0) - 1
    }
}
