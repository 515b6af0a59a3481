//! Fetches pages before they are touched.
//!
//! The fault thread observes the faults that it serves ([`FaultObserver`]): that costs no system
//! call and no other thread's time as long as nothing can be predicted, which for random touches is
//! always. A prediction becomes an order in the prefetcher's mailbox, which wakes a sleeping
//! prefetcher. The prefetcher ([`Prefetcher`]) fetches ordered pages in runs, on separate
//! connections, so that no fault waits behind a prediction.
//!
//! Received pages are written into the memory file without being mapped: the first touch is then a
//! minor fault, which confirms the prediction and the position of the stream. In a sequential
//! stream it maps several pages at once. Pages with waiting faults are mapped on arrival.

mod observer;
mod target;

pub(crate) use observer::FaultObserver;

use super::ahead::{map_held, map_run, release_run};
use super::detect::Order;
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
use target::{Target, abandon};

/// Pages that a replay fills in one call.
const RUN_PAGES: u32 = 32;

/// A run of pages in transit to this node.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    run: PageRange,
    donor: usize,
    chain: u32,
    /// Whether the first page is mapped along with an earlier one.
    continues: bool,
}

/// State of the prefetcher.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    shared: Arc<Shared>,
    /// One for each donor, in order.
    transports: Vec<Box<dyn PageTransport>>,
    inbox: PrefetcherInbox,
    /// The rest of the current order.
    order: Option<Order>,
    /// Indexed by ticket.
    fetches: Vec<Option<Fetch>>,
    free_tickets: Vec<u32>,
    /// For each donor, the number of pages in transit.
    pages_in_flight: Vec<u32>,
    /// First touches of an earlier run that were not processed yet.
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

    /// Executes orders until the pager stops or fails.
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
            if let Some(donor) = self.inbox.apply_change(&mut self.transports) {
                self.give_up(donor);
                worked = true;
            }
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

    /// Gives up pages that a donor does not send any more, because its transport was removed.
    fn give_up(&mut self, donor: usize) {
        for ticket in 0..self.fetches.len() {
            let Some(fetch) = self.fetches[ticket].take_if(|fetch| fetch.donor == donor) else {
                continue;
            };
            self.free_tickets
                .push(u32::try_from(ticket).expect("a few donors"));
            self.pages_in_flight[donor] -= fetch.run.count;
            fetch
                .run
                .iter()
                .for_each(|page| abandon(&self.shared, page));
        }
    }

    /// Returns whether answers are outstanding, which end a sleep.
    fn is_waiting(&self) -> bool {
        self.transports
            .iter()
            .any(|transport| transport.in_flight() > 0)
    }

    /// Prepares the next pages of an earlier run while memory is plentiful: untouched ones are
    /// filled with zeroes, remote ones are fetched. Nothing is evicted for it: it ends when memory
    /// is no longer plentiful.
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
            // At least one: a page may have changed in the meantime, or memory may be short.
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
        // Only this thread changes it.
        left.fetch_sub(looked_at, Ordering::Relaxed);
        if rest.count > 0 {
            self.replay.push_front(rest);
        }
        Ok(true)
    }

    /// Requests ordered pages while there is room.
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

    /// Requests the remote pages of an order. Returns the part without room.
    fn begin(&mut self, order: Order) -> Option<Order> {
        let mut low = false;
        let rest = self.ask(ascending(order), &mut low);
        if low {
            self.shared.evictor.notify_low_memory();
        }
        rest
    }

    /// Like [`begin`](Self::begin); sets `low` if the evictor must be notified of low memory
    /// afterwards.
    fn ask(&mut self, mut rest: Order, low: &mut bool) -> Option<Order> {
        let shared = Arc::clone(&self.shared);
        while rest.count > 0 {
            let page = PageIndex::new(rest.first);
            // Avoids taking pages needlessly. Before a page is held, its block may be unplugged,
            // and plugged with another home.
            let Some(likely) = Target::of(&shared, rest) else {
                // The home is here or nowhere, or the page is past the end: there is nothing to
                // fetch.
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
            // Bytes of this page at the home that is read from here on are the right ones.
            let target = Target::of(&shared, rest).filter(|target| self.has_room(target));
            let Some(target) = target else {
                abandon(&shared, page);
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
            // The home that was read before the last pages were taken may be an old one of theirs.
            let now = Target::of(&shared, rest);
            if !now.is_some_and(|now| now.is_same_home(&target)) {
                run.iter().for_each(|page| abandon(&shared, page));
                continue;
            }
            let fetch = Fetch {
                run,
                donor: target.donor,
                chain: rest.chain,
                continues: rest.stride != 1 && !rest.count.is_multiple_of(rest.chain),
            };
            self.post(fetch, target.offset);
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

    /// Returns whether the pages of one request may be requested now. The number in transit is
    /// limited, so that a fault does not wait long for predicted pages.
    fn has_room(&self, target: &Target) -> bool {
        let donor = target.donor;
        let transport = &self.transports[donor];
        !transport.is_vacant()
            && transport.in_flight() < IN_FLIGHT_MAX
            && self.pages_in_flight[donor] + target.most <= target.in_flight_max
    }

    /// Takes a page to fetch it.
    fn take(&self, page: PageIndex) -> Taken {
        let shared = &self.shared;
        let entry = shared.map.entry(page);
        let seen = entry.state();
        if seen.kind() != Kind::Remote || shared.homes.is_lost(page) {
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
    fn post(&mut self, fetch: Fetch, offset: u64) {
        let Fetch { run, donor, .. } = fetch;
        let ticket = self.free_tickets.pop().expect("one for each place");
        self.transports[donor]
            .post_read_run(Ticket(ticket), offset, run.count)
            .expect("a free place was seen");
        self.pages_in_flight[donor] += run.count;
        self.fetches[ticket as usize] = Some(fetch);
        self.shared.stats.prefetch_issued.add(run.count.into());
    }

    /// Stores pages that have arrived, and maps those with waiting faults.
    fn complete(&mut self) -> Result<bool, PagerError> {
        let mut result = Ok(());
        let mut any = false;
        let mut transports = std::mem::take(&mut self.transports);
        for transport in &mut transports {
            transport.poll(&mut |completion| {
                any = true;
                let (Ticket(ticket), bytes) = match completion {
                    Completion::ReadRun(ticket, bytes)
                    | Completion::ReadRunFrom(_, ticket, bytes) => (ticket, Some(bytes)),
                    Completion::Unread(ticket) => (ticket, None),
                    _ => unreachable!("only runs are asked for here"),
                };
                let fetch = self.fetches[ticket as usize]
                    .take()
                    .expect("a ticket in use");
                self.free_tickets.push(ticket);
                self.pages_in_flight[fetch.donor] -= fetch.run.count;
                match bytes {
                    Some(bytes) if result.is_ok() => result = self.arrived(fetch, bytes),
                    Some(_) => {}
                    None => fetch
                        .run
                        .iter()
                        .for_each(|page| abandon(&self.shared, page)),
                }
            });
        }
        self.transports = transports;
        result.map(|()| any)
    }

    fn arrived(&self, fetch: Fetch, bytes: &[u8]) -> Result<(), PagerError> {
        let shared = &self.shared;
        let Fetch {
            run,
            donor,
            chain,
            continues,
        } = fetch;
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
            // From the received bytes, since a guest may write a page as soon as it is mapped.
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
                if entry.finish_ahead(continues || page != group.first) {
                    shared.evictor.push(&shared.map, page, Arrival::Prefetched);
                } else {
                    // It has just been touched.
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

/// Result of an attempt to take a page.
#[derive(Clone, Copy, Debug)]
enum Taken {
    /// It is held now; `low` requests waking the evictor.
    Yes { low: bool },
    /// It is local, in transit, or nowhere.
    NotRemote,
    /// There is no memory to spare.
    NoMemory,
}

/// Converts a descending run to an ascending one, which is fetched in one request.
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

/// Returns the order without its first `pages`; `None` when nothing of it is left.
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
