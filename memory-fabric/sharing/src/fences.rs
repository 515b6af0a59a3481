//! Waiting until other nodes have what this node's vCPUs stored into merged tables.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Lets a thread wait before it acts on other nodes by other means than the shared memory: before it
/// sends an interrupt, for example.
#[derive(Debug)]
pub struct TableFences {
    /// Whether this node may have merged tables. Its engine stores it before it reads such a table
    /// for the first time; a thread loads it after its vCPU has stored into one.
    is_active: AtomicBool,
    /// Fences asked for. Pairs with the engine's load: it sees what was stored before.
    asked: AtomicU64,
    /// Fences that are over; all of them when the engine has ended.
    over: Mutex<u64>,
    changed: Condvar,
    wake: EventFd,
}

impl TableFences {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            is_active: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            over: Mutex::new(0),
            changed: Condvar::new(),
            wake: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
        })
    }

    /// Returns when all nodes have what this node's vCPUs stored into merged tables before the call,
    /// at once if there are none. A thread that serves the shared memory must not call it.
    pub fn wait(&self) {
        if !self.is_active.load(Ordering::Acquire) {
            return;
        }
        let number = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        // A full counter is readable as well.
        let _ = self.wake.write(1);
        let mut over = self.over();
        while *over < number {
            over = self
                .changed
                .wait(over)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn over(&self) -> MutexGuard<'_, u64> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn activate(&self) {
        self.is_active.store(true, Ordering::SeqCst);
        // What the engine reads after it has not been read before.
        fence(Ordering::SeqCst);
    }

    /// The number of fences that were asked for.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Acquire)
    }

    /// Ends all fences up to this one.
    pub(crate) fn end(&self, number: u64) {
        *self.over() = number;
        self.changed.notify_all();
    }

    pub(crate) const fn wake(&self) -> &EventFd {
        &self.wake
    }
}
