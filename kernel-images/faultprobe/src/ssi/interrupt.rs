//! Interrupts that one CPU sends to another: what a wake-up and a call of its kernel take.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

use super::team::Deadline;

/// A run ends after so many rounds even if there is time left.
const ROUNDS_MAX: u64 = 50_000;
/// A thread looks again after this time whether it was woken.
const LOOK: Duration = Duration::from_secs(20);
/// A thread that finds then that it was woken so long ago runs because it looked: the wake-up is
/// lost.
const LOST: Duration = Duration::from_secs(10);
/// A thread that is not woken for so long never will be. CPUs on busy hosts may need more than
/// [`LOOK`] to answer.
const SILENT: Duration = Duration::from_secs(120);
/// Bounds of the pause in which the other CPU falls asleep, for it to need an interrupt.
const PAUSE_MIN: Duration = Duration::from_micros(200);
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Two threads that wake each other (by futex).
#[derive(Debug)]
pub struct Wakes {
    threads: [OnceLock<Thread>; 2],
    /// The last round that each thread was woken for.
    rounds: [AtomicU64; 2],
    /// When each thread was woken last, in nanoseconds since `begun`.
    woken_ns: [AtomicU64; 2],
    begun: Instant,
    is_over: AtomicBool,
}

impl Default for Wakes {
    fn default() -> Self {
        Self {
            threads: Default::default(),
            rounds: Default::default(),
            woken_ns: Default::default(),
            begun: Instant::now(),
            is_over: AtomicBool::default(),
        }
    }
}

/// What one thread saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Ticks of each round, which is a wake-up there and one back; of the first thread only.
    pub round_ticks: Vec<u64>,
    /// Wake-ups that did not arrive.
    pub lost: u64,
}

impl Wakes {
    /// Wakes and is woken as thread 0 or 1 of two until the deadline.
    pub fn run(&self, role: usize, deadline: &Deadline) -> Seen {
        // Each thread sets its own, once.
        let _ = self.threads[role].set(thread::current());
        let mut seen = Seen::default();
        // The other may be preempted at this point for long; it does come, since it was started.
        Deadline::after(u64::MAX).wait(|| self.threads[1 - role].get().is_some());
        let Some(other) = self.threads[1 - role].get() else {
            return seen;
        };
        if role == 0 {
            self.begin(other, deadline, &mut seen);
        } else {
            self.answer(other, &mut seen);
        }
        seen
    }

    fn begin(&self, other: &Thread, deadline: &Deadline, seen: &mut Seen) {
        let mut pause = PAUSE_MIN;
        for round in 1..=ROUNDS_MAX {
            thread::sleep(pause);
            let begin = Deadline::after(0);
            let started = Instant::now();
            self.wake(1, round, other);
            if !self.sleep(0, round) {
                // Unless the other has lost one and said so.
                seen.lost += u64::from(!self.is_over.load(Ordering::Acquire));
                break;
            }
            seen.round_ticks.push(begin.elapsed());
            pause = (started.elapsed() / 2).clamp(PAUSE_MIN, PAUSE_MAX);
            if deadline.is_over() {
                break;
            }
        }
        self.is_over.store(true, Ordering::Release);
        other.unpark();
    }

    fn answer(&self, other: &Thread, seen: &mut Seen) {
        for round in 1.. {
            if !self.sleep(1, round) {
                if !self.is_over.swap(true, Ordering::AcqRel) {
                    seen.lost += 1;
                    other.unpark();
                }
                break;
            }
            self.wake(0, round, other);
        }
    }

    fn wake(&self, role: usize, round: u64, thread: &Thread) {
        let now = u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.woken_ns[role].store(now, Ordering::Relaxed);
        self.rounds[role].store(round, Ordering::Release);
        thread.unpark();
    }

    /// Sleeps until woken for this round; returns false when that does not happen.
    fn sleep(&self, role: usize, round: u64) -> bool {
        let begin = Instant::now();
        let mut slept = Duration::ZERO;
        loop {
            if self.rounds[role].load(Ordering::Acquire) >= round {
                let woken = Duration::from_nanos(self.woken_ns[role].load(Ordering::Relaxed));
                return has_woken(slept, self.begun.elapsed().saturating_sub(woken));
            }
            if self.is_over.load(Ordering::Acquire) || begin.elapsed() >= SILENT {
                return false;
            }
            let parked = Instant::now();
            thread::park_timeout(LOOK);
            slept = parked.elapsed();
        }
    }
}

/// Returns whether a wake-up that was sent so long ago is what ended a sleep.
fn has_woken(slept: Duration, sent_before: Duration) -> bool {
    slept < LOOK || sent_before < LOST
}

/// Registers this process for [`Calls`], and returns whether the kernel has them.
pub fn can_call() -> bool {
    let command = MembarrierCommand::RegisterPrivateExpedited;
    membarrier_query().contains_command(command) && membarrier(command).is_ok()
}

/// Interrupts each CPU on which a thread of this process runs, and waits until all have answered:
/// their accesses before it are complete. Returns whether the kernel did so.
pub fn call() -> bool {
    membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

/// One CPU that interrupts another, which computes (by membarrier): the kernel sends an interrupt
/// to each CPU on which a thread of the process runs, and waits until all have answered.
#[derive(Debug, Default)]
pub struct Calls {
    is_over: AtomicBool,
}

impl Calls {
    /// Calls as thread 0, or is interrupted as thread 1, until the deadline. Returns the ticks of
    /// each call.
    pub fn run(&self, role: usize, deadline: &Deadline) -> Vec<u64> {
        let mut ticks = Vec::new();
        if role == 1 {
            // The kernel must find this thread running, so it does not yield.
            while !self.is_over.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            return ticks;
        }
        for _ in 0..ROUNDS_MAX {
            let begin = Deadline::after(0);
            if !call() {
                break;
            }
            ticks.push(begin.elapsed());
            if deadline.is_over() {
                break;
            }
        }
        self.is_over.store(true, Ordering::Release);
        ticks
    }
}

/// Interrupts between CPUs that the kernel has counted: to wake, and to call a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counted {
    reschedule: u64,
    call: u64,
}

impl Counted {
    /// Reads what the kernel has counted on all CPUs; zeroes where it does not say.
    pub fn now() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/interrupts").unwrap_or_default())
    }

    /// Returns how many came since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            reschedule: self.reschedule.saturating_sub(before.reschedule),
            call: self.call.saturating_sub(before.call),
        }
    }

    fn parse(text: &str) -> Self {
        let sum = |name: &str| {
            let line = text.lines().find_map(|l| l.trim_start().strip_prefix(name));
            let words = line.into_iter().flat_map(str::split_whitespace);
            words.map_while(|word| word.parse::<u64>().ok()).sum()
        };
        Self {
            reschedule: sum("RES:"),
            call: sum("CAL:"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_of_all_cpus_are_counted() {
        let text = "       CPU0  CPU1\n  0:  5  0 IO-APIC timer\nRES:  10  32   Rescheduling interrupts\n\
            CAL: 1 2 Function call interrupts\n";
        let counted = Counted::parse(text);
        assert_eq!((counted.reschedule, counted.call), (42, 3));
        assert_eq!(counted.since(counted), Counted::default());
        assert_eq!(Counted::parse(""), Counted::default());
    }

    #[test]
    fn a_wake_up_that_never_came_ends_the_wait() {
        let wakes = Wakes::default();
        wakes.rounds[1].store(3, Ordering::Release);
        assert!(wakes.sleep(1, 3));
        wakes.is_over.store(true, Ordering::Release);
        assert!(!wakes.sleep(1, 4));
    }

    #[test]
    fn a_wake_up_is_lost_if_the_sleeper_ran_long_after_it_and_only_to_look() {
        let moment = Duration::from_millis(1);
        // Before the thread slept, and after a wait for the other CPU of any length.
        assert!(has_woken(Duration::ZERO, SILENT));
        assert!(has_woken(LOOK - moment, LOOK));
        // The sleeper looked, and the answer had just come.
        assert!(has_woken(LOOK, LOST - moment));
        assert!(!has_woken(LOOK, LOST));
        assert!(!has_woken(LOOK, LOOK - moment));
    }
}
