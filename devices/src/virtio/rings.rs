//! The rings of a device while its driver uses it, and the chains that are in the hands of threads.
//!
//! Most devices have a ring for themselves while they serve it. One that carries out chains on
//! several threads ([`CarriesOut`](super::CarriesOut)) has it only to take a chain, and again to give
//! it back. Each chain in hand is counted, so that the driver gets its rings back, by a reset or by
//! stopping a queue, only when nothing of them is in hand and so nothing of its memory is written any more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use super::ring::{has_more, next_chain};
use super::{BrokenRing, Chain, Ring};
use crate::lock;

/// A ring that makes no sense, found in a session.
#[derive(Debug)]
pub(super) struct Broken(pub u64);

/// The rings of one device.
#[derive(Debug)]
pub(super) struct Rings {
    state: Mutex<State>,
    /// A chain is no longer in hand, or `stopping` has become less.
    returned: Condvar,
    /// How many wait for the lock to take rings away. Whoever serves waits for those between two
    /// turns: the lock alone is no queue. Becomes less under the lock. Relaxed: a turn that does not
    /// see the first moment of it is one more turn.
    stopping: AtomicUsize,
}

#[derive(Debug)]
struct State {
    in_use: Option<InUse>,
    /// Chains in hand, for each queue; also those of rings that are not in use any more.
    in_hand: Vec<usize>,
}

/// From the start of the driver until its reset.
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
    /// Those of a device with so many queues, none of them in use.
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

    /// The driver has started the device, and described these.
    pub fn start(&self, session: u64, queues: Vec<Option<Queue>>) {
        lock(&self.state).in_use = Some(InUse { session, queues });
    }

    /// Takes the rings away from who serves them. Returns when none of them is being served and no
    /// chain of them is in hand, which takes as long as a chain does that waits for a page or a disk.
    pub fn stop(&self) {
        self.stop_where(|state| state.in_use = None, |_| true);
    }

    /// The same with one of them.
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

    /// Takes the rings away without waiting: chains in hand are not given back any more.
    pub fn abandon(&self) {
        lock(&self.state).in_use = None;
    }

    /// Has queue `index` served, while nobody else has a ring of the device; `None` when it is not in use.
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

    /// Takes the next chain of queue `index`, for one of `threads` threads, if there is one.
    pub fn take<'a>(
        &'a self,
        index: usize,
        memory: &'a GuestMemoryMmap,
        threads: usize,
    ) -> Result<Option<InHand<'a>>, Broken> {
        let mut state = lock(&self.state);
        let Some((session, queue)) = state.queue(index) else {
            return Ok(None);
        };
        let broken = |_: BrokenRing| Broken(session);
        let Some(chain) = next_chain(queue, memory).map_err(broken)? else {
            return Ok(None);
        };
        let more = has_more(queue, memory).map_err(broken)?;
        let in_hand = &mut state.in_hand[index];
        *in_hand += 1;
        Ok(Some(InHand {
            rings: self,
            session,
            index,
            memory,
            // With all of them at work each looks for more by itself, when it is done.
            another_may_begin: more && *in_hand < threads,
            chain,
        }))
    }
}

/// A chain that a thread carries out without having its ring.
#[derive(Debug)]
pub(super) struct InHand<'a> {
    rings: &'a Rings,
    session: u64,
    index: usize,
    memory: &'a GuestMemoryMmap,
    /// Another chain waits, and perhaps a thread that can carry it out.
    pub another_may_begin: bool,
    /// What is to be carried out.
    pub chain: Chain<'a>,
}

impl InHand<'_> {
    /// Gives the chain back to the driver, with the number of bytes that were written to it, unless its
    /// ring is not in use any more. True when the driver is to be told; whoever has taken the rings
    /// away still waits until this is dropped.
    pub fn give_back(&self, written: u32) -> Result<bool, Broken> {
        let mut state = lock(&self.rings.state);
        let Some((session, queue)) = state.queue(self.index) else {
            return Ok(false);
        };
        assert_eq!(session, self.session, "a reset waits for chains in hand");
        let mut ring = Ring::new(queue, self.memory);
        let told = ring
            .used(self.chain.head_index(), written)
            .and_then(|()| ring.must_tell());
        told.map_err(|_| Broken(session))
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
