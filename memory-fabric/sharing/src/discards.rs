//! Dropping the bytes of pages that the guest does not need, while other nodes may use them.
//!
//! The engine does it, as everything else, so no page is dropped in the middle of a fault, an
//! eviction or a transaction. A page of a block that this node owns becomes a zero page again, and
//! its bytes are freed. Of a page of a split block it is a write and an eviction: this node has the
//! only copy, writes zeroes into it while it is unmapped, and gives it back as zero. All other pages
//! stay as they are: those of which other nodes have copies, and those that are on their way.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fabric_coherence::Evict;
use fabric_homes::BLOCK_PAGES;
use fabric_host::lock;
use fabric_pages::page::{PageIndex, PageRange};
use fabric_peers::Peers;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::Failure;
use crate::engine::Engine;
use crate::evict::RESERVE;
use crate::owned::block_of;

/// Longest wait of [`Discards::discard`], as that of a VM with one compute node. The engine needs some
/// milliseconds for a GiB, unless pages of split blocks wait for their directory.
pub const DISCARD_TIME_MAX: Duration = Duration::from_secs(1);

/// Why pages were not discarded. Some of them may have been.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DiscardError {
    /// The engine did not come to all of them in time.
    #[error("the memory that nodes share was busy for {} s", DISCARD_TIME_MAX.as_secs())]
    Late,
    /// The engine has ended.
    #[error("the memory that nodes share is not served any more")]
    Stopped,
}

/// What is asked of the engine.
#[derive(Debug, Default)]
struct Request {
    /// What is left of the open request.
    ranges: VecDeque<PageRange>,
    is_open: bool,
    /// Pages whose bytes were dropped for it.
    dropped: u64,
    has_ended: bool,
}

/// Passes pages to the engine whose bytes are to be dropped.
#[derive(Debug)]
pub struct Discards {
    /// One request at a time.
    caller: Mutex<()>,
    /// There is a request, for a look without the lock. Its release pairs with the engine's acquire; the
    /// lock orders everything else.
    is_posted: AtomicBool,
    /// The engine holds the lock while it drops pages: a caller that has taken its request back knows that
    /// none is dropped any more, and the guest may use all of them.
    request: Mutex<Request>,
    changed: Condvar,
    wake: EventFd,
}

impl Discards {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            caller: Mutex::new(()),
            is_posted: AtomicBool::new(false),
            request: Mutex::new(Request::default()),
            changed: Condvar::new(),
            wake: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
        })
    }

    /// Drops the bytes of the pages that this node has alone. What any node writes to the pages before
    /// this returns may be lost; none is dropped after it has returned, also with an error. Then each
    /// page is zero or as it was, and the same on all nodes. Waits up to [`DISCARD_TIME_MAX`]. Returns
    /// the number of pages whose bytes were dropped here as well. A thread that serves the shared memory
    /// must not call it.
    pub fn discard(&self, ranges: &[PageRange]) -> (u64, Result<(), DiscardError>) {
        self.discard_by(ranges, DISCARD_TIME_MAX)
    }

    fn discard_by(&self, ranges: &[PageRange], time: Duration) -> (u64, Result<(), DiscardError>) {
        // Another caller's request counts, too.
        let deadline = Instant::now() + time;
        let _only = lock(&self.caller);
        let mut request = self.request();
        request.ranges.extend(ranges);
        request.dropped = 0;
        request.is_open = true;
        self.is_posted.store(true, Ordering::Release);
        // A full counter is readable as well.
        let _ = self.wake.write(1);
        let mut outcome = Ok(());
        while request.is_open {
            let left = deadline.saturating_duration_since(Instant::now());
            if request.has_ended {
                outcome = Err(DiscardError::Stopped);
            } else if left.is_zero() {
                outcome = Err(DiscardError::Late);
            }
            if outcome.is_err() {
                self.close(&mut request);
                break;
            }
            let waited = self.changed.wait_timeout(request, left);
            request = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        (request.dropped, outcome)
    }

    fn request(&self) -> MutexGuard<'_, Request> {
        lock(&self.request)
    }

    fn close(&self, request: &mut Request) {
        request.ranges.clear();
        request.is_open = false;
        self.is_posted.store(false, Ordering::Release);
    }

    fn is_posted(&self) -> bool {
        self.is_posted.load(Ordering::Acquire)
    }

    /// The engine has ended.
    pub(crate) fn end(&self) {
        self.request().has_ended = true;
        self.changed.notify_all();
    }

    pub(crate) const fn wake(&self) -> &EventFd {
        &self.wake
    }
}

impl Request {
    /// The next pages, all of one block.
    fn next(&self) -> Option<PageRange> {
        let range = self.ranges.front()?;
        let left = BLOCK_PAGES - range.first.number() % BLOCK_PAGES;
        Some(PageRange::new(range.first, range.count.min(left)))
    }

    /// The first `count` pages are done.
    fn advance(&mut self, count: u32) {
        if let Some(range) = self.ranges.front_mut() {
            let (_, rest) = range.split_at(count);
            *range = rest;
            if rest.count == 0 {
                self.ranges.pop_front();
            }
        }
    }
}

impl<P: Peers> Engine<P> {
    /// Drops some pages that the guest does not need, of one block at most, so that faults and messages
    /// are served in between. Returns whether there were any.
    pub(crate) fn serve_discards(&mut self) -> Result<bool, Failure> {
        if !self.signals.discards.is_posted() {
            return Ok(false);
        }
        let discards = Arc::clone(&self.signals.discards);
        let mut request = discards.request();
        let Some(part) = request.next() else {
            discards.close(&mut request);
            discards.changed.notify_all();
            return Ok(true);
        };
        let (done, dropped) = if !part.iter().all(|page| self.frames.is_in_memory(page)) {
            (part.count, 0)
        } else if self.cache.owned_number(block_of(part.first)).is_some() {
            (part.count, self.discard_owned(part)?)
        } else {
            self.discard_split(part)?
        };
        self.stats.discarded.add(dropped);
        request.dropped += dropped;
        request.advance(done);
        Ok(done > 0)
    }

    /// Drops pages of a block that this node owns. Returns how many had bytes in their frames.
    fn discard_owned(&mut self, pages: PageRange) -> Result<u64, Failure> {
        let mut dropped = 0;
        let mut run: Option<PageRange> = None;
        for page in pages.iter() {
            // Others may have a merged table as well.
            if self.tables.has(page) {
                continue;
            }
            let Some(has_frame) = self.owned.discard(page) else {
                continue;
            };
            if self.home_of(page) == self.config.me {
                self.home.discard(page);
            }
            if !has_frame {
                continue;
            }
            dropped += 1;
            match &mut run {
                Some(run) if run.end() == u64::from(page.number()) => run.count += 1,
                _ => {
                    if let Some(run) = run.replace(PageRange::new(page, 1)) {
                        self.frames.discard(run)?;
                    }
                }
            }
        }
        if let Some(run) = run {
            self.frames.discard(run)?;
        }
        Ok(dropped)
    }

    /// Drops pages of a split block. Returns how many were looked at, none while too many are on their way
    /// out, and how many of them leave.
    fn discard_split(&mut self, pages: PageRange) -> Result<(u32, u64), Failure> {
        let (mut done, mut dropped) = (0, 0);
        for page in pages.iter() {
            if self.frames.leaving() >= RESERVE {
                break;
            }
            done += 1;
            dropped += u64::from(self.discard_alone(page)?);
        }
        Ok((done, dropped))
    }

    /// Gives a page back as zero if this node has the only copy, and no thread is about to use it.
    fn discard_alone(&mut self, page: PageIndex) -> Result<bool, Failure> {
        if !self.cache.is_alone(page) || self.tables.has(page) || !self.frames.is_resident(page) {
            return Ok(false);
        }
        if self.home_waits.is_writing(page) {
            return Ok(false);
        }
        let mut actions = self.actions();
        // This node writes the page, without a mapping.
        self.cache.touch(page, true, false, &mut actions);
        actions.clear();
        if self.cache.evict(page, &mut actions) != Evict::Started {
            self.spare_actions.push(actions);
            return Ok(false);
        }
        self.frames.zap(page)?;
        self.frames.clear(page)?;
        // What it stores is older, and nobody is to get it again.
        self.home.forget(page);
        self.frames.leaves(page);
        self.carry_out(actions)?;
        self.deliver_local()?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u32, count: u32) -> PageRange {
        PageRange::new(PageIndex::new(first), count)
    }

    #[test]
    fn a_request_is_split_into_parts_of_one_block() {
        let mut request = Request::default();
        request.ranges.extend([range(510, 515), range(7, 1)]);
        let mut parts = Vec::new();
        while let Some(part) = request.next() {
            // A part may be done in several steps.
            let done = part.count.min(300);
            parts.push((part.first.number(), done));
            request.advance(done);
        }
        assert_eq!(parts, [(510, 2), (512, 300), (812, 212), (1024, 1), (7, 1)]);
    }

    #[test]
    fn a_caller_that_waits_too_long_takes_its_request_back() {
        let discards = Discards::new().expect("an eventfd");
        let (dropped, outcome) = discards.discard_by(&[range(0, 8)], Duration::from_millis(1));
        assert_eq!((dropped, outcome), (0, Err(DiscardError::Late)));
        assert!(!discards.is_posted() && discards.request().next().is_none());
        discards.end();
        let (_, outcome) = discards.discard(&[range(0, 8)]);
        assert_eq!(outcome, Err(DiscardError::Stopped));
        assert!(!discards.is_posted());
    }
}
