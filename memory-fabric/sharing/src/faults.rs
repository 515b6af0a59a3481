//! Serving faults of the guest view.

use std::time::Instant;

use fabric_coherence::token::STARVING_LOSSES;
use fabric_coherence::{Member, Touch};
use fabric_pages::page::PageIndex;
use fabric_pages::uffd::Fault;
use fabric_peers::Peers;

use crate::Failure;
use crate::engine::{Engine, thread_time};
use crate::owned::Need;

/// Faults that wait for memory or for a block, after which no more are read.
pub(crate) const DEFERRED_MAX: usize = 256;

/// Pages that a first touch fills at once, as the pager does. A power of two.
const ZERO_AROUND: u32 = 16;

/// A fault, or one that has to be tried again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    page: PageIndex,
    write: bool,
    /// The access lost this page or another one before it progressed.
    early: bool,
    read_at: Instant,
}

impl<P: Peers> Engine<P> {
    /// Reads faults, unless too many wait, and begins to serve them.
    pub(crate) fn serve_faults(
        &mut self,
        faults: &mut Vec<(PageIndex, Fault)>,
    ) -> Result<bool, Failure> {
        if self.deferred.len() >= DEFERRED_MAX {
            return Ok(false);
        }
        self.frames.read_faults(faults)?;
        if faults.is_empty() {
            return Ok(false);
        }
        let read_at = self.now;
        for (page, fault) in faults.drain(..) {
            self.begin(page, fault, read_at)?;
        }
        Ok(true)
    }

    fn begin(&mut self, page: PageIndex, fault: Fault, read_at: Instant) -> Result<(), Failure> {
        self.stats.faults.increment();
        let Fault { write, thread, .. } = fault;
        let ticks = self.ticks(read_at);
        self.stats.waits.begin(thread, page, ticks);
        let seen = self.progress.waits(thread, page, ticks, thread_time);
        self.progress.wants(thread, write);
        if seen.early {
            self.stats.early.increment();
        }
        if seen.lost >= STARVING_LOSSES {
            self.starves(thread)?;
        }
        // All pages that the access needs from here on are to be held.
        let early = seen.lost > 0;
        let pending = Pending {
            page,
            write,
            early,
            read_at,
        };
        if !self.serve(pending)? {
            self.deferred.push_back(pending);
        }
        Ok(())
    }

    /// Pages that requests in progress will bring.
    pub(crate) fn expected(&self) -> usize {
        let me = self.config.me;
        self.requests.len() + self.home_waits.reads() + self.home.away.reads_for(me)
    }

    /// The node that stores the page while nobody has a copy: that of its directory.
    pub(crate) fn home_of(&self, page: PageIndex) -> Member {
        self.cache.directory_of(page)
    }

    /// Tries deferred faults again.
    pub(crate) fn retry(&mut self) -> Result<bool, Failure> {
        let mut worked = false;
        for _ in 0..self.deferred.len() {
            let Some(pending) = self.deferred.pop_front() else {
                break;
            };
            if self.serve(pending)? {
                worked = true;
            } else {
                self.deferred.push_back(pending);
            }
        }
        Ok(worked)
    }

    /// Serves a fault; false if it has to be tried again after the next event.
    fn serve(&mut self, pending: Pending) -> Result<bool, Failure> {
        let Pending {
            page,
            write,
            early,
            read_at,
        } = pending;
        if self.tables.has(page) {
            // It came while the fault waited to be read.
            self.frames.map(page, true)?;
            self.woken(page);
            return Ok(true);
        }
        if !self.frames.is_resident(page) && !self.has_room()? {
            self.stats.stalled_for_memory.increment();
            return Ok(false);
        }
        let mut actions = self.actions();
        let touch = self.cache.touch(page, write, early, &mut actions);
        if touch == Touch::Waiting {
            self.requests.begin(page, read_at);
        }
        self.carry_out(actions)?;
        if touch == Touch::Owned {
            self.touch_owned(page, write)?;
        }
        self.deliver_local()?;
        Ok(touch != Touch::Later)
    }

    fn touch_owned(&mut self, page: PageIndex, write: bool) -> Result<(), Failure> {
        let around = if self.has_plenty(ZERO_AROUND) {
            ZERO_AROUND
        } else {
            1
        };
        match self.owned.touch(page, write, around) {
            Need::Zeroes(run) => {
                self.frames.install_zero_run(run)?;
                for page in run.iter() {
                    self.arrived(page)?;
                }
                Ok(())
            }
            Need::Home => self.read_home(page),
            Need::Map { writable } => {
                self.frames.map(page, writable)?;
                self.arrived(page)
            }
            Need::Nothing => Ok(()),
        }
    }

    /// Waiters of the page were woken.
    pub(crate) fn woken(&mut self, page: PageIndex) {
        let is_waiter_known = self.stats.waits.end(page);
        let since = self.requests.end(page);
        if is_waiter_known || since.is_some() {
            self.now = Instant::now();
        }
        self.give_way.has_woken |= is_waiter_known;
        self.progress.woken(page, self.ticks(self.now));
        if let Some(since) = since {
            self.stats.request.record(self.now - since);
        }
    }
}
