//! What threads give to one that waits for events, and how they wake it.

use fabric_host::lock;
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

/// The key of the bell; what is watched beside it has others.
pub(super) const BELL: u64 = u64::MAX;

/// An epoll descriptor, with a bell, and a queue.
#[derive(Debug)]
pub(super) struct Mailbox<T> {
    epoll: OwnedFd,
    bell: OwnedFd,
    /// What the thread has not taken yet; `None` once it has ended.
    arrivals: Mutex<Option<Vec<T>>>,
}

impl<T> Mailbox<T> {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let data = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, &bell, data, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            bell,
            arrivals: Mutex::new(Some(Vec::new())),
        })
    }

    pub(super) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Gives something to the thread. It is dropped when the thread has ended.
    pub(super) fn add(&self, arrival: T) {
        // Dropped after the lock: that may take another one.
        let late = match lock(&self.arrivals).as_mut() {
            Some(arrivals) => {
                arrivals.push(arrival);
                None
            }
            None => Some(arrival),
        };
        if late.is_none() {
            self.ring();
        }
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        // It fails when it has been rung 2^64 times.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Returns what was given since the last call, and silences the bell.
    pub(super) fn take(&self) -> Vec<T> {
        // It is non-blocking, and all is taken.
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
        let arrivals = lock(&self.arrivals).as_mut().map(std::mem::take);
        arrivals.unwrap_or_default()
    }

    /// Notes that the thread ends. Returns what it has not taken.
    pub(super) fn close(&self) -> Vec<T> {
        lock(&self.arrivals).take().unwrap_or_default()
    }
}
