//! The fault thread: reads a fault, sends the request, installs the page.
//!
//! It never waits for a single event: one loop polls for faults, completions and free memory, so
//! that faults of many vCPUs are served concurrently.

mod elsewhere;
mod zero;

use super::ahead::{map_held, map_steps, take_neighbours};
use super::found::{failed, map_here, write_over};
use super::mailbox::{Arrival, FaultInbox};
use super::prefetch::FaultObserver;
use super::wait::Waiter;
use super::{PagerError, Shared};
use crate::homes::Home;
use crate::page::{PageBytes, PageIndex, PageRange};
use crate::page_map::{Kind, State};
use crate::slices::request_short_slices;
use crate::stats::RemoteTimes;
use crate::transport::{Completion, IN_FLIGHT_MAX, PageTransport, Ticket};
use crate::uffd::{EventBuffer, Fault, Protection};
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

/// Faults read at once.
const FAULT_BATCH: usize = 32;

/// Limit of deferred faults, for lack of memory or of room on a transport, after which no more are
/// read: further ones wait in the kernel.
const DEFERRED_MAX: usize = 256;

/// A fault to be served.
#[derive(Clone, Copy, Debug)]
struct Pending {
    page: PageIndex,
    write: bool,
    write_protected: bool,
    /// The waiting thread, or 0 when it is unknown.
    thread: u32,
    read_at: Instant,
}

/// A page in transit to this node.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    page: PageIndex,
    donor: usize,
    write: bool,
    /// Its kind of arrival.
    arrival: Arrival,
    read_at: Instant,
    posted_at: Instant,
}

/// Result of serving a fault.
#[derive(Debug, Eq, PartialEq)]
enum Served {
    /// It is served, or in progress.
    Yes,
    /// There is no memory for the page at the moment.
    NoMemory,
    /// The transport to its donor is full at the moment.
    DonorBusy,
}

/// State of the fault thread.
#[derive(Debug)]
pub(crate) struct FaultThread {
    shared: Arc<Shared>,
    /// One for each donor, in order.
    transports: Vec<Box<dyn PageTransport>>,
    /// The transport of the last request, until it is flushed.
    posted_to: Option<usize>,
    inbox: FaultInbox,
    deferred: VecDeque<Pending>,
    /// Indexed by ticket.
    fetches: Vec<Option<Fetch>>,
    free_tickets: Vec<u32>,
    /// `None` without prefetching.
    fault_observer: Option<FaultObserver>,
    waiter: Waiter,
}

impl FaultThread {
    pub(crate) fn new(
        shared: Arc<Shared>,
        transports: Vec<Box<dyn PageTransport>>,
        inbox: FaultInbox,
        fault_observer: Option<FaultObserver>,
    ) -> Self {
        let most = shared.nodes.links() * IN_FLIGHT_MAX;
        let tickets = u32::try_from(most).expect("a few donors");
        let waiter = Waiter::new(shared.spin, shared.nodes.links());
        Self {
            shared,
            transports,
            posted_to: None,
            inbox,
            deferred: VecDeque::with_capacity(DEFERRED_MAX + FAULT_BATCH),
            fetches: vec![None; most],
            free_tickets: (0..tickets).rev().collect(),
            fault_observer,
            waiter,
        }
    }

    /// Serves faults until the pager stops or fails.
    pub(crate) fn run(mut self) {
        request_short_slices();
        let shared = Arc::clone(&self.shared);
        shared.lifecycle.supervise("pager-fault", || self.serve());
        shared.lifecycle.faults_end();
        shared.evictor.port().wake();
    }

    fn serve(&mut self) -> Result<(), PagerError> {
        let mut events = EventBuffer::new(FAULT_BATCH);
        let mut faults = Vec::with_capacity(FAULT_BATCH);
        let shared = Arc::clone(&self.shared);
        let fds = [shared.uffd.as_raw_fd(), self.inbox.fd()];
        // False when an answer ended the sleep, so that it is handled first.
        let mut looks_for_faults = true;
        loop {
            let mut worked = self.retry()?;
            if let Some(donor) = self.inbox.apply_change(&mut self.transports) {
                self.serve_elsewhere(donor);
                worked = true;
            }
            if looks_for_faults && self.deferred.len() < DEFERRED_MAX {
                let read = shared
                    .uffd
                    .read_faults(&mut events, |fault| faults.push(fault));
                read.map_err(|error| PagerError::System("reading userfaultfd", error))?;
                worked |= !faults.is_empty();
                let read_at = Instant::now();
                for fault in faults.drain(..) {
                    self.begin(fault, read_at)?;
                }
            }
            looks_for_faults = true;
            worked |= self.complete()?;
            if worked && !shared.lifecycle.is_late() {
                self.waiter.worked();
                continue;
            }
            if shared.lifecycle.is_stopping() && self.may_end() {
                return Ok(());
            }
            // While too many faults are deferred, userfaultfd may stay readable; then only the
            // wake-up and the transports are watched.
            let watched = if self.deferred.len() < DEFERRED_MAX {
                &fds[..]
            } else {
                &fds[1..]
            };
            let slept = self.waiter.idle(watched, &mut self.transports);
            if slept.map_err(|error| PagerError::System("poll", error))? {
                let wake = watched.len() - 1;
                if self.waiter.is_ready(wake) {
                    self.inbox.clear_wake();
                }
                looks_for_faults = wake == 0 || self.waiter.is_ready(0);
            }
        }
    }

    /// Whether the stopping thread may end: each fault is served, or it is late.
    fn may_end(&self) -> bool {
        let lifecycle = &self.shared.lifecycle;
        lifecycle.is_late() || (self.deferred.is_empty() && lifecycle.has_drained(&self.transports))
    }

    fn begin(&mut self, fault: Fault, read_at: Instant) -> Result<(), PagerError> {
        let Fault {
            address,
            write,
            write_protected,
            thread,
        } = fault;
        let page = self
            .shared
            .memory
            .page_at(address)
            .ok_or(PagerError::Stray(address))?;
        self.serve_or_defer(Pending {
            page,
            write,
            write_protected,
            thread,
            read_at,
        })?;
        // `complete` flushes what `retry` posted.
        if let Some(donor) = self.posted_to.take() {
            self.transports[donor].flush();
        }
        // After the request was sent.
        if let Some(fault_observer) = &mut self.fault_observer {
            fault_observer.guess(&self.shared);
        }
        Ok(())
    }

    /// Retries faults that were deferred, or handed back by the evictor.
    fn retry(&mut self) -> Result<bool, PagerError> {
        let mut worked = false;
        while let Some(page) = self.inbox.next_retry() {
            // The kind of access is unknown; if it was a write, the page is mapped read-only first
            // and the write faults again.
            let read_at = Instant::now();
            let pending = Pending {
                page,
                write: false,
                write_protected: false,
                thread: 0,
                read_at,
            };
            self.serve_or_defer(pending)?;
            worked = true;
        }
        for _ in 0..self.deferred.len() {
            let Some(pending) = self.deferred.pop_front() else {
                break;
            };
            match self.serve_one(pending)? {
                Served::Yes => worked = true,
                Served::NoMemory => {
                    self.deferred.push_front(pending);
                    break;
                }
                // A slow donor must not delay faults on other donors' pages.
                Served::DonorBusy => self.deferred.push_back(pending),
            }
        }
        Ok(worked)
    }

    fn serve_or_defer(&mut self, pending: Pending) -> Result<(), PagerError> {
        match self.serve_one(pending)? {
            Served::Yes => return Ok(()),
            Served::NoMemory => self.shared.stats.stalled_for_memory.increment(),
            Served::DonorBusy => {}
        }
        self.deferred.push_back(pending);
        Ok(())
    }

    fn serve_one(&mut self, pending: Pending) -> Result<Served, PagerError> {
        let shared = Arc::clone(&self.shared);
        let entry = shared.map.entry(pending.page);
        loop {
            let seen = entry.state();
            match seen.kind() {
                Kind::Untouched => {
                    if !self.charge() {
                        return Ok(Served::NoMemory);
                    }
                    if entry.begin_install(seen) {
                        self.fill_with_zeros(pending)?;
                        return Ok(Served::Yes);
                    }
                    self.uncharge();
                }
                Kind::Remote if shared.homes.is_lost(pending.page) => {
                    shared.losses.lose(&shared.map, pending.page, seen);
                }
                Kind::Lost => {
                    if entry.begin_poison(seen) {
                        self.poison(pending.page)?;
                        return Ok(Served::Yes);
                    }
                }
                Kind::Remote => {
                    if !self.charge() {
                        return Ok(Served::NoMemory);
                    }
                    if !entry.begin_fetch(seen) {
                        self.uncharge();
                        continue;
                    }
                    let Some(home) = shared.homes.home_of(pending.page) else {
                        // Its block was unplugged while another thread held the page.
                        self.fill_with_zeros(pending)?;
                        return Ok(Served::Yes);
                    };
                    if self.post_fetch(pending, home) {
                        self.note(pending);
                        if let Some(recorder) = &shared.recorder {
                            recorder.record(PageRange::new(pending.page, 1));
                        }
                        return Ok(Served::Yes);
                    }
                    // No other thread could have marked it as contended.
                    let _ = entry.abandon_fetch();
                    self.uncharge();
                    return Ok(Served::DonorBusy);
                }
                Kind::Fetching | Kind::Installing | Kind::Dropping => {
                    if entry.contend(seen) {
                        if seen.kind() == Kind::Fetching {
                            self.note(pending);
                        }
                        return Ok(Served::Yes);
                    }
                }
                Kind::Resident | Kind::Probation | Kind::WritingBack => {
                    if !entry.begin_install(seen) {
                        continue;
                    }
                    if seen.is_ahead() {
                        self.map_ahead(pending)?;
                        self.note(pending);
                    } else {
                        self.map_again(pending, seen)?;
                    }
                    return Ok(Served::Yes);
                }
            }
        }
    }

    /// Records a touch for the prediction.
    fn note(&mut self, pending: Pending) {
        if let Some(fault_observer) = &mut self.fault_observer {
            fault_observer.note(pending.thread, pending.page);
        }
    }

    fn charge(&self) -> bool {
        let shared = &self.shared;
        let charged = shared.budget.charge_or_wait();
        if charged != Some(false) {
            shared.evictor.notify_low_memory();
        }
        charged.is_some()
    }

    fn uncharge(&self) {
        // Only this thread waits for free pages.
        let _ = self.shared.budget.release(1);
    }

    /// Requests the page from its home. Returns false when its transport is full.
    fn post_fetch(&mut self, pending: Pending, home: Home) -> bool {
        let page = pending.page;
        let donor = self.shared.homes.link_to_home(home);
        // Every transport is full.
        let Some(ticket) = self.free_tickets.pop() else {
            return false;
        };
        if self.transports[donor]
            .post_read(Ticket(ticket), home.offset_of(page))
            .is_err()
        {
            self.free_tickets.push(ticket);
            return false;
        }
        self.posted_to = Some(donor);
        self.fetches[ticket as usize] = Some(Fetch {
            page,
            donor,
            write: pending.write,
            arrival: self
                .shared
                .evictor
                .arrival_of(self.shared.map.entry(page).stamp()),
            read_at: pending.read_at,
            posted_at: Instant::now(),
        });
        true
    }

    /// Installs pages that have arrived.
    fn complete(&mut self) -> Result<bool, PagerError> {
        let mut result = Ok(());
        let mut any = false;
        let mut transports = std::mem::take(&mut self.transports);
        for transport in &mut transports {
            transport.poll(&mut |completion| {
                any = true;
                let (from, Ticket(ticket), bytes) = match completion {
                    Completion::Read(ticket, bytes) => (None, ticket, bytes),
                    Completion::ReadFrom(donor, ticket, bytes) => (Some(donor), ticket, bytes),
                    _ => unreachable!("only reads are posted here"),
                };
                let mut fetch = self.fetches[ticket as usize]
                    .take()
                    .expect("a ticket in use");
                fetch.donor = from.unwrap_or(fetch.donor);
                self.free_tickets.push(ticket);
                if result.is_ok() {
                    result = self.install(fetch, bytes);
                }
            });
        }
        self.transports = transports;
        result.map(|()| any)
    }

    fn install(&mut self, fetch: Fetch, bytes: &PageBytes) -> Result<(), PagerError> {
        let shared = &self.shared;
        let writable =
            fetch.write || !shared.copy_write_protected || shared.forecast.map_writable(1);
        let page = fetch.page;
        let arrived_at = Instant::now();
        let protection = if writable {
            shared.map.entry(page).mark_dirty();
            Protection::Writable
        } else {
            Protection::WriteProtected
        };
        let target = shared.memory.guest_page(page);
        match shared.uffd.copy(target, bytes, protection) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                write_over(shared, page, bytes, protection)?;
            }
            copied => copied.map_err(failed("COPY", page))?,
        }
        let done_at = Instant::now();
        // After the vCPU was woken, and from the received bytes: those in the guest view may have
        // been written by now.
        shared
            .fingerprints
            .remember(page, shared.map.entry(page), bytes);
        shared.release(page, fetch.arrival)?;
        let times = RemoteTimes {
            read_at: fetch.read_at,
            posted_at: fetch.posted_at,
            arrived_at,
            done_at,
        };
        shared.stats.record_remote(fetch.donor, &times);
        shared.touches.record(page, arrived_at);
        Ok(())
    }

    /// Serves a fault on a prefetched page, which this thread holds.
    fn map_ahead(&self, pending: Pending) -> Result<(), PagerError> {
        let taken_up_at = Instant::now();
        let shared = &self.shared;
        let Pending { page, write, .. } = pending;
        let observer = self.fault_observer.as_ref();
        let stride = observer.map_or(1, |observer| observer.stride_to(page));
        let run = take_neighbours(shared, page, stride);
        map_held(
            shared,
            run,
            write || shared.forecast.map_writable(run.count),
        )?;
        let stats = &shared.stats;
        stats
            .minor_stages
            .record(&stats.minor, pending.read_at, taken_up_at);
        shared.touches.record(page, taken_up_at);
        // The vCPU continues meanwhile.
        map_steps(shared, page, stride, write)
    }

    /// Serves a fault on a page with local bytes, which this thread holds; `seen` is the state
    /// before.
    fn map_again(&mut self, pending: Pending, seen: State) -> Result<(), PagerError> {
        if pending.write_protected && !seen.is_dirty() {
            self.shared.forecast.was_written();
        }
        let shared = &self.shared;
        let taken_up_at = Instant::now();
        let page = pending.page;
        let entry = shared.map.entry(page);
        let writable = seen.is_dirty() || pending.write || !shared.continue_write_protected;
        if writable && !seen.is_dirty() {
            entry.mark_dirty();
        }
        if pending.write_protected {
            // If the page is no longer mapped, this wakes the waiters, and they fault again.
            let target = shared.memory.guest_page(page);
            let allowed = shared.uffd.allow_writes(target);
            allowed.map_err(failed("WRITEPROTECT", page))?;
            shared.release(page, Arrival::Touched)?;
            shared.stats.write_protect.record(pending.read_at.elapsed());
            return Ok(());
        }
        let protection = if writable {
            Protection::Writable
        } else {
            Protection::WriteProtected
        };
        map_here(shared, page, protection)?;
        shared.release(page, Arrival::Touched)?;
        let stats = &shared.stats;
        stats
            .minor_stages
            .record(&stats.minor, pending.read_at, taken_up_at);
        shared.touches.record(page, taken_up_at);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
