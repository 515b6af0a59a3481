//! Which vCPUs have halted: what they got for their accesses is not held any longer.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::thread::gettid;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Places for threads: the bits of a word. Two threads with the same place hide each other, which
/// costs time and nothing else. Threads of vCPUs have ids in a row, and 16 vCPUs none in common.
const PLACES: u32 = u64::BITS;

/// Lets the threads of vCPUs say that these have halted.
///
/// The engine may read it late, when the vCPU runs again. Then pages are given up that could have been
/// held, and nothing else happens: a hold decides when a page leaves, never whether.
#[derive(Debug)]
pub struct Halts {
    /// A bit for each place with a thread that has halted since the engine looked.
    news: AtomicU64,
    /// The threads. Stored before their bits, loaded after them.
    threads: [AtomicU32; PLACES as usize],
    /// The engine sleeps while it holds pages. Sequentially consistent, as are the bits: a thread
    /// sets its bit, then loads this; the engine sets this, then loads the bits. At least one of the
    /// two sees what the other stored.
    is_awaited: AtomicBool,
    wake: EventFd,
}

impl Halts {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            news: AtomicU64::new(0),
            threads: std::array::from_fn(|_| AtomicU32::new(0)),
            is_awaited: AtomicBool::new(false),
            wake: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
        })
    }

    /// The vCPU of the calling thread has halted. Without a system call unless the engine sleeps and
    /// holds pages.
    pub fn halted(&self) {
        self.note(gettid().as_raw_nonzero().get().unsigned_abs());
    }

    fn note(&self, thread: u32) {
        let place = thread % PLACES;
        self.threads[place as usize].store(thread, Ordering::Relaxed);
        self.news.fetch_or(1 << place, Ordering::SeqCst);
        if self.is_awaited.load(Ordering::SeqCst) {
            // A full counter is readable as well.
            let _ = self.wake.write(1);
        }
    }

    /// The engine is about to sleep while it holds pages. Returns whether it must not, because a
    /// thread has halted.
    pub(crate) fn begin_sleep(&self) -> bool {
        self.is_awaited.store(true, Ordering::SeqCst);
        self.news.load(Ordering::SeqCst) != 0
    }

    /// The engine is awake, and looks by itself.
    pub(crate) fn end_sleep(&self) {
        self.is_awaited.store(false, Ordering::SeqCst);
        let _ = self.wake.read();
    }

    /// The threads that have halted since the last call.
    pub(crate) fn take(&self) -> impl Iterator<Item = u32> + '_ {
        let mut news = match self.news.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.news.swap(0, Ordering::SeqCst),
        };
        std::iter::from_fn(move || {
            let place = (news != 0).then(|| news.trailing_zeros())?;
            news &= news - 1;
            Some(self.threads[place as usize].load(Ordering::Relaxed))
        })
    }

    pub(crate) const fn wake(&self) -> &EventFd {
        &self.wake
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_halt_are_taken_once() {
        let halts = Halts::new().expect("an eventfd");
        for thread in [700, 70, 701, 70] {
            halts.note(thread);
        }
        let mut taken: Vec<u32> = halts.take().collect();
        taken.sort_unstable();
        assert_eq!(taken, [70, 700, 701]);
        assert_eq!(halts.take().count(), 0);
        // One place.
        halts.note(1);
        halts.note(1 + PLACES);
        assert_eq!(halts.take().collect::<Vec<_>>(), [1 + PLACES]);
        halts.halted();
        assert_eq!(halts.take().collect::<Vec<_>>().len(), 1);
    }

    #[test]
    fn a_halt_is_seen_before_a_sleep_or_ends_it() {
        let halts = Halts::new().expect("an eventfd");
        halts.note(5);
        assert!(halts.wake.read().is_err(), "nobody sleeps");
        assert!(halts.begin_sleep());
        halts.end_sleep();
        assert_eq!(halts.take().collect::<Vec<_>>(), [5]);
        assert!(!halts.begin_sleep());
        halts.note(6);
        assert_eq!(halts.wake.read().ok(), Some(1));
        halts.end_sleep();
        assert_eq!(halts.take().collect::<Vec<_>>(), [6]);
    }
}
