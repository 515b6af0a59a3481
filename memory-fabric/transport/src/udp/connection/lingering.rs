//! Connections of a donor whose owners are done while the last answer is under way.
//!
//! The protocol sends nothing again after a close. It also holds the close back while there is
//! unsent data and its window is full, as with packets that discover the path MTU. So one thread
//! drives such connections, for a limited time, and closes each once the peer has acknowledged all
//! data.
//!
//! A VM's end closes at once: all its requests have been answered, or it has given the donor up.
//! Its threads also have restricted system calls, which a thread that they start would inherit.

#[cfg(test)]
mod tests;

use super::{DATAGRAM_BUFFER_BYTES, Driver, stream_id};
use crate::udp::streams::{Inbox, STREAMS};
use fabric_host::poll::poll_until;
use quinn_proto::Side;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// What lingering connections may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Number of connections.
    count: usize,
    /// Bytes of all connections.
    bytes: usize,
    /// Time of each connection.
    time: Duration,
}

/// Limits of a process. They are for peers that do not answer: others acknowledge within a round
/// trip and a few milliseconds. What exceeds them is closed at once.
const LIMITS: Limits = Limits {
    count: 64,
    // What as many connections without pages take, or a dozen for pages.
    bytes: 16 << 20,
    // Several retransmissions, on paths across continents too.
    time: Duration::from_secs(2),
};

/// Steps in which the bytes of unacknowledged data are determined: control answers, answers with
/// pages, and the longest.
const DATA_BYTES: [usize; 3] = [4 << 10, 512 << 10, 2 << 20];

static LINGERING: Lingering = Lingering::new(LIMITS);

/// Keeps a connection until the peer has acknowledged all that was sent on it.
///
/// # Errors
///
/// Returns the connection if its owner is to close it: there is nothing to wait for, or too many
/// are kept.
pub(super) fn keep(driver: Box<Driver>) -> Result<(), Box<Driver>> {
    LINGERING.keep(driver)
}

/// A lingering connection.
struct Kept {
    driver: Box<Driver>,
    /// What it is charged with.
    bytes: usize,
    deadline: Instant,
}

/// Connections that the thread has not taken over yet, and totals.
#[derive(Default)]
struct State {
    arrived: Vec<Kept>,
    /// Number and bytes of all that are kept.
    count: usize,
    bytes: usize,
    /// Wakes the thread while there is one.
    wake: Option<Arc<EventFd>>,
}

/// Lingering connections, and their thread.
struct Lingering {
    limits: Limits,
    state: Mutex<State>,
}

impl Lingering {
    const fn new(limits: Limits) -> Self {
        let state = State {
            arrived: Vec::new(),
            count: 0,
            bytes: 0,
            wake: None,
        };
        Self {
            limits,
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&'static self, mut driver: Box<Driver>) -> Result<(), Box<Driver>> {
        if !driver.has_last_data() {
            return Err(driver);
        }
        let Some(bytes) = driver.begin_lingering() else {
            return Err(driver);
        };
        let mut state = self.lock();
        if state.count >= self.limits.count || bytes > self.limits.bytes - state.bytes {
            return Err(driver);
        }
        let Some(wake) = self.thread(&mut state) else {
            return Err(driver);
        };
        state.count += 1;
        state.bytes += bytes;
        state.arrived.push(Kept {
            driver,
            bytes,
            deadline: Instant::now() + self.limits.time,
        });
        drop(state);
        // A counter that is full also wakes the thread.
        let _ = wake.write(1);
        Ok(())
    }

    /// Returns what wakes the thread, which is started if there is none.
    fn thread(&'static self, state: &mut State) -> Option<Arc<EventFd>> {
        if let Some(wake) = &state.wake {
            return Some(Arc::clone(wake));
        }
        let wake = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).ok()?;
        let wake = Arc::new(wake);
        let waking = Arc::clone(&wake);
        std::thread::Builder::new()
            .name("udp-linger".to_owned())
            .spawn(move || {
                let run = AssertUnwindSafe(|| self.run(&waking));
                if catch_unwind(run).is_err() {
                    // Its connections are gone. The next one gets another thread.
                    *self.lock() = State::default();
                }
            })
            .ok()?;
        state.wake = Some(Arc::clone(&wake));
        Some(wake)
    }

    /// Drives connections until none is left.
    fn run(&self, wake: &EventFd) {
        let mut kept: Vec<Kept> = Vec::new();
        loop {
            // Before the look at what has arrived. Without a count it was not woken by this.
            let _ = wake.read();
            {
                let mut state = self.lock();
                kept.append(&mut state.arrived);
                if kept.is_empty() {
                    state.wake = None;
                    return;
                }
            }
            let now = Instant::now();
            let (mut count, mut bytes) = (0, 0);
            kept.retain_mut(|one| {
                let stays = now < one.deadline && one.driver.is_lingering();
                if !stays {
                    one.driver.close();
                    count += 1;
                    bytes += one.bytes;
                }
                stays
            });
            if count > 0 {
                let mut state = self.lock();
                state.count -= count;
                state.bytes -= bytes;
                // The last one may have ended.
                continue;
            }
            if let Err(error) = sleep(wake, &mut kept) {
                tracing::warn!(%error, "cannot wait for the last data of UDP connections");
                kept.iter_mut().for_each(|one| one.deadline = now);
            }
        }
    }
}

/// Sleeps until a connection has work or arrives, or a deadline has come.
fn sleep(wake: &EventFd, kept: &mut [Kept]) -> std::io::Result<()> {
    let of = |fd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let mut fds = vec![of(wake.as_raw_fd(), libc::POLLIN)];
    let mut until: Option<Instant> = None;
    for Kept {
        driver, deadline, ..
    } in kept
    {
        let room = if driver.is_blocked() {
            libc::POLLOUT
        } else {
            0
        };
        fds.push(of(driver.fd(), libc::POLLIN | room));
        let next = driver.wake_by().map_or(*deadline, |due| due.min(*deadline));
        until = Some(until.map_or(next, |until| until.min(next)));
    }
    poll_until(&mut fds, until)
}

impl Driver {
    /// Returns whether the peer may still need data that its owner has sent. After an error of the
    /// connection, or in the middle of a frame, it has no use for it.
    fn has_last_data(&mut self) -> bool {
        self.connection.side() == Side::Server
            && self.connected
            && self.writing.is_none()
            && self.check().is_ok()
            && self.has_unacknowledged(0)
    }

    /// Gives back what only its owner needs. Returns the limit of the bytes that it still occupies;
    /// `None` if that is too much.
    fn begin_lingering(&mut self) -> Option<usize> {
        let exceeds = |this: &mut Self, bytes: usize| this.has_unacknowledged(bytes as u64);
        let data = DATA_BYTES
            .into_iter()
            .find(|bytes| !exceeds(self, *bytes))?;
        self.believes_refusals = true;
        // Nothing more is read: it stays in the protocol, whose window closes.
        self.inbox = Inbox::new(0);
        self.input = vec![0; DATAGRAM_BUFFER_BYTES].into_boxed_slice();
        Some(data + self.receivable + self.input.len() + self.output.capacity())
    }

    /// Receives and sends what is due. Returns whether the peer has to acknowledge more.
    fn is_lingering(&mut self) -> bool {
        self.poll_io().is_ok() && (self.is_blocked() || self.has_unacknowledged(0))
    }

    /// Returns whether more than so many bytes were written and not acknowledged. Nothing can be
    /// written after that. A peer that grants no room for more counts as one that has not
    /// acknowledged.
    ///
    /// The protocol does not say this directly. It reports room on streams that were refused any
    /// when its send window, which counts these bytes, exceeds them.
    fn has_unacknowledged(&mut self, bytes: u64) -> bool {
        self.connection.set_send_window(0);
        for number in 0..STREAMS {
            // With this window it is refused, so it has no effect on what is sent.
            let _ = self.connection.send_stream(stream_id(number)).write(&[]);
        }
        // Earlier reports.
        self.take_events();
        self.writable = false;
        self.connection.set_send_window(bytes + 1);
        self.take_events();
        !self.writable
    }
}
