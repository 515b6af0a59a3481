//! What wakes the engine's thread, and what other threads let it know.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use fabric_host::poll::poll_until;
use fabric_peers::Peers;
use vmm_sys_util::eventfd::EventFd;

use crate::engine::Engine;
use crate::faults::DEFERRED_MAX;
use crate::losses::FenceRequest;
use crate::{Discards, Failure, Halts, TableFences};

/// What other threads of this process signal.
#[derive(Debug)]
pub(crate) struct Signals {
    /// The engine has to end.
    pub(crate) stop: Arc<EventFd>,
    /// The node for which it has to end, if for one.
    pub(crate) fence: Arc<FenceRequest>,
    /// Somebody waits for changes of merged tables.
    pub(crate) fences: Arc<TableFences>,
    /// vCPUs have halted.
    pub(crate) halts: Arc<Halts>,
    /// The guest does not need some pages.
    pub(crate) discards: Arc<Discards>,
}

/// How a sleep ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Slept {
    /// There may be work.
    Woken,
    /// The engine is to stop.
    Stopped,
}

const fn pollfd(fd: RawFd, events: libc::c_short) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}

impl<P: Peers> Engine<P> {
    /// Ends the holds of vCPUs that have halted. Before faults are read, so that none of these is of
    /// an access before the halt.
    pub(crate) fn serve_halts(&mut self) -> bool {
        let mut worked = false;
        for thread in self.signals.halts.take() {
            self.progress.halts(thread, self.ticks(self.now));
            worked = true;
        }
        worked
    }

    /// Sleeps until there may be work.
    pub(crate) fn sleep(&mut self) -> Result<Slept, Failure> {
        let store = self.store.as_mut();
        if store.is_some_and(|store| !store.depot.arm()) {
            return Ok(Slept::Woken);
        }
        let holds_until = self.progress.next();
        if holds_until.is_none() {
            return self.sleep_until(None);
        }
        let is_news = self.signals.halts.begin_sleep();
        let slept = match is_news {
            true => Ok(Slept::Woken),
            false => self.sleep_until(holds_until),
        };
        self.signals.halts.end_sleep();
        slept
    }

    fn sleep_until(&mut self, holds_until: Option<u64>) -> Result<Slept, Failure> {
        let until = [
            holds_until.map(|at| self.instant(at)),
            self.transactions.next(),
            self.blocks.next(),
            self.answers.next(),
            self.puts.next(),
            self.requests.next(),
            self.tokens.next(),
            self.home_waits.next(),
            self.sweeper.next(&self.directory),
            self.token_ends(),
            self.tables_overdue_at(),
            self.peers.wake_by(),
            self.depot_wakes_by(),
        ];
        let until = until.into_iter().flatten().min();
        let Signals {
            stop,
            fences,
            halts,
            discards,
            ..
        } = &self.signals;
        let fds = [
            stop.as_raw_fd(),
            self.peers.poll_fd(),
            fences.wake().as_raw_fd(),
            halts.wake().as_raw_fd(),
            discards.wake().as_raw_fd(),
        ];
        self.watched.clear();
        let of_faults = (self.deferred.len() < DEFERRED_MAX).then(|| self.frames.fd());
        let fds = fds.into_iter().chain(of_faults);
        self.watched.extend(fds.map(|fd| pollfd(fd, libc::POLLIN)));
        if let Some(store) = &self.store {
            let watched = &mut self.watched;
            store.depot.watch(&mut |fd, writable| {
                let events = libc::POLLIN | if writable { libc::POLLOUT } else { 0 };
                watched.push(pollfd(fd, events));
            });
        }
        let slept = poll_until(&mut self.watched, until);
        slept.map_err(|error| Failure::System("poll", error))?;
        if let Some(store) = &mut self.store {
            store.depot.slept();
        }
        if self.watched[2].revents != 0 {
            // What was asked for is in a counter of its own.
            let _ = fences.wake().read();
        }
        if self.watched[4].revents != 0 {
            // What was asked for is behind a lock.
            let _ = discards.wake().read();
        }
        if self.watched[0].revents != 0 {
            return Ok(Slept::Stopped);
        }
        Ok(Slept::Woken)
    }
}
