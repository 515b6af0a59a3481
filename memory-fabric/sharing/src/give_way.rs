//! When the engine gives its CPU to a thread that it woke, and what leaves this node then.

use std::time::{Duration, Instant};

use fabric_peers::Peers;

use crate::engine::Engine;

/// Passes in a row that only serve faults, after which everything else is looked at: about as long as an
/// unblock may wait. Each may yield, for 100 us at most, or the last time for a while.
const SHORT_PASSES_MAX: u32 = 4;

/// How long an unblock that nobody is known to wait for can wait for the next request of the thread
/// that was woken, with which it then leaves: what a thread takes to wake up and fault again. Half of
/// the time for which a contended page is held at least.
const UNBLOCK_WAIT: Duration = Duration::from_micros(25);

/// What the engine has done since it last gave its CPU away, or sent something.
#[derive(Debug)]
pub(crate) struct GiveWay {
    /// A thread that waited was woken.
    pub(crate) has_woken: bool,
    /// Faults are read again since then.
    looks: bool,
    /// What is sent now ends a request that nobody else waits for, as far as this node knows.
    pub(crate) can_wait: bool,
    /// Messages are queued that another node may wait for.
    pub(crate) is_urgent: bool,
    /// Until when the others can wait; `None` while they cannot.
    waits_until: Option<Instant>,
    /// Passes in a row that ended before all else was looked at.
    short_passes: u32,
}

impl GiveWay {
    pub(crate) const fn new() -> Self {
        Self {
            has_woken: false,
            looks: false,
            can_wait: false,
            is_urgent: false,
            waits_until: None,
            short_passes: 0,
        }
    }

    /// Whether faults are to be read again before all else is looked at.
    fn looks_again(&mut self) -> bool {
        let looks = std::mem::take(&mut self.has_woken) && self.short_passes < SHORT_PASSES_MAX;
        self.short_passes += u32::from(looks);
        self.looks = looks;
        looks
    }

    /// No faults wait. Returns whether a thread that was woken has not faulted since.
    fn is_awaited(&mut self) -> bool {
        let looks = std::mem::take(&mut self.looks);
        std::mem::take(&mut self.has_woken) || looks
    }

    /// All else is looked at.
    pub(crate) const fn passes(&mut self) {
        self.short_passes = 0;
    }

    /// The thread that was woken comes first. What waits already waits no longer for that.
    fn begins(&mut self, now: Instant) {
        self.waits_until.get_or_insert(now + UNBLOCK_WAIT);
    }

    /// Whether what is queued is to be sent; the caller does so.
    fn sends(&mut self, now: Instant) -> bool {
        let sends = self.is_urgent || self.waits_until.is_none_or(|until| now >= until);
        if sends {
            self.is_urgent = false;
            self.waits_until = None;
        }
        sends
    }
}

impl<P: Peers> Engine<P> {
    /// Whether faults are to be read again before all else is looked at: the kernel often runs a thread at
    /// once that is woken on the engine's CPU, and then it has faulted again already. Not too often in a
    /// row: what [`run`](Self::run) looks at besides waits for that.
    pub(crate) fn looks_again(&mut self) -> bool {
        let looks = self.give_way.looks_again() && self.hand_over.is_useful();
        if looks {
            self.give_way.begins(self.now);
            self.flush();
        }
        looks
    }

    /// Gives the CPU to a thread that was woken and has not faulted again, if there is one and if that
    /// pays: until it runs, nothing else matters as much.
    pub(crate) fn gives_way(&mut self) -> bool {
        let pays = self.give_way.is_awaited() && self.hand_over.pays(self.now);
        if pays {
            self.give_way.begins(self.now);
            self.flush();
            ((), self.now) = self.hand_over.pause(std::thread::yield_now);
        }
        pays
    }

    /// Sends what is queued, unless all of it can wait for the next request of a thread that was woken.
    pub(crate) fn flush(&mut self) {
        if self.give_way.sends(self.now) {
            self.peers.flush();
        }
    }

    /// Sends all that is queued.
    pub(crate) fn flush_all(&mut self) {
        self.give_way.waits_until = None;
        self.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unblock_waits_for_a_request_and_not_for_long() {
        let start = Instant::now();
        let mut way = GiveWay::new();
        assert!(way.sends(start), "nobody was woken");
        way.begins(start);
        let soon = start + UNBLOCK_WAIT / 2;
        assert!(!way.sends(soon));
        way.is_urgent = true;
        assert!(way.sends(soon), "with the request");
        way.begins(soon);
        assert!(!way.sends(soon));
        assert!(way.sends(soon + UNBLOCK_WAIT), "alone");
    }

    #[test]
    fn an_unblock_waits_no_longer_because_threads_are_woken_again_and_again() {
        let start = Instant::now();
        let mut way = GiveWay::new();
        let step = UNBLOCK_WAIT / 4;
        for count in 0..4 {
            way.begins(start + count * step);
            assert!(!way.sends(start + count * step));
        }
        way.begins(start + UNBLOCK_WAIT);
        assert!(way.sends(start + UNBLOCK_WAIT));
    }

    #[test]
    fn a_thread_that_was_woken_gets_the_cpu_unless_it_has_faulted_again() {
        let mut way = GiveWay::new();
        assert!(!way.is_awaited(), "nobody was woken");
        way.has_woken = true;
        assert!(way.looks_again());
        assert!(way.is_awaited(), "it has not faulted again");
        assert!(!way.is_awaited(), "once");
        way.passes();
        way.has_woken = true;
        assert!(way.looks_again());
        // It has, and waits for another node.
        assert!(!way.looks_again());
        assert!(!way.is_awaited());
    }

    #[test]
    fn all_else_is_looked_at_now_and_then() {
        let mut way = GiveWay::new();
        assert!(!way.looks_again(), "nobody was woken");
        for _ in 0..SHORT_PASSES_MAX {
            way.has_woken = true;
            assert!(way.looks_again());
        }
        way.has_woken = true;
        assert!(!way.looks_again());
        way.passes();
        way.has_woken = true;
        assert!(way.looks_again());
    }
}
