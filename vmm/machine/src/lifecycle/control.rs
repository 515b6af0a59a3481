//! Pausing, resuming and ending: the state that vCPU threads, device threads and handles share.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use super::kick::{Kick, install_kick_handler};
use crate::error::MachineError;
use crate::outcome::Outcome;

/// The result of a run.
pub(crate) type End = Result<Outcome, MachineError>;

/// The next action of a vCPU thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter the guest.
    Run,
    /// Enter the guest after a pause.
    Resume,
    /// End the thread.
    Exit,
}

/// Another node of the machine, which pauses, resumes and ends with this one. Calls do not block.
pub(crate) trait Follower: fmt::Debug + Send + Sync {
    /// Stops all vCPUs. The thread that finds that none runs calls [`Control::node_parked`].
    fn pause(&self, number: u32);

    /// Lets vCPUs run again.
    fn resume(&self);

    /// Ends the run.
    fn end(&self, end: &End);
}

#[derive(Debug, Default)]
struct State {
    paused: bool,
    end: Option<End>,
    /// Set with `end`; stays set after `end` was taken.
    ended: bool,
    /// Whether the guest has ended it by itself.
    by_guest: bool,
    /// vCPU threads that have not ended, and other nodes with such threads.
    live: usize,
    /// Threads of devices that touch guest memory and have not ended.
    device_threads: usize,
    /// vCPU threads that wait for a resume.
    parked: usize,
    /// The number of the last pause, and the other nodes that have stopped their vCPUs for it.
    pauses: u32,
    parked_nodes: usize,
}

/// State shared by all parts of a running machine.
#[derive(Debug)]
pub(crate) struct Control {
    state: Mutex<State>,
    changed: Condvar,
    /// vCPU threads must check `state` before they enter the guest, and device threads before they
    /// serve. Sequentially consistent, as is the `immediate_exit` of each vCPU: a kick stores this,
    /// then `immediate_exit`; a vCPU thread clears `immediate_exit`, then loads this. At least one
    /// of the two sees the other's store. The same holds for `serving`: a pause stores this, then
    /// loads `serving`; a device thread adds to `serving`, then loads this.
    attention: AtomicBool,
    /// Device threads that are serving and may access guest memory. Pairs with `attention`.
    serving: AtomicUsize,
    kicks: Vec<Arc<Kick>>,
    followers: Vec<Arc<dyn Follower>>,
    /// Readable once the run has ended.
    wake: EventFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The state changes in single assignments, so a panic cannot leave it inconsistent.
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Control {
    /// Creates the state of a machine with `cpus` vCPUs, none of them started.
    #[cfg(test)]
    pub fn new(cpus: usize) -> io::Result<Self> {
        Self::with_followers(cpus, Vec::new())
    }

    /// Creates the state of a machine with `cpus` vCPUs, none of them started, and with other
    /// nodes.
    pub fn with_followers(cpus: usize, followers: Vec<Arc<dyn Follower>>) -> io::Result<Self> {
        install_kick_handler()?;
        Ok(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            attention: AtomicBool::new(false),
            serving: AtomicUsize::new(0),
            kicks: (0..cpus).map(|_| Arc::default()).collect(),
            followers,
            wake: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Returns the event descriptor that becomes readable when the run has ended.
    pub fn wake_fd(&self) -> &EventFd {
        &self.wake
    }

    /// Returns the kick of each vCPU, in order.
    pub fn kicks(&self) -> &[Arc<Kick>] {
        &self.kicks
    }

    /// Ends the run, unless it has ended, and makes all vCPUs leave the guest.
    pub fn end(&self, end: End) {
        {
            let mut state = lock(&self.state);
            if state.ended {
                return;
            }
            state.ended = true;
            state.by_guest = matches!(&end, Ok(outcome) if *outcome != Outcome::Stopped);
            // Under the lock, like all notifications of followers, so that they are sent in order.
            self.followers.iter().for_each(|node| node.end(&end));
            state.end = Some(end);
            self.attention.store(true, Ordering::SeqCst);
        }
        // Cannot fail: the counter is zero, since the run ends once.
        let _ = self.wake.write(1);
        self.changed.notify_all();
        self.kick_all();
    }

    /// Returns whether the run has ended.
    pub fn has_ended(&self) -> bool {
        lock(&self.state).ended
    }

    /// Returns whether the guest has ended the run by itself.
    pub fn was_ended_by_guest(&self) -> bool {
        lock(&self.state).by_guest
    }

    /// Takes the result of the run, which exists once.
    pub fn take_end(&self) -> Option<End> {
        lock(&self.state).end.take()
    }

    /// Requests that all vCPUs leave the guest and wait, and that devices are no longer served.
    pub fn pause(&self) {
        {
            let mut state = lock(&self.state);
            if !state.paused {
                state.pauses = state.pauses.wrapping_add(1);
                state.parked_nodes = 0;
                let number = state.pauses;
                self.followers.iter().for_each(|node| node.pause(number));
            }
            state.paused = true;
            self.attention.store(true, Ordering::SeqCst);
        }
        self.kick_all();
    }

    /// Lets the vCPUs enter the guest again.
    pub fn resume(&self) {
        {
            let mut state = lock(&self.state);
            if state.paused {
                self.followers.iter().for_each(|node| node.resume());
            }
            state.paused = false;
            if !state.ended {
                self.attention.store(false, Ordering::SeqCst);
            }
        }
        self.changed.notify_all();
    }

    /// Waits until every vCPU thread waits or has ended and no device is served. Returns false
    /// after `limit`, or if no pause was requested.
    pub fn wait_paused(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = lock(&self.state);
        while state.paused
            && (state.parked + state.parked_nodes < state.live
                || self.serving.load(Ordering::SeqCst) > 0)
        {
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            state = self.wait_changed(state, deadline - now);
        }
        state.paused
    }

    /// Returns whether a pause is in force.
    pub fn is_paused(&self) -> bool {
        lock(&self.state).paused
    }

    /// Records that a node has stopped its vCPUs for the pause with this number.
    pub fn node_parked(&self, number: u32) {
        let mut state = lock(&self.state);
        if state.paused && state.pauses == number {
            state.parked_nodes += 1;
            self.changed.notify_all();
        }
    }

    /// Waits until every thread that accesses guest memory has ended, of vCPUs and of devices.
    /// Returns false after `limit`.
    pub fn wait_all_ended(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = lock(&self.state);
        while state.live > 0 || state.device_threads > 0 {
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            state = self.wait_changed(state, deadline - now);
        }
        true
    }

    fn wait_changed<'a>(
        &self,
        state: MutexGuard<'a, State>,
        limit: Duration,
    ) -> MutexGuard<'a, State> {
        match self.changed.wait_timeout(state, limit) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }

    /// Counts a vCPU thread that is about to be started.
    pub fn vcpu_starts(&self) {
        lock(&self.state).live += 1;
    }

    /// Counts a vCPU thread that has ended.
    pub fn vcpu_ended(&self) {
        lock(&self.state).live -= 1;
        self.changed.notify_all();
    }

    /// Counts a device thread, which accesses guest memory, that is about to be started.
    pub fn device_thread_starts(&self) {
        lock(&self.state).device_threads += 1;
    }

    /// Counts a device thread that has ended.
    pub fn device_thread_ended(&self) {
        lock(&self.state).device_threads -= 1;
        self.changed.notify_all();
    }

    /// Waits while the machine is paused, before a vCPU thread enters the guest. The caller has
    /// cleared the `immediate_exit` of its vCPU.
    pub fn checkpoint(&self) -> Next {
        if !self.attention.load(Ordering::SeqCst) {
            return Next::Run;
        }
        let mut state = lock(&self.state);
        let mut next = Next::Run;
        while state.paused && !state.ended {
            next = Next::Resume;
            state.parked += 1;
            self.changed.notify_all();
            state = self
                .changed
                .wait_while(state, |s| s.paused && !s.ended)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            state.parked -= 1;
        }
        if state.ended { Next::Exit } else { next }
    }

    /// Waits while the machine is paused, before a device thread serves. Returns `None` when the
    /// run has ended.
    pub fn device_turn(&self) -> Option<DeviceTurn<'_>> {
        loop {
            self.serving.fetch_add(1, Ordering::SeqCst);
            let turn = DeviceTurn(self);
            if !self.attention.load(Ordering::SeqCst) {
                return Some(turn);
            }
            drop(turn);
            let state = self
                .changed
                .wait_while(lock(&self.state), |s| s.paused && !s.ended)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            if state.ended {
                return None;
            }
        }
    }

    fn kick_all(&self) {
        for kick in &self.kicks {
            kick.kick();
        }
    }
}

/// Held while a device is served.
#[derive(Debug)]
pub(crate) struct DeviceTurn<'a>(&'a Control);

impl DeviceTurn<'_> {
    /// Returns whether neither a pause nor the end was requested since it began, so that work which
    /// can be deferred may continue.
    pub fn may_continue(&self) -> bool {
        !self.0.attention.load(Ordering::SeqCst)
    }
}

impl Drop for DeviceTurn<'_> {
    fn drop(&mut self) {
        let control = self.0;
        let was = control.serving.fetch_sub(1, Ordering::SeqCst);
        if was == 1 && control.attention.load(Ordering::SeqCst) {
            // Under the lock: a thread that has read the earlier count already waits.
            let _state = lock(&control.state);
            control.changed.notify_all();
        }
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
