//! Fetching pages before they are asked for.
//!
//! The fault thread watches the faults that it serves ([`Foresight`]): that costs no system call
//! and no other thread's time as long as nothing can be predicted, which for random touches is
//! always. A prediction becomes an order in the prefetcher's mailbox, which wakes a prefetcher
//! that sleeps.
//! The prefetcher ([`Prefetcher`]) fetches what is ordered in runs of consecutive pages, on
//! connections of its own, so that no fault waits behind a guess.
//!
//! What comes is written into the memory file, and not mapped: a first touch is then a minor
//! fault, which tells that the guess was right, and that the stream has come so far. In a
//! sequential stream several pages are mapped by it at once. Pages that somebody waits for by
//! the time they come are mapped here.

mod target;

use super::ahead::{map_held, map_run, release_run};
use super::detect::{Detector, Order};
use super::found::{WRITING, failed};
use super::mailbox::{Arrival, PrefetcherInbox};
use super::replay::{can_be_filled, fill, take_untouched};
use super::wait::Waiter;
use super::{PagerError, Shared};
use crate::page::{PAGE_SIZE, PageIndex, PageRange};
use crate::page_map::Kind;
use crate::transport::{Completion, IN_FLIGHT_MAX, PageTransport, Ticket};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use target::{Target, give_back};

/// Pages that a replay fills in one call.
const RUN_PAGES: u32 = 32;

/// The fault thread's part: watches faults, and leaves orders.
#[derive(Debug)]
pub(crate) struct Foresight {
    detector: Detector,
    noted: Option<(u32, PageIndex)>,
}

impl Foresight {
    /// No stream is known yet.
    pub(crate) fn new() -> Self {
        Self {
            detector: Detector::new(),
            noted: None,
        }
    }

    /// Thread `source` touched `page`. A later touch takes the place of one before.
    pub(super) fn note(&mut self, source: u32, page: PageIndex) {
        self.noted = Some((source, page));
    }

    /// Guesses from what was noted.
    pub(super) fn guess(&mut self, shared: &Shared) {
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

/// A run of pages on its way here.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    run: PageRange,
    donor: usize,
    chain: u32,
}

/// The prefetcher's own data.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    shared: Arc<Shared>,
    /// One for each donor, in order.
    transports: Vec<Box<dyn PageTransport>>,
    inbox: PrefetcherInbox,
    /// What is left of the order that is being carried out.
    order: Option<Order>,
    /// Indexed by ticket.
    fetches: Vec<Option<Fetch>>,
    free_tickets: Vec<u32>,
    /// For each donor, pages on their way.
    pages_in_flight: Vec<u32>,
    /// What an earlier run touched first, and is not looked at yet.
    replay: VecDeque<PageRange>,
    waiter: Waiter,
}

impl Prefetcher {
    pub(crate) fn new(
        shared: Arc<Shared>,
        transports: Vec<Box<dyn PageTransport>>,
        inbox: PrefetcherInbox,
        replay: Vec<PageRange>,
    ) -> Self {
        let most = shared.nodes.links() * IN_FLIGHT_MAX;
        let tickets = u32::try_from(most).expect("a few donors");
        let waiter = Waiter::new(shared.spin, shared.nodes.links());
        let left = replay.iter().map(|run| u64::from(run.count)).sum();
        shared.stats.replay_left.store(left, Ordering::Relaxed);
        Self {
            pages_in_flight: vec![0; shared.nodes.links()],
            shared,
            transports,
            inbox,
            order: None,
            fetches: vec![None; most],
            free_tickets: (0..tickets).rev().collect(),
            replay: replay.into(),
            waiter,
        }
    }

    /// Carries out orders until the pager stops or fails.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        shared
            .lifecycle
            .supervise("pager-prefetch", || self.serve());
    }

    fn serve(&mut self) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        let lifecycle = &shared.lifecycle;
        let fds = [self.inbox.fd()];
        loop {
            let mut worked = self.complete()?;
            worked |= self.inbox.apply_changes(&mut self.transports);
            if !lifecycle.is_stopping() {
                worked |= self.carry_out();
                worked |= self.replay()?;
            }
            if worked {
                self.waiter.worked();
                continue;
            }
            if lifecycle.is_stopping() && lifecycle.has_drained(&self.transports) {
                return Ok(());
            }
            if self.waiter.looks_again() {
                continue;
            }
            self.inbox.fall_asleep();
            // The rest of an order waits for an answer, or for memory.
            let nothing_new =
                (!self.inbox.has_orders() || self.order.is_some()) && !self.inbox.has_changes();
            let ends = lifecycle.is_stopping() && !self.is_waiting();
            if nothing_new && !ends {
                let slept = self.waiter.sleep(&fds, &mut self.transports);
                slept.map_err(|error| PagerError::System("poll", error))?;
                self.inbox.clear_wake();
            }
            self.inbox.awake();
        }
    }

    /// Whether answers are outstanding: then sleeping ends by itself.
    fn is_waiting(&self) -> bool {
        self.transports
            .iter()
            .any(|transport| transport.in_flight() > 0)
    }

    /// Makes ready the next pages of an earlier run, while memory is plentiful: untouched ones
    /// are filled with zeros, remote ones are fetched. Nothing is evicted for that: it ends when
    /// memory is no longer plentiful.
    fn replay(&mut self) -> Result<bool, PagerError> {
        let shared = Arc::clone(&self.shared);
        if self.order.is_some() {
            // It goes first, and the donor is busy.
            return Ok(false);
        }
        let Some(run) = self.replay.pop_front() else {
            return Ok(false);
        };
        if !shared.budget.is_plentiful() {
            self.replay.clear();
            shared.stats.replay_left.store(0, Ordering::Relaxed);
            return Ok(false);
        }
        let (part, _) = run.split_at(RUN_PAGES);
        let filled = take_untouched(&shared, part);
        let mut done = filled;
        if filled > 0 {
            fill(&shared, PageRange::new(part.first, filled))?;
        } else {
            let passed = part
                .iter()
                .take_while(|&page| !can_be_filled(&shared, page));
            // At least one: a page may have changed meanwhile, or memory be short.
            done = u32::try_from(passed.count()).unwrap_or(1).max(1);
            self.order = self.begin(Order {
                first: part.first.number(),
                stride: 1,
                count: done,
                chain: 1,
            });
            for transport in &mut self.transports {
                transport.flush();
            }
        }
        let (_, rest) = run.split_at(done);
        let looked_at = u64::from(run.count - rest.count);
        let left = &shared.stats.replay_left;
        // This thread alone changes it.
        left.fetch_sub(looked_at, Ordering::Relaxed);
        if rest.count > 0 {
            self.replay.push_front(rest);
        }
        Ok(true)
    }

    /// Asks for what is ordered, as far as there is room for it.
    fn carry_out(&mut self) -> bool {
        let mut worked = false;
        while let Some(order) = self.order.take().or_else(|| self.inbox.next_order()) {
            let before = order.count;
            self.order = self.begin(order);
            worked |= self.order.is_none_or(|rest| rest.count < before);
            if self.order.is_some() {
                break;
            }
        }
        for transport in &mut self.transports {
            transport.flush();
        }
        worked
    }

    /// Asks for the pages of an order that are remote. What comes back is what there is no room
    /// for now.
    fn begin(&mut self, order: Order) -> Option<Order> {
        let mut low = false;
        let rest = self.ask(ascending(order), &mut low);
        if low {
            self.shared.evictor.notify_low_memory();
        }
        rest
    }

    /// The same, for the evictor to be told afterwards whether memory became `low`.
    fn ask(&mut self, mut rest: Order, low: &mut bool) -> Option<Order> {
        let shared = Arc::clone(&self.shared);
        while rest.count > 0 {
            let page = PageIndex::new(rest.first);
            // So that no page is taken in vain, as a rule: until one is held, its block may be
            // unplugged, and plugged at another home.
            let Some(likely) = Target::of(&shared, rest) else {
                // At home here or nowhere, or past the end: there is nothing to fetch.
                rest = skip(rest, 1)?;
                continue;
            };
            if !self.has_room(&likely) {
                break;
            }
            match self.take(page) {
                Taken::Yes { low: is_low } => *low |= is_low,
                Taken::NotRemote => {
                    rest = skip(rest, 1)?;
                    continue;
                }
                Taken::NoMemory => {
                    *low = true;
                    break;
                }
            }
            // Its home stays from here on.
            let target = Target::of(&shared, rest).filter(|target| self.has_room(target));
            let Some(target) = target else {
                give_back(&shared, page);
                rest = skip(rest, 1)?;
                continue;
            };
            let mut taken = 1;
            let mut spent = false;
            while taken < target.most {
                match self.take(PageIndex::new(rest.first + taken)) {
                    Taken::Yes { low: is_low } => *low |= is_low,
                    Taken::NotRemote => break,
                    Taken::NoMemory => {
                        spent = true;
                        break;
                    }
                }
                taken += 1;
            }
            let run = PageRange::new(page, taken);
            self.post(run, target.donor, target.offset, rest.chain);
            if spent {
                *low = true;
                rest = skip(rest, taken)?;
                break;
            }
            // The page that stopped the run needs no fetch.
            rest = skip(rest, (taken + 1).min(target.most))?;
        }
        (rest.count > 0).then_some(rest)
    }

    /// Whether as many pages may be asked for now as come in one request. What is on its way is
    /// bounded, so that what is wanted now does not wait long for what may be wanted later.
    fn has_room(&self, target: &Target) -> bool {
        let donor = target.donor;
        self.transports[donor].in_flight() < IN_FLIGHT_MAX
            && self.pages_in_flight[donor] + target.most <= target.in_flight_max
    }

    /// Takes a page to fetch it.
    fn take(&self, page: PageIndex) -> Taken {
        let shared = &self.shared;
        let entry = shared.map.entry(page);
        let seen = entry.state();
        if seen.kind() != Kind::Remote {
            return Taken::NotRemote;
        }
        let Some(low) = shared.budget.charge_ahead(1) else {
            return Taken::NoMemory;
        };
        if entry.begin_fetch(seen) {
            return Taken::Yes { low };
        }
        if shared.budget.release(1) {
            shared.faults.wake();
        }
        Taken::NotRemote
    }

    /// Sends a request for pages that this thread holds; there is room for it.
    fn post(&mut self, run: PageRange, donor: usize, offset: u64, chain: u32) {
        let ticket = self.free_tickets.pop().expect("one for each place");
        self.transports[donor]
            .post_read_run(Ticket(ticket), offset, run.count)
            .expect("a free place was seen");
        self.pages_in_flight[donor] += run.count;
        self.fetches[ticket as usize] = Some(Fetch { run, donor, chain });
        self.shared.stats.prefetch_issued.add(run.count.into());
    }

    /// Sets aside what has come, and maps what somebody waits for.
    fn complete(&mut self) -> Result<bool, PagerError> {
        let mut result = Ok(());
        let mut any = false;
        let mut transports = std::mem::take(&mut self.transports);
        for transport in &mut transports {
            transport.poll(&mut |completion| {
                any = true;
                let Completion::ReadRun(Ticket(ticket), bytes) = completion else {
                    unreachable!("only runs are asked for here");
                };
                let fetch = self.fetches[ticket as usize]
                    .take()
                    .expect("a ticket in use");
                self.free_tickets.push(ticket);
                self.pages_in_flight[fetch.donor] -= fetch.run.count;
                if result.is_ok() {
                    result = self.arrived(fetch, bytes);
                }
            });
        }
        self.transports = transports;
        result.map(|()| any)
    }

    fn arrived(&self, fetch: Fetch, bytes: &[u8]) -> Result<(), PagerError> {
        let shared = &self.shared;
        let Fetch { run, donor, chain } = fetch;
        debug_assert_eq!(bytes.len(), run.count as usize * PAGE_SIZE);
        let written = shared.memory.write(run.first, bytes);
        written.map_err(failed(WRITING, run.first))?;
        shared.stats.donors[donor]
            .pages_fetched
            .add(run.count.into());
        let mut rest = run;
        let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
        let mut pages = pages.iter();
        while rest.count > 0 {
            let (group, others) = rest.split_at(chain);
            rest = others;
            // Of the bytes that came, since a guest may write a page as soon as it is mapped.
            let mut remember = || {
                for (page, bytes) in group.iter().zip(&mut pages) {
                    let entry = shared.map.entry(page);
                    shared.fingerprints.remember(page, entry, bytes);
                }
            };
            let waits = |page| shared.map.entry(page).state().is_contended();
            if group.iter().any(waits) {
                shared.stats.prefetch_late.increment();
                map_run(shared, group, shared.forecast.map_writable(group.count))?;
                remember();
                release_run(shared, group)?;
                continue;
            }
            remember();
            for page in group.iter() {
                let entry = shared.map.entry(page);
                let is_new = entry.list();
                debug_assert!(is_new, "a remote page is in no queue");
                if entry.finish_ahead(page != group.first) {
                    shared.evictor.push(&shared.map, page, Arrival::Prefetched);
                } else {
                    // Touched just now.
                    shared.stats.prefetch_late.increment();
                    let writable = shared.forecast.map_writable(1);
                    map_held(shared, PageRange::new(page, 1), writable)?;
                    shared.evictor.push(&shared.map, page, Arrival::Touched);
                }
            }
        }
        Ok(())
    }
}

/// What came of an attempt to take a page.
#[derive(Clone, Copy, Debug)]
enum Taken {
    /// It is held now; whether the evictor is to be woken.
    Yes { low: bool },
    /// It is here, on its way, or nowhere.
    NotRemote,
    /// There is no memory to spare.
    NoMemory,
}

/// A run downwards as one upwards: it comes in one piece then.
fn ascending(order: Order) -> Order {
    if order.stride != -1 {
        return order;
    }
    let count = order.count.min(order.first + 1);
    Order {
        first: order.first + 1 - count,
        stride: 1,
        count,
        ..order
    }
}

/// The order without its first `pages`; `None` when nothing is left of it in memory.
fn skip(order: Order, pages: u32) -> Option<Order> {
    let moved = i64::from(order.stride) * i64::from(pages);
    let first = u32::try_from(i64::from(order.first) + moved).ok()?;
    let count = order.count.checked_sub(pages).filter(|&count| count > 0)?;
    Some(Order {
        first,
        count,
        ..order
    })
}

#[cfg(test)]
mod tests;
