//! The rings of a device while its driver uses it, and the chains in the hands of threads.
//!
//! Most devices hold a ring while they serve it. One that serves chains on several threads
//! ([`CarriesOut`](super::CarriesOut)) holds it only to take or to return a chain. Each chain in
//! hand is counted, so that a reset, or stopping a queue, returns the rings to the driver only when
//! no chain is in hand and nothing writes to their buffers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use virtio_queue::{Queue, QueueOwnedT as _};
use vm_memory::GuestMemoryMmap;

use super::ring::{has_more, next_chain};
use super::{BrokenRing, Chain, Ring};
use crate::lock;

/// An inconsistent ring, found in a session.
#[derive(Debug)]
pub(super) struct Broken(pub u64);

/// The rings of one device.
#[derive(Debug)]
pub(super) struct Rings {
    state: Mutex<State>,
    /// Signalled when a chain is no longer in hand, or `stopping` has decreased.
    returned: Condvar,
    /// How many threads wait for the lock to remove rings. Serving threads yield to them between
    /// two turns, since the lock is not fair. Decremented under the lock. Relaxed: a turn that
    /// misses an increment is one more turn.
    stopping: AtomicUsize,
}

#[derive(Debug)]
struct State {
    in_use: Option<InUse>,
    /// Chains in hand per queue, including those of removed rings.
    in_hand: Vec<usize>,
}

/// Number of the current session: from a start by the driver until its reset.
#[derive(Debug)]
struct InUse {
    session: u64,
    queues: Vec<Option<Queue>>,
}

impl State {
    fn queue(&mut self, index: usize) -> Option<(u64, &mut Queue)> {
        let in_use = self.in_use.as_mut()?;
        let queue = in_use.queues.get_mut(index)?.as_mut()?;
        Some((in_use.session, queue))
    }
}

impl Rings {
    /// Creates the rings of a device with this many queues, none of them in use.
    pub fn new(queues: usize) -> Self {
        Self {
            state: Mutex::new(State {
                in_use: None,
                in_hand: vec![0; queues],
            }),
            returned: Condvar::new(),
            stopping: AtomicUsize::new(0),
        }
    }

    /// The driver has started the device and described these rings.
    pub fn start(&self, session: u64, queues: Vec<Option<Queue>>) {
        lock(&self.state).in_use = Some(InUse { session, queues });
    }

    /// Removes all rings. Returns when none is being served and no chain is in hand, which takes as
    /// long as a chain that waits for a page or a disk.
    pub fn stop(&self) {
        self.stop_where(|state| state.in_use = None, |_| true);
    }

    /// As [`stop`](Self::stop), for one queue.
    pub fn stop_queue(&self, index: usize) {
        let take = |state: &mut State| {
            let queues = state.in_use.as_mut().map(|in_use| &mut in_use.queues);
            if let Some(queue) = queues.and_then(|queues| queues.get_mut(index)) {
                *queue = None;
            }
        };
        self.stop_where(take, |queue| queue == index);
    }

    fn stop_where(&self, take: impl FnOnce(&mut State), which: impl Fn(usize) -> bool) {
        self.stopping.fetch_add(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        take(&mut state);
        self.stopping.fetch_sub(1, Ordering::Relaxed);
        self.returned.notify_all();
        let in_hand = |state: &mut State| {
            let mut counts = state.in_hand.iter().enumerate();
            counts.any(|(queue, count)| which(queue) && *count > 0)
        };
        drop(
            self.returned
                .wait_while(state, in_hand)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Removes the rings without waiting: chains in hand are not returned.
    pub fn abandon(&self) {
        lock(&self.state).in_use = None;
    }

    /// Serves queue `index` while no other thread holds a ring of the device; `None` when it is not
    /// in use.
    pub fn serve<'a, T>(
        &'a self,
        index: usize,
        memory: &'a GuestMemoryMmap,
        serve: impl FnOnce(&mut Ring<'_>) -> Result<T, BrokenRing>,
    ) -> Result<Option<T>, Broken> {
        let mut state = self
            .returned
            .wait_while(lock(&self.state), |_| {
                self.stopping.load(Ordering::Relaxed) > 0
            })
            .unwrap_or_else(PoisonError::into_inner);
        let Some((session, queue)) = state.queue(index) else {
            return Ok(None);
        };
        let served = serve(&mut Ring::new(queue, memory));
        served.map(Some).map_err(|_| Broken(session))
    }

    /// Takes the next chain of queue `index` for one of `threads` threads, if there is one and it
    /// `may_begin`.
    pub fn take<'a>(
        &'a self,
        index: usize,
        memory: &'a GuestMemoryMmap,
        threads: usize,
        may_begin: impl FnOnce() -> bool,
    ) -> Result<Option<InHand<'a>>, Broken> {
        let mut state = lock(&self.state);
        let Some((session, queue)) = state.queue(index) else {
            return Ok(None);
        };
        let broken = |_: BrokenRing| Broken(session);
        let Some(chain) = next_chain(queue, memory).map_err(broken)? else {
            return Ok(None);
        };
        if !may_begin() {
            // The driver does not notify the device of others either: it is woken by its timer.
            queue.go_to_previous_position();
            return Ok(None);
        }
        let more = has_more(queue, memory).map_err(broken)?;
        let in_hand = &mut state.in_hand[index];
        *in_hand += 1;
        Ok(Some(InHand {
            rings: self,
            session,
            index,
            memory,
            // When all threads are busy, each looks for more chains itself when it is done.
            another_may_begin: more && *in_hand < threads,
            chain,
        }))
    }
}

/// A chain that a thread serves without holding its ring.
#[derive(Debug)]
pub(super) struct InHand<'a> {
    rings: &'a Rings,
    session: u64,
    index: usize,
    memory: &'a GuestMemoryMmap,
    /// Another chain waits, and another thread may be idle.
    pub another_may_begin: bool,
    /// The chain.
    pub chain: Chain<'a>,
}

impl InHand<'_> {
    /// Returns the chain to the driver, with the number of bytes written to it, unless its ring was
    /// removed. Returns true when the driver must be notified. A thread that removes the rings
    /// waits until this is dropped.
    pub fn complete(&self, written: u32) -> Result<bool, Broken> {
        let mut state = lock(&self.rings.state);
        let Some((session, queue)) = state.queue(self.index) else {
            return Ok(false);
        };
        assert_eq!(session, self.session, "a reset waits for chains in hand");
        let mut ring = Ring::new(queue, self.memory);
        let notify = ring
            .used(self.chain.head_index(), written)
            .and_then(|()| ring.must_notify());
        notify.map_err(|_| Broken(session))
    }
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        lock(&self.rings.state).in_hand[self.index] -= 1;
        self.rings.returned.notify_all();
    }
}

#[cfg(test)]
#[path = "rings_tests.rs"]
mod tests;
