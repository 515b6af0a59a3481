//! Discards pages that the guest has freed: their bytes are dropped, locally and at home, without
//! being transferred.
//!
//! A [`Discarder`] takes ranges of pages. Home pages of this node it frees by itself. Others it
//! passes to the evictor, which owns the pages with local bytes, and waits: when
//! [`Discarder::discard`] returns, the pages are untouched, and read as zero until they are written
//! again. The donor drops its copies soon after, on the connection and in the order of the
//! write-backs.

use crate::guest_memory::GuestMemory;
use crate::homes::{BLOCK_PAGES, HomeTable};
use crate::page::{PageIndex, PageRange};
use crate::stats::PagerStats;
use crossbeam_channel::{Receiver, Sender, bounded};
use fabric_host::lock;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// Longest wait of [`Discarder::discard`]. The evictor needs microseconds, unless a page of the
/// range is being fetched from a donor that does not answer.
pub const DISCARD_TIME_MAX: Duration = Duration::from_secs(1);

/// Limit of requests in the evictor's queue: each has a waiting thread.
const REQUESTS_MAX: usize = 8;

/// Why pages were not discarded. Some of them may have been.
#[derive(Debug, thiserror::Error)]
pub enum DiscardError {
    /// A part of the range is not guest memory.
    #[error("{count} pages from {first} are not all in the guest's memory")]
    OutsideMemory {
        /// The first page of the range.
        first: PageIndex,
        /// Number of pages.
        count: u32,
    },
    /// The pages are in use, most likely being fetched.
    #[error("the evictor did not come to it in time")]
    Late,
    /// The pager has ended, or is ending.
    #[error("the pager has ended")]
    Stopped,
    /// A system call failed.
    #[error("cannot free the bytes of {first}")]
    System {
        /// The first page of a run.
        first: PageIndex,
        /// Its error.
        #[source]
        source: io::Error,
    },
}

/// Pages for the evictor to discard, with a waiter.
#[derive(Debug)]
pub(crate) struct Request {
    /// Pages that the pager manages.
    pub ranges: Vec<PageRange>,
    pub mode: DiscardMode,
    /// Held while pages are discarded, so that none is discarded after the waiter has returned: the
    /// guest may use them again.
    stage: Mutex<Stage>,
}

/// What holds when a request ends, beside that its pages are discarded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum DiscardMode {
    /// Write-backs may still be in progress when the request ends.
    BestEffort,
    /// No write-back of the pages is in progress, and their homes were notified.
    Complete,
    /// All pages or none: as [`DiscardMode::Complete`], and no page is discarded before all can be.
    /// At the deadline a request that has begun to discard ends although homes were not notified,
    /// or the guest has touched pages meanwhile.
    AllOrNothing {
        /// When that is.
        deadline: Instant,
    },
}

/// How far a request is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Stage {
    /// The waiter may time out.
    Open,
    /// All pages will be discarded, soon and whatever happens; the waiter waits for that.
    Committed,
    /// The waiter has timed out.
    TimedOut,
}

impl Request {
    pub(crate) fn new(ranges: Vec<PageRange>, mode: DiscardMode) -> Self {
        Self {
            ranges,
            mode,
            stage: Mutex::new(Stage::Open),
        }
    }

    /// Whether a run has pages of it.
    pub(crate) fn meets(&self, run: PageRange) -> bool {
        let after = |a: PageRange, b: PageRange| a.end() <= u64::from(b.first.number());
        let mut ranges = self.ranges.iter();
        ranges.any(|&range| !after(run, range) && !after(range, run))
    }

    /// Whether it ends now although it is not complete.
    pub(crate) fn is_overdue(&self) -> bool {
        matches!(self.mode, DiscardMode::AllOrNothing { deadline } if Instant::now() >= deadline)
    }

    /// How far it is, which does not change while the guard is held.
    pub(crate) fn stage(&self) -> MutexGuard<'_, Stage> {
        lock(&self.stage)
    }
}

/// A request, and the channel that signals its completion.
pub(crate) type Posted = (Arc<Request>, Sender<()>);

/// Creates the channel to the evictor.
pub(crate) fn channel() -> (Sender<Posted>, Receiver<Posted>) {
    bounded(REQUESTS_MAX)
}

/// Posts requests to the evictor.
#[derive(Clone, Debug)]
pub(crate) struct DiscardMailbox {
    requests: Sender<Posted>,
    /// Wakes the evictor.
    wake: Arc<EventFd>,
}

impl DiscardMailbox {
    pub(crate) fn new(requests: Sender<Posted>, wake: Arc<EventFd>) -> Self {
        Self { requests, wake }
    }
}

/// Discards pages that the guest has freed. Clones share the pager.
#[derive(Clone, Debug)]
pub struct Discarder {
    memory: Arc<GuestMemory>,
    homes: Arc<HomeTable>,
    stats: Arc<PagerStats>,
    /// `None` without an evictor.
    evictor: Option<DiscardMailbox>,
}

impl Discarder {
    /// `evictor` is `None` without an evictor.
    pub(crate) fn new(
        memory: Arc<GuestMemory>,
        homes: Arc<HomeTable>,
        stats: Arc<PagerStats>,
        evictor: Option<DiscardMailbox>,
    ) -> Self {
        Self {
            memory,
            homes,
            stats,
            evictor,
        }
    }

    /// Drops the bytes of pages. Writes to them before this returns may be lost; afterwards they
    /// are zero until they are written. Waits up to [`DISCARD_TIME_MAX`]; pages that were not
    /// discarded by then are unchanged.
    ///
    /// # Errors
    ///
    /// See [`DiscardError`].
    pub fn discard(&self, ranges: &[PageRange]) -> Result<(), DiscardError> {
        let (mut here, mut elsewhere) = (Vec::new(), Vec::new());
        for &range in ranges {
            self.split(range, &mut here, &mut elsewhere)?;
        }
        let pages = ranges.iter().map(|range| u64::from(range.count)).sum();
        self.stats.free_pages.reported.add(pages);
        for range in here {
            self.free(range)?;
        }
        if elsewhere.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + DISCARD_TIME_MAX;
        self.submit(Request::new(elsewhere, DiscardMode::BestEffort), deadline)
    }

    /// Drops the bytes of pages that were added to the guest, as [`Self::discard`] does. Afterwards
    /// no write-back of them is in progress, and copies at home are dropped as far as possible.
    /// Waits until `deadline` at most.
    pub(crate) fn clear(&self, pages: PageRange, deadline: Instant) -> Result<(), DiscardError> {
        self.submit(Request::new(vec![pages], DiscardMode::Complete), deadline)
    }

    /// Discards pages of plugged blocks as [`Self::clear`] does, all or none: on an error they have
    /// their bytes. Returns soon after `deadline` at the latest.
    pub(crate) fn clear_whole(
        &self,
        pages: PageRange,
        deadline: Instant,
    ) -> Result<(), DiscardError> {
        let request = Request::new(vec![pages], DiscardMode::AllOrNothing { deadline });
        self.submit(request, deadline)
    }

    /// Splits a range into home pages of this node, and pages that the pager manages.
    fn split(
        &self,
        range: PageRange,
        here: &mut Vec<PageRange>,
        paged: &mut Vec<PageRange>,
    ) -> Result<(), DiscardError> {
        let mut rest = range;
        while rest.count > 0 {
            let first = rest.first;
            let pages = self.homes.pages_of(HomeTable::block_of(first));
            if !pages.contains(first) {
                return Err(DiscardError::OutsideMemory {
                    first: range.first,
                    count: range.count,
                });
            }
            let left = pages.end() - u64::from(first.number());
            let (part, after) = rest.split_at(u32::try_from(left).unwrap_or(BLOCK_PAGES));
            rest = after;
            let list = if self.homes.is_paged(first) {
                &mut *paged
            } else {
                &mut *here
            };
            match list.last_mut() {
                Some(last) if last.end() == u64::from(first.number()) => last.count += part.count,
                _ => list.push(part),
            }
        }
        Ok(())
    }

    /// Frees home pages of this node.
    fn free(&self, range: PageRange) -> Result<(), DiscardError> {
        let system = |source| DiscardError::System {
            first: range.first,
            source,
        };
        let count = range.count as usize;
        let had_bytes = self
            .memory
            .pages_with_bytes(range.first, count)
            .map_err(system)?;
        self.memory.punch(range.first, count).map_err(system)?;
        self.stats.free_pages.dropped_here.add(had_bytes);
        Ok(())
    }

    fn submit(&self, request: Request, deadline: Instant) -> Result<(), DiscardError> {
        let evictor = self.evictor.as_ref().ok_or(DiscardError::Stopped)?;
        let request = Arc::new(request);
        let (done, ended) = bounded(1);
        evictor
            .requests
            .send_deadline((Arc::clone(&request), done), deadline)
            .map_err(|error| match error {
                crossbeam_channel::SendTimeoutError::Timeout(_) => DiscardError::Late,
                crossbeam_channel::SendTimeoutError::Disconnected(_) => DiscardError::Stopped,
            })?;
        // EAGAIN means that the counter is full, which also wakes.
        let _ = evictor.wake.write(1);
        let outcome = ended.recv_deadline(deadline);
        if outcome.is_ok() {
            return Ok(());
        }
        let mut stage = request.stage();
        if *stage == Stage::Committed {
            drop(stage);
            // The evictor waits for nobody when it has begun: it takes some 100 us for each block.
            return ended.recv().map_err(|_| DiscardError::Stopped);
        }
        *stage = Stage::TimedOut;
        drop(stage);
        match (ended.try_recv(), outcome) {
            // It completed at the last moment.
            (Ok(()), _) => Ok(()),
            (_, Err(crossbeam_channel::RecvTimeoutError::Disconnected)) => {
                Err(DiscardError::Stopped)
            }
            _ => Err(DiscardError::Late),
        }
    }
}
