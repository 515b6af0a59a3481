//! The thread that serves control connections which only renew their leases.
//!
//! A connection comes here once its lease was granted or resumed, and leaves for a thread of its
//! own with the first request that is no renewal. So a VM that runs costs a node no thread for its
//! lease.
//!
//! No peer holds the thread: an event lets a connection receive once, decode one frame and send one
//! answer, and the kernel reports ready connections in turn. One whose peer sends too fast gets a
//! thread of its own, or is closed.
//!
//! Nor does another thread of the node: this one holds no reference to a lease, whose last user
//! unmaps it, and [another one](leaving) ends connections, or gives them buffers and threads.

mod leaving;
mod pace;

use super::EXPIRY_CHECK_INTERVAL;
use super::mailbox::BELL;
use super::open::{Arrival, Shared, TakenPlace};
use crate::control::CONTROL_TIMEOUT;
use crate::donor::RESTING_MAX;
use crate::donor::connection::Controlled;
use crate::donor::places::Purpose;
use crate::donor::refuse::UNKNOWN_LEASE;
use crate::transport::resting::{Buffers, Heard, Resting};
use crate::wire::{ErrorMessage, FrameKind, Refusal};
pub(super) use leaving::serve as serve_leaving;
use pace::Pace;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Events that are taken from the kernel at once.
const EVENTS_AT_ONCE: usize = 64;

/// Interval of checks for leases that have ended, and peers that are late.
const CHECK_INTERVAL: Duration = EXPIRY_CHECK_INTERVAL.saturating_mul(2);

/// A connection that rests. Its place is released last.
#[derive(Debug)]
pub(super) struct Sleeper {
    connection: Resting,
    of: Controlled,
    pace: Pace,
    /// When something came last.
    heard_at: Instant,
    /// When the first part of a frame came.
    part_since: Option<Instant>,
    /// Why it does not rest any more, if so.
    leave: Option<Leave>,
    place: TakenPlace,
}

/// Why a connection does not rest any more.
#[derive(Debug)]
enum Leave {
    /// Its next request needs a thread.
    Wake(Purpose),
    /// The peer has closed it, or it broke.
    Over(io::Error),
    /// It is closed, and its lease continues.
    Close(&'static str),
}

/// Returns what connections leave through: as many as can rest.
pub(super) fn leaving() -> (SyncSender<Box<Sleeper>>, Receiver<Box<Sleeper>>) {
    sync_channel(RESTING_MAX)
}

/// Serves resting connections until the node stops.
pub(super) fn serve(shared: &Arc<Shared>, leaving: SyncSender<Box<Sleeper>>) {
    let mut bed = Bed {
        shared,
        leaving,
        // It never grows: that would take new memory and free the old one.
        sleepers: HashMap::with_capacity(RESTING_MAX),
        buffers: Buffers::default(),
    };
    if let Err(error) = bed.run() {
        tracing::error!(%error, "cannot wait for renewals; VMs have to connect again");
    }
    drop(shared.rest.close());
}

struct Bed<'a> {
    shared: &'a Arc<Shared>,
    leaving: SyncSender<Box<Sleeper>>,
    sleepers: HashMap<u64, Box<Sleeper>>,
    buffers: Buffers,
}

impl Bed<'_> {
    fn run(&mut self) -> io::Result<()> {
        let event = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(BELL),
        };
        let mut events = [event; EVENTS_AT_ONCE];
        let mut check_at = Instant::now() + CHECK_INTERVAL;
        while !self.shared.stopping.load(Ordering::SeqCst) {
            let left = check_at.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let epoll = self.shared.rest.epoll();
            let count = match epoll::wait(epoll, events.as_mut_slice(), Some(&timeout)) {
                Ok(count) => count,
                Err(Errno::INTR) => 0,
                Err(error) => return Err(error.into()),
            };
            for event in &events[..count] {
                match event.data.u64() {
                    BELL => self.take_arrivals(),
                    number => self.hear(number),
                }
            }
            let now = Instant::now();
            if now >= check_at {
                self.check(now);
                check_at = now + CHECK_INTERVAL;
            }
        }
        Ok(())
    }

    fn take_arrivals(&mut self) {
        for arrival in self.shared.rest.take() {
            let sleeper = Box::new(Sleeper::new(*arrival));
            let number = sleeper.place.number();
            let Some(socket) = sleeper.connection.socket() else {
                continue;
            };
            let data = epoll::EventData::new_u64(number);
            let added = epoll::add(
                self.shared.rest.epoll(),
                socket,
                data,
                epoll::EventFlags::IN,
            );
            self.sleepers.insert(number, sleeper);
            if let Err(error) = added {
                // Out of watches (`fs.epoll.max_user_watches`) or memory: it gets a thread.
                tracing::debug!(%error, "a connection cannot rest");
                self.leave(number, Leave::Wake(Purpose::Lasting));
            }
        }
    }

    /// Serves what a connection has received.
    fn hear(&mut self, number: u64) {
        let Some(sleeper) = self.sleepers.get_mut(&number) else {
            return;
        };
        if let Some(leave) = sleeper.hear(self.shared, &mut self.buffers) {
            self.leave(number, leave);
        }
    }

    /// Closes connections whose leases have ended, or whose peers are late.
    fn check(&mut self, now: Instant) {
        let late = self.sleepers.iter_mut().filter_map(|(number, sleeper)| {
            let leave = sleeper.check(now, self.shared, &mut self.buffers)?;
            Some((*number, leave))
        });
        for (number, leave) in late.collect::<Vec<_>>() {
            self.leave(number, leave);
        }
    }

    fn leave(&mut self, number: u64, leave: Leave) {
        let Some(mut sleeper) = self.sleepers.remove(&number) else {
            return;
        };
        if let Some(socket) = sleeper.connection.socket() {
            // It fails when it was not added.
            let _ = epoll::delete(self.shared.rest.epoll(), socket);
        }
        sleeper.leave = Some(leave);
        // It has room: the connection keeps its place among those that rest until it is taken.
        if let Err(error) = self.leaving.try_send(sleeper) {
            tracing::error!(%error, "a control connection is closed");
        }
    }
}

impl Sleeper {
    fn new(arrival: Arrival) -> Self {
        let Arrival {
            place,
            connection,
            of,
        } = arrival;
        let now = Instant::now();
        Self {
            connection,
            of,
            pace: Pace::new(now),
            heard_at: now,
            part_since: None,
            leave: None,
            place,
        }
    }

    /// Receives once, and answers a renewal. Returns why the connection does not rest any more, if
    /// so.
    fn hear(&mut self, shared: &Shared, buffers: &mut Buffers) -> Option<Leave> {
        let received = match self.connection.receive(&self.of.token, buffers) {
            Ok(received) => received,
            Err(error) => return Some(Leave::Over(error)),
        };
        let heard = received.heard;
        if heard == Heard::Nothing {
            return None;
        }
        let now = Instant::now();
        self.heard_at = now;
        match heard {
            Heard::End => return Some(Leave::Over(io::ErrorKind::UnexpectedEof.into())),
            Heard::Other => return Some(Leave::Wake(Purpose::Control)),
            Heard::Renewal => {
                self.part_since = None;
                if let Some(leave) = self.renew(shared, buffers) {
                    return Some(leave);
                }
            }
            Heard::Nothing | Heard::Part => {}
        }
        self.part_since = match self.connection.has_part() {
            true => self.part_since.or(Some(now)),
            false => None,
        };
        if self.pace.pass(now, received.bytes, received.barren) {
            return None;
        }
        Some(match heard {
            Heard::Renewal => Leave::Wake(Purpose::Lasting),
            _ => Leave::Close("it sent too much beside renewals"),
        })
    }

    fn renew(&mut self, shared: &Shared, buffers: &mut Buffers) -> Option<Leave> {
        let status = shared.served.pool.with(&self.of.token, |lease| {
            lease.renew(self.of.among.number());
            lease.status()
        });
        let Some(status) = status else {
            return Some(self.tell_ended(buffers));
        };
        let sent = self.connection.send(FrameKind::Status, &status, buffers);
        sent.err()
            .map(|_| Leave::Close("its peer does not read the answers"))
    }

    /// Tells the VM that its lease has ended, as it would learn with its next renewal.
    fn tell_ended(&mut self, buffers: &mut Buffers) -> Leave {
        let message = ErrorMessage {
            refusal: Refusal::UnknownLease,
            text: UNKNOWN_LEASE.to_owned(),
        };
        // Best effort: the connection ends in any case.
        let _ = self.connection.send(FrameKind::Error, &message, buffers);
        Leave::Close("its lease has ended")
    }

    /// Returns why the connection does not rest any more, if so.
    fn check(&mut self, now: Instant, shared: &Shared, buffers: &mut Buffers) -> Option<Leave> {
        let duration = shared
            .served
            .pool
            .with(&self.of.token, |lease| lease.duration);
        let Some(duration) = duration else {
            return Some(self.tell_ended(buffers));
        };
        let silent_max = duration * 2;
        let since = |then: Instant| now.saturating_duration_since(then);
        if self
            .part_since
            .is_some_and(|then| since(then) >= CONTROL_TIMEOUT)
        {
            return Some(Leave::Close("its request did not come whole in time"));
        }
        // Another connection renews the lease, and this one has lost its peer.
        (since(self.heard_at) >= silent_max).then_some(Leave::Close("it was silent for too long"))
    }
}

#[cfg(test)]
mod tests;
