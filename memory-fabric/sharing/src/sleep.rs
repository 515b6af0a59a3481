//! What wakes the engine, and what threads of other kinds let it know.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use fabric_host::poll::poll_until;
use fabric_peers::Peers;
use vmm_sys_util::eventfd::EventFd;

use crate::engine::Engine;
use crate::faults::DEFERRED_MAX;
use crate::{Failure, Halts, TableFences};

/// What other threads of this process signal.
#[derive(Debug)]
pub(crate) struct Signals {
    /// The engine has to end.
    pub(crate) stop: Arc<EventFd>,
    /// Somebody waits for changes of merged tables.
    pub(crate) fences: Arc<TableFences>,
    /// vCPUs have halted.
    pub(crate) halts: Arc<Halts>,
}

impl<P: Peers> Engine<P> {
    /// Ends the holds of vCPUs that have halted. Before faults are read, so that none of these is of
    /// an access before the halt.
    pub(crate) fn serve_halts(&mut self) -> bool {
        let mut worked = false;
        for thread in self.signals.halts.take() {
            self.progress.halts(thread, self.ticks(Instant::now()));
            worked = true;
        }
        worked
    }

    /// Sleeps until there may be work. Returns whether to stop.
    pub(crate) fn sleep(&self) -> Result<bool, Failure> {
        let Signals {
            stop,
            fences,
            halts,
        } = &self.signals;
        let holds_until = self.progress.next();
        if holds_until.is_some() && halts.begin_sleep() {
            halts.end_sleep();
            return Ok(false);
        }
        let fds = [
            stop.as_raw_fd(),
            self.peers.poll_fd(),
            fences.wake().as_raw_fd(),
            halts.wake().as_raw_fd(),
            self.frames.fd(),
        ];
        let mut fds = fds.map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        let watched = if self.deferred.len() < DEFERRED_MAX {
            5
        } else {
            4
        };
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
        ];
        let until = until.into_iter().flatten().min();
        poll_until(&mut fds[..watched], until).map_err(|error| Failure::System("poll", error))?;
        if holds_until.is_some() {
            halts.end_sleep();
        }
        if fds[2].revents != 0 {
            // What was asked for is in a counter of its own.
            let _ = fences.wake().read();
        }
        Ok(fds[0].revents != 0)
    }
}
