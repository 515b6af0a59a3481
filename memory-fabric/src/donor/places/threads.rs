//! The threads of connections of leases, and their limits.

use super::{CONNECTIONS_MAX, CONTROL_SPARE, Full, Purpose, RESTING_MAX};

/// The thread of a connection of a lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Thread {
    /// One of [`CONNECTIONS_MAX`].
    Lasting,
    /// One of [`CONTROL_SPARE`].
    Short,
    /// That of all resting connections.
    Shared,
}

/// Numbers of connections of leases by their threads.
#[derive(Debug, Default)]
pub(super) struct Threads {
    lasting: usize,
    short: usize,
    shared: usize,
    /// Connections that are being set up, and have a place among those that rest.
    promised: usize,
}

impl Threads {
    const fn of(&mut self, thread: Thread) -> (&mut usize, usize) {
        match thread {
            Thread::Lasting => (&mut self.lasting, CONNECTIONS_MAX),
            Thread::Short => (&mut self.short, CONTROL_SPARE),
            Thread::Shared => {
                let most = RESTING_MAX - self.promised;
                (&mut self.shared, most)
            }
        }
    }

    /// Returns the number of connections that rest.
    pub(super) const fn resting(&self) -> usize {
        self.shared
    }

    pub(super) fn take(&mut self, thread: Thread) -> Result<Thread, Full> {
        let (count, most) = self.of(thread);
        if *count >= most {
            return Err(Full);
        }
        *count += 1;
        Ok(thread)
    }

    pub(super) fn take_for(&mut self, purpose: Purpose) -> Result<Thread, Full> {
        match purpose {
            Purpose::Control => self
                .take(Thread::Short)
                .or_else(|_| self.take(Thread::Lasting)),
            Purpose::Lasting => self.take(Thread::Lasting),
        }
    }

    /// Takes a thread for a connection that is set up, and with true a place among those that rest. One
    /// that could neither rest nor keep its thread would be refused after its lease was granted.
    pub(super) fn take_to_begin(&mut self, purpose: Purpose) -> Result<(Thread, bool), Full> {
        if purpose == Purpose::Control && self.shared + self.promised < RESTING_MAX {
            let thread = self.take_for(purpose)?;
            self.promised += 1;
            return Ok((thread, true));
        }
        self.take(Thread::Lasting).map(|thread| (thread, false))
    }

    /// Gives back the place among those that rest, if there is one.
    pub(super) const fn redeem(&mut self, promised: &mut bool) {
        if *promised {
            self.promised -= 1;
            *promised = false;
        }
    }

    pub(super) const fn give_back(&mut self, thread: Thread) {
        *self.of(thread).0 -= 1;
    }
}
