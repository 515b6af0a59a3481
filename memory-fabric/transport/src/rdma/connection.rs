//! A connection ready for READs and WRITEs of one lease.
//!
//! # When a page that was written is there
//!
//! That a WRITE has completed tells that the other adapter has taken it, and not that its bytes can
//! be seen in memory by others (InfiniBand Architecture Specification, volume 1, section 9.5,
//! o9-20): by READs on another queue pair, or by the processor there. But a READ on the same queue
//! pair is carried out after the WRITEs that were posted before it, and fetches from memory, before
//! which what is to be written goes there. So WRITEs are posted unsignalled, and each batch of up to
//! [`WRITES_PER_FLUSH`] has a READ of a few bytes behind it, its *flush*. When that completes, all
//! pages of the batch are where anybody finds them; so one completion stands for a whole batch.

mod prepare;

use super::port::PageLane;
use super::{LANE_STALL_TIMEOUT, RdmaError};
use crate::{IN_FLIGHT_MAX, PageSource};
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_verbs::batch::{Batch, Place};
use fabric_verbs::endpoint::RemoteMemory;
use fabric_verbs::pair::QueuePair;
use fabric_verbs::queue::{CompletionQueue, Taken};
use fabric_verbs::room::Room;
use fabric_verbs::staging::Staging;
pub use prepare::{LaneConfig, NewLane};
use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a lane that is taken down waits for what is outstanding on it. Nothing depends on
/// it: the end of the queue pair ends it all.
const DRAIN_TIME_MAX: Duration = Duration::from_millis(100);

/// WRITEs after which there is a flush, at the most: their pages are free when it completes, and
/// the evictor has others meanwhile.
const WRITES_PER_FLUSH: usize = 16;

/// Bytes that a flush reads: from the end of the page that was written last.
const FLUSH_BYTES: u32 = 8;

/// Set in the id of a flush, with the number of its WRITEs; requests have their number, which is
/// small.
const FLUSH: u64 = 1 << 32;

/// Places in the queues of a lane that writes: each request may be a WRITE that has a flush of its
/// own. The completion queue has as many: when the lane fails, each of them completes.
const WRITING_QUEUE_ENTRIES: usize = 2 * IN_FLIGHT_MAX;

#[derive(Clone, Copy, Debug)]
struct Request {
    /// Where in the staging buffer.
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

/// A reliable connection for READs from one lease into a staging buffer, and WRITEs from there.
///
/// When something fails the lane is of no more use; its owner hands it to the thread that made
/// it, which takes it down: that may take time, and no page is waited for meanwhile.
pub struct Lane {
    // In this order: when the pair is gone the adapter touches nothing any more, and the staging
    // buffer may become another's.
    pair: QueuePair,
    staging: Staging,
    queue: Arc<CompletionQueue>,
    memory: RemoteMemory,
    room: Room,
    /// Indexed by the number of a request.
    requests: Box<[Request]>,
    /// What is posted next.
    batch: Batch,
    /// WRITEs by their numbers, in the order of posting.
    writes: VecDeque<u16>,
    /// How many of them, the last ones, have no flush behind them yet.
    unflushed: usize,
    /// Where the last WRITE ends in the lease.
    written_end: u64,
    /// The place in the staging buffer where flushes put what they read; `None` when the lane
    /// does not write.
    flush_page: Option<usize>,
    /// Requests that were posted, flushes among them.
    outstanding: usize,
    taken: Taken,
    /// When something completed, or was first posted after all had.
    progress: Instant,
    /// Set when the lane has to be let go of.
    revoked: Arc<AtomicBool>,
    failed: bool,
    /// Its end tells the donor that this end is gone.
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
    /// What to set when the lane has to be let go of.
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
            // SAFETY: the READ that targeted them has completed, and none is made before the
            // room is given back below.
            complete(number, unsafe { self.staging.bytes(page, pages) });
            self.room.give_back(page, pages);
        }
    }

    /// As [`PageLane::add`], of a number of bytes.
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

    /// A flush has completed, and with it all its WRITEs.
    fn flushed(&mut self, id: u64, complete: &mut dyn FnMut(u16, &[u8])) -> Result<(), RdmaError> {
        let count = usize::try_from(id & !FLUSH).unwrap_or(usize::MAX);
        if count == 0 || count > self.writes.len() - self.unflushed {
            return Err(self.unasked(id));
        }
        self.outstanding -= 1 + count;
        for number in self.writes.drain(..count) {
            let request = &mut self.requests[usize::from(number)];
            request.state = RequestState::Idle;
            self.room.give_back(request.page, request.pages);
            complete(number, &[]);
        }
        Ok(())
    }

    /// What a completion is of. The flush behind WRITEs is a READ.
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

    /// Takes a place for a request that is idle: where its pages are in the staging buffer.
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
        let Some(page) = self.room.take(pages) else {
            return false;
        };
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

    /// Adds a flush for the WRITEs that have none.
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

    /// Reads one page at `offset` of the lease, with nothing else outstanding; gives the time that
    /// took, and the bytes to `take`.
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

    /// Ends the connection and takes what completes by that, for a while.
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

    fn add_write(&mut self, number: u16, offset: u64, source: PageSource) -> bool {
        assert!(self.flush_page.is_some(), "a lane that writes");
        if !self.take_place(number, offset, 1, RequestState::Writing) {
            return false;
        }
        let page = self.requests[usize::from(number)].page;
        // SAFETY: the place was free until now, so that no request uses it.
        source.copy_to(unsafe { self.staging.page_mut(page) });
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
        // SAFETY: adapters only read what is to be written, and it was put there before.
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
        // SAFETY: the places of the requests are runs of the staging buffer that belong to no other request: those of READs
        // are read only after completion, those of WRITEs not changed before it. That of
        // flushes is never read. The buffer outlives the pair.
        let posted = unsafe { self.pair.post(&mut self.batch) };
        posted.inspect_err(|_| self.failed = true)
    }

    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError> {
        // Relaxed: it says nothing about other memory.
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
        // An error shows when it is polled next.
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
