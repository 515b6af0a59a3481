//! A connection for READs and WRITEs of one lease.
//!
//! # When a written page is visible
//!
//! The completion of a WRITE means that the other adapter has received it. It does not mean that
//! its bytes are visible in memory to others (InfiniBand Architecture Specification, volume 1,
//! section 9.5, o9-20): to READs on another queue pair, or to the CPU there. But a READ on the same
//! queue pair is executed after the WRITEs posted before it, and reads memory after their data was
//! written to it. Therefore WRITEs are posted unsignalled, and each batch of up to
//! [`WRITES_PER_FLUSH`] is followed by a READ of a few bytes, its *flush*. Its completion means
//! that all pages of the batch are visible to every reader, so one completion stands for a whole
//! batch.

#![cfg_attr(
    not(feature = "rdma"),
    allow(
        unused_unsafe,
        reason = "without libibverbs these functions require nothing"
    )
)]

mod prepare;

use super::port::{LaneEnds, PageLane};
use super::{LANE_STALL_TIMEOUT, RdmaError};
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_verbs::batch::{Batch, Place};
use fabric_verbs::endpoint::RemoteMemory;
use fabric_verbs::pair::QueuePair;
use fabric_verbs::queue::{CompletionQueue, Taken};
use fabric_verbs::room::Room;
use fabric_verbs::settings::{Retries, Waiting};
use fabric_verbs::staging::Staging;
pub use prepare::{LaneConfig, NewLane};
use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a lane that is being closed waits for outstanding requests. Nothing depends on it:
/// destroying the queue pair ends them all.
const DRAIN_TIME_MAX: Duration = Duration::from_millis(100);

/// Maximum number of WRITEs before a flush: their pages are free when it completes, and the evictor
/// uses others in the meantime.
const WRITES_PER_FLUSH: usize = 16;

/// Bytes that a flush reads, from the end of the last page written.
const FLUSH_BYTES: u32 = 8;

/// Marks the id of a flush, which contains the number of its WRITEs; the ids of requests are small
/// numbers.
const FLUSH: u64 = 1 << 32;

/// Entries in the queues of a lane that writes, for each request: it may be a WRITE with a flush of
/// its own. The completion queue has the same size, since each entry completes when the lane fails.
const ENTRIES_PER_WRITE: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Request {
    /// First page in the staging buffer.
    page: usize,
    pages: usize,
    state: RequestState,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum RequestState {
    Idle,
    Reading,
    Writing,
}

/// A reliable connection for READs from one lease into a staging buffer, and WRITEs from it.
///
/// A lane fails as a whole. Its owner then returns it to the thread that created it, which closes
/// it: that may take time, during which no fault must wait.
pub struct Lane {
    // Drop order: once the queue pair is destroyed the adapter no longer accesses memory, and the
    // staging buffer may be reused.
    pair: QueuePair,
    staging: Staging,
    queue: Arc<CompletionQueue>,
    memory: RemoteMemory,
    room: Room,
    /// Indexed by the number of a request.
    requests: Box<[Request]>,
    /// Requests to post next.
    batch: Batch,
    /// Numbers of WRITEs in posting order.
    writes: VecDeque<u16>,
    /// Number of WRITEs at the end of `writes` without a flush.
    unflushed: usize,
    /// End of the last WRITE in the lease.
    written_end: u64,
    /// Page in the staging buffer into which flushes read; `None` for a lane without WRITEs.
    flush_page: Option<usize>,
    /// Posted requests, including flushes.
    outstanding: usize,
    /// Requests in use, without flushes, and their limit.
    active: usize,
    depth: usize,
    retries: Retries,
    waiting: Waiting,
    taken: Taken,
    /// Time of the last completion, or of the first request after all had completed.
    progress: Instant,
    /// Set when the lane must be closed.
    revoked: Arc<AtomicBool>,
    failed: bool,
    /// Closing it notifies the donor that this end is closed.
    _session: TcpStream,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Lane({}, {} outstanding)",
            self.pair.on(),
            self.outstanding
        )
    }
}

impl Lane {
    /// Returns both ends.
    pub fn ends(&self) -> Option<LaneEnds> {
        let (there, mtu) = self.pair.connected()?;
        Some(LaneEnds {
            here: self.pair.route().clone(),
            there,
            mtu_bytes: mtu.bytes(),
            depth: u16::try_from(self.depth).unwrap_or(u16::MAX),
            retries: self.retries,
            waiting: self.waiting,
        })
    }

    /// Returns the flag that requests the closing of the lane.
    pub fn revocation(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.revoked)
    }

    fn take(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError> {
        let mut any = false;
        loop {
            self.queue.poll(&mut self.taken)?;
            let Some(done) = self.taken.next() else {
                if any {
                    self.progress = Instant::now();
                }
                return Ok(any);
            };
            any = true;
            if !done.is_success() {
                return Err(RdmaError::Completion {
                    verb: self.verb(done.id),
                    on: self.pair.on().to_owned(),
                    status: done.status_text(),
                    code: done.status,
                    vendor: done.vendor,
                });
            }
            if done.id & FLUSH != 0 {
                self.flushed(done.id, complete)?;
                continue;
            }
            let number = u16::try_from(done.id).unwrap_or(u16::MAX);
            let request = self.requests.get_mut(usize::from(number));
            let Some(request) = request.filter(|request| request.state == RequestState::Reading)
            else {
                return Err(self.unasked(done.id));
            };
            request.state = RequestState::Idle;
            let Request { page, pages, .. } = *request;
            self.outstanding -= 1;
            self.active -= 1;
            // SAFETY: the READ into these pages has completed, and none is posted before the pages
            // are freed below.
            complete(number, unsafe { self.staging.bytes(page, pages) });
            self.room.free(page, pages);
        }
    }

    /// Like [`PageLane::add`], for a number of bytes.
    pub(super) fn add_bytes(&mut self, number: u16, offset: u64, bytes: u32) -> bool {
        let pages = (bytes as usize).div_ceil(PAGE_SIZE);
        if !self.take_place(number, offset, pages, RequestState::Reading) {
            return false;
        }
        let place = Place {
            bytes,
            ..self.place(self.requests[usize::from(number)].page, pages)
        };
        self.batch
            .read(number.into(), self.memory.base + offset, place);
        true
    }

    /// Completes all WRITEs of a completed flush.
    fn flushed(&mut self, id: u64, complete: &mut dyn FnMut(u16, &[u8])) -> Result<(), RdmaError> {
        let count = usize::try_from(id & !FLUSH).unwrap_or(usize::MAX);
        if count == 0 || count > self.writes.len() - self.unflushed {
            return Err(self.unasked(id));
        }
        self.outstanding -= 1 + count;
        self.active -= count;
        for number in self.writes.drain(..count) {
            let request = &mut self.requests[usize::from(number)];
            request.state = RequestState::Idle;
            self.room.free(request.page, request.pages);
            complete(number, &[]);
        }
        Ok(())
    }

    /// Returns the verb of a completion. The flush after WRITEs is a READ.
    fn verb(&self, id: u64) -> &'static str {
        let number = usize::try_from(id).unwrap_or(usize::MAX);
        match self.requests.get(number).map(|request| request.state) {
            Some(RequestState::Writing) => "WRITE",
            _ => "READ",
        }
    }

    fn unasked(&self, id: u64) -> RdmaError {
        let on = self.pair.on().to_owned();
        RdmaError::Unasked { on, id }
    }

    /// Allocates pages in the staging buffer for an idle request.
    fn take_place(&mut self, number: u16, offset: u64, pages: usize, state: RequestState) -> bool {
        let bytes = (pages * PAGE_SIZE) as u64;
        assert!(
            offset
                .checked_add(bytes)
                .is_some_and(|end| end <= self.memory.bytes),
            "the layout stays inside the lease"
        );
        let request = &mut self.requests[usize::from(number)];
        assert!(
            request.state == RequestState::Idle,
            "number {number} is in use"
        );
        if self.active >= self.depth {
            return false;
        }
        let Some(page) = self.room.take(pages) else {
            return false;
        };
        self.active += 1;
        *request = Request { page, pages, state };
        true
    }

    fn place(&self, page: usize, pages: usize) -> Place {
        Place {
            address: self.staging.address(page, pages),
            bytes: u32::try_from(pages * PAGE_SIZE).expect("a run is short"),
            key: self.staging.local_key(),
        }
    }

    /// Adds a flush for the WRITEs without one.
    fn add_flush(&mut self) {
        let id = FLUSH | self.unflushed as u64;
        self.unflushed = 0;
        let place = Place {
            bytes: FLUSH_BYTES,
            ..self.place(self.flush_page.expect("a lane that writes"), 1)
        };
        let from = self.memory.base + self.written_end - u64::from(FLUSH_BYTES);
        self.batch.read(id, from, place);
    }

    /// Reads one page at `offset` of the lease while nothing else is outstanding; returns the
    /// duration, and passes the bytes to `take`.
    pub fn read_now(
        &mut self,
        offset: u64,
        within: Duration,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<Duration, RdmaError> {
        if self.failed {
            return Err(RdmaError::CalledBack(self.pair.on().to_owned()));
        }
        let started = Instant::now();
        assert!(self.add(0, offset, 1), "a lane that is idle has room");
        self.post()?;
        while !self.poll(&mut |_, bytes| take(bytes))? {
            let waited = started.elapsed();
            if waited >= within {
                self.failed = true;
                let on = self.pair.on().to_owned();
                return Err(RdmaError::Stalled { on, waited });
            }
            std::thread::yield_now();
        }
        Ok(started.elapsed())
    }

    /// Ends the connection and takes the resulting completions for a limited time.
    fn drain(&mut self) {
        if let Err(error) = self.pair.fail() {
            tracing::debug!("{error}");
            return;
        }
        let deadline = Instant::now() + DRAIN_TIME_MAX;
        while self.outstanding > 0 && Instant::now() < deadline {
            if self.queue.poll(&mut self.taken).is_err() {
                return;
            }
            if self.taken.next().is_some() {
                self.outstanding -= 1;
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl PageLane for Lane {
    fn add(&mut self, number: u16, offset: u64, pages: usize) -> bool {
        let bytes = u32::try_from(pages * PAGE_SIZE).expect("a run is short");
        self.add_bytes(number, offset, bytes)
    }

    fn add_write(&mut self, number: u16, offset: u64, source: &PageBytes) -> bool {
        assert!(self.flush_page.is_some(), "a lane that writes");
        if !self.take_place(number, offset, 1, RequestState::Writing) {
            return false;
        }
        let page = self.requests[usize::from(number)].page;
        // SAFETY: the page was free until now, so no request uses it.
        *unsafe { self.staging.page_mut(page) } = *source;
        let place = self.place(page, 1);
        self.batch
            .write(number.into(), self.memory.base + offset, place);
        self.writes.push_back(number);
        self.unflushed += 1;
        self.written_end = offset + PAGE_SIZE as u64;
        if self.unflushed == WRITES_PER_FLUSH {
            self.add_flush();
        }
        true
    }

    fn page_of(&self, number: u16) -> &PageBytes {
        let request = &self.requests[usize::from(number)];
        assert!(
            request.state == RequestState::Writing,
            "number {number} is not a WRITE"
        );
        // SAFETY: adapters only read the page of a WRITE, whose contents were stored before.
        let bytes = unsafe { self.staging.bytes(request.page, 1) };
        bytes.try_into().expect("a page")
    }

    fn post(&mut self) -> Result<(), RdmaError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        if self.unflushed > 0 {
            self.add_flush();
        }
        if self.outstanding == 0 {
            self.progress = Instant::now();
        }
        self.outstanding += self.batch.len();
        // SAFETY: each request has a run of the staging buffer of its own: that of a READ is read
        // only after its completion, that of a WRITE is not changed before it. The page of flushes
        // is never read. The buffer outlives the queue pair.
        let posted = unsafe { self.pair.post(&mut self.batch) };
        posted.inspect_err(|_| self.failed = true)
    }

    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError> {
        // Relaxed: it orders no other memory accesses.
        if self.revoked.load(Ordering::Relaxed) {
            self.failed = true;
            return Err(RdmaError::CalledBack(self.pair.on().to_owned()));
        }
        if self.outstanding == 0 {
            return Ok(false);
        }
        let result = self.take(complete);
        self.failed |= result.is_err();
        match result {
            Ok(false) if self.progress.elapsed() >= LANE_STALL_TIMEOUT => {
                self.failed = true;
                Err(RdmaError::Stalled {
                    on: self.pair.on().to_owned(),
                    waited: self.progress.elapsed(),
                })
            }
            result => result,
        }
    }

    fn arm(&mut self) -> bool {
        if self.outstanding == 0 || self.failed {
            return true;
        }
        if self.waiting == Waiting::Poll {
            return false;
        }
        // The next poll reports an error.
        let armed = self
            .queue
            .arm()
            .and_then(|()| self.queue.poll(&mut self.taken));
        armed.is_ok() && self.taken.is_empty()
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.queue.event_fd()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.drain();
    }
}
