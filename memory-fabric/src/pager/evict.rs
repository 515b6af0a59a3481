//! The evictor: keeps a reserve of free memory ahead of the faults that need it.
//!
//! User space cannot see which pages a guest uses. Therefore the oldest pages are unmapped and put
//! on probation: one that is touched again returns by a minor fault, which costs no traffic, and
//! counts as used; one that is not is evicted, as `judge` decides. `ranking` determines which pages
//! count as the oldest.

mod discard;
mod judge;
mod lost;
mod moves;

use super::ahead::{AheadQueue, Oldest};
use super::mailbox::EvictorInbox;
use super::ranking::Ranking;
use super::relocate::Relocation;
use super::wait::Waiter;
use super::{PagerError, Shared};
use crate::homes::Eviction;
use crate::page::{PAGE_SIZE, PageBytes, PageIndex, PageRange};
use crate::page_map::Kind;
use crate::transport::{Completion, IN_FLIGHT_MAX, PageTransport, Ticket};
use crate::zap::{ZapError, Zapper};
use discard::Discards;
use std::sync::Arc;

/// Pages put on probation or decided on between polls for completions.
const BATCH: usize = 64;

/// State of the evictor.
#[derive(Debug)]
pub(crate) struct Evictor {
    shared: Arc<Shared>,
    /// One for each donor, in order.
    transports: Vec<Box<dyn PageTransport>>,
    inbox: EvictorInbox,
    ranking: Ranking,
    zapper: Zapper,
    /// Prefetched pages.
    ahead: AheadQueue,
    /// Write-backs, indexed by ticket.
    writing: Vec<Option<(PageIndex, usize)>>,
    free_tickets: Vec<u32>,
    /// The bytes of the page that is about to be written back.
    bytes: Box<PageBytes>,
    /// Pages that this thread holds to drop them.
    dropping: Option<Dropping>,
    filling: Option<Filling>,
    /// Pages that the guest has freed.
    discards: Discards,
    /// Blocks that move to other donors.
    relocation: Relocation,
    waiter: Waiter,
}

/// A run of pages to drop.
#[derive(Clone, Copy, Debug)]
struct Dropping {
    run: PageRange,
    /// Their kind afterwards.
    to: Kind,
    /// Whether they were prefetched, and never touched.
    unused: bool,
}

/// The part of the cache on probation while memory is short: 1 / so many, on links of all tiers.
const PROBATION_SHARE: u64 = 8;

/// The current refill of the reserve.
#[derive(Clone, Copy, Debug)]
struct Filling {
    /// Number of faults that had waited for memory before.
    waited_before: u64,
    /// Minimum of free pages so far.
    least_free: u64,
}

impl Evictor {
    pub(crate) fn new(
        shared: Arc<Shared>,
        transports: Vec<Box<dyn PageTransport>>,
        inbox: EvictorInbox,
    ) -> Self {
        let most = shared.nodes.links() * IN_FLIGHT_MAX;
        let tickets = u32::try_from(most).expect("a few donors");
        let waiter = Waiter::new(shared.spin, shared.nodes.links());
        let ranking = Ranking::new(shared.budget.limit());
        Self {
            shared,
            transports,
            inbox,
            ranking,
            zapper: Zapper::new(),
            ahead: AheadQueue::default(),
            writing: vec![None; most],
            free_tickets: (0..tickets).rev().collect(),
            bytes: Box::new([0; PAGE_SIZE]),
            dropping: None,
            filling: None,
            discards: Discards::default(),
            relocation: Relocation::new(),
            waiter,
        }
    }

    /// Evicts until the pager stops or fails.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        shared.lifecycle.supervise("pager-evict", || self.evict());
    }

    fn evict(&mut self) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        let fds = [self.inbox.fd()];
        loop {
            let mut worked = self.complete()?;
            if let Some(link) = self.inbox.apply_change(&mut self.transports) {
                self.give_up_moves(link);
                if shared.losses.is_lost(link) {
                    self.give_up_writes(link);
                }
                worked = true;
            }
            worked |= self.move_blocks();
            worked |= self.discard_freed()?;
            if self.is_filling() && shared.lifecycle.needs_memory() {
                self.ranking.take_in(&shared.map, &self.inbox);
                worked |= self.settle_prefetched()?;
                self.inbox.clock().set_recent(self.ranking.active());
                worked |= self.probe()?;
                worked |= self.judge()?;
            }
            let lifecycle = &shared.lifecycle;
            if worked && !lifecycle.is_late() {
                self.waiter.worked();
                continue;
            }
            let is_done = || !lifecycle.needs_memory() && lifecycle.has_drained(&self.transports);
            if lifecycle.is_late() || is_done() {
                return Ok(());
            }
            // Nothing moves any more when the pager stops.
            let due = self.relocation.due();
            self.waiter
                .set_due(due.filter(|_| !lifecycle.is_stopping()));
            let slept = self.waiter.idle(&fds, &mut self.transports);
            if slept.map_err(|error| PagerError::System("poll", error))? {
                self.inbox.clear_wake();
            }
        }
    }

    /// Returns whether the reserve is being refilled: from half-empty until full.
    fn is_filling(&mut self) -> bool {
        let shared = &self.shared;
        let budget = &shared.budget;
        let waited = shared.stats.stalled_for_memory.get();
        match &mut self.filling {
            None if budget.is_low() => {
                self.filling = Some(Filling {
                    waited_before: waited,
                    least_free: budget.free(),
                });
            }
            None => {}
            Some(filling) if budget.shortfall() > 0 => {
                filling.least_free = filling.least_free.min(budget.free());
            }
            Some(filling) => {
                budget.adapt_reserve(waited != filling.waited_before, filling.least_free);
                self.filling = None;
            }
        }
        self.filling.is_some()
    }

    /// Moves touched prefetched pages to the other pages, and drops the oldest untouched ones when
    /// there are too many.
    fn settle_prefetched(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        self.ahead.drain(&shared, &self.inbox);
        let mut worked = false;
        for _ in 0..BATCH {
            match self.ahead.next(&shared) {
                None => break,
                Some(Oldest::Touched(page)) => self.ranking.arrived(&shared.map, page),
                Some(Oldest::Gone) => {}
                Some(Oldest::Unused(page)) => {
                    let to = match shared.homes.eviction_of(page) {
                        Eviction::WriteBack(_) => Kind::Remote,
                        // Its home was lost after the page was taken.
                        Eviction::Keep => Kind::Remote,
                        Eviction::Discard => Kind::Untouched,
                    };
                    self.drop_along(page, to, true)?;
                    shared.stats.evictions_clean.increment();
                    shared.stats.prefetch_wasted.increment();
                }
            }
            worked = true;
        }
        self.free_dropped()?;
        Ok(worked)
    }

    /// Puts the oldest mapped pages on probation while too few are.
    fn probe(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        let wanted = self.probation_wanted();
        let mut worked = false;
        for _ in 0..BATCH.min(self.ranking.mapped()) {
            if self.ranking.probed() as u64 >= wanted {
                break;
            }
            let Some(page) = self.ranking.next_mapped(&shared.map) else {
                break;
            };
            if shared.map.entry(page).unlist() {
                // Discarded since it entered the queue.
                worked = true;
                continue;
            }
            if shared.homes.eviction_of(page) == Eviction::Keep {
                self.set_aside(page);
                worked = true;
                continue;
            }
            if !shared.map.entry(page).begin_probation() {
                // A fault thread holds it at the moment: it is in use.
                self.ranking.used(&shared.map, page);
                continue;
            }
            worked = true;
            self.ranking.on_probation(&shared.map, page);
            self.zapper.add(&shared.memory, page).map_err(zap_failed)?;
        }
        self.zapper.flush(&shared.memory).map_err(zap_failed)?;
        Ok(worked)
    }

    /// Returns how many pages should be on probation while memory is short.
    fn probation_wanted(&self) -> u64 {
        let budget = &self.shared.budget;
        (budget.cache() / PROBATION_SHARE).max(budget.shortfall())
    }

    /// A page of added memory with its home here needs no eviction: it is left out of the queues.
    fn set_aside(&mut self, page: PageIndex) {
        if !self.shared.map.entry(page).set_aside() {
            // Another thread holds it at the moment.
            self.ranking.used(&self.shared.map, page);
        }
    }

    /// Keeps a page that was touched during its eviction; drops one that was discarded.
    fn rescued(&mut self, page: PageIndex) {
        if self.shared.map.entry(page).unlist() {
            return;
        }
        self.shared.stats.evictions_cancelled.increment();
        self.ranking.used(&self.shared.map, page);
    }

    /// Drops the pages whose write-backs the donors have confirmed.
    fn complete(&mut self) -> Result<bool, PagerError> {
        let mut result = Ok(());
        let mut any = false;
        let mut transports = std::mem::take(&mut self.transports);
        for (link, transport) in transports.iter_mut().enumerate() {
            transport.poll(&mut |completion| {
                any = true;
                let Ticket(ticket) = match completion {
                    Completion::Written(ticket) if Relocation::is_for_move(ticket) => {
                        self.moved_page(link, ticket);
                        return;
                    }
                    Completion::Read(ticket, bytes) => {
                        self.read_to_move(link, ticket, bytes);
                        return;
                    }
                    Completion::Unread(ticket) => {
                        self.relocation.unread(ticket);
                        return;
                    }
                    Completion::Written(ticket) => ticket,
                    Completion::Dropped(pages) => {
                        let dropped = &self.shared.stats.free_pages.dropped_at_home;
                        dropped.add(u64::from(pages));
                        return;
                    }
                    _ => unreachable!("only single pages are read here, to move them"),
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
        self.free_dropped()?;
        Ok(any)
    }

    fn written(&mut self, page: PageIndex) -> Result<(), PagerError> {
        if self.shared.homes.is_lost(page) {
            self.take_back(page);
            Ok(())
        } else if self.shared.map.entry(page).begin_drop(Kind::WritingBack) {
            self.drop_page(page, Kind::Remote)
        } else {
            self.rescued(page);
            Ok(())
        }
    }

    /// Frees the bytes of a page that this thread holds, soon and together with its neighbours.
    fn drop_page(&mut self, page: PageIndex, to: Kind) -> Result<(), PagerError> {
        self.drop_along(page, to, false)
    }

    fn drop_along(&mut self, page: PageIndex, to: Kind, unused: bool) -> Result<(), PagerError> {
        if let Some(Dropping { run, .. }) = self
            .dropping
            .as_mut()
            .filter(|dropping| dropping.to == to && dropping.unused == unused)
            && run.end() == u64::from(page.number())
            && (run.count as usize) < BATCH
        {
            run.count += 1;
            return Ok(());
        }
        self.free_dropped()?;
        self.dropping = Some(Dropping {
            run: PageRange::new(page, 1),
            to,
            unused,
        });
        Ok(())
    }

    /// Frees the dropped run in one call: each call takes the file's lock, which threads that
    /// create pages need too.
    fn free_dropped(&mut self) -> Result<(), PagerError> {
        let Some(Dropping { run, to, unused }) = self.dropping.take() else {
            return Ok(());
        };
        let shared = &self.shared;
        let punched = shared.memory.punch(run.first, run.count as usize);
        punched.map_err(|error| PagerError::Userfaultfd {
            call: "PUNCH_HOLE",
            page: run.first,
            source: error,
        })?;
        let mut contended = false;
        for page in run.iter() {
            let entry = shared.map.entry(page);
            // It is in no queue: it was taken out before it was held.
            entry.set_stamp(if unused {
                self.inbox.clock().never_used()
            } else {
                self.inbox.clock().tick()
            });
            let before = entry.finish_drop(to);
            shared.fingerprints.release(page, before);
            if before.is_contended() {
                shared.faults.retry(page);
                contended = true;
            }
        }
        shared.stats.evictions.add(run.count.into());
        if shared.budget.release(run.count.into()) || contended {
            shared.faults.wake();
        }
        Ok(())
    }
}

fn zap_failed(error: ZapError) -> PagerError {
    PagerError::Userfaultfd {
        call: "MADV_DONTNEED",
        page: error.page,
        source: error.source,
    }
}
