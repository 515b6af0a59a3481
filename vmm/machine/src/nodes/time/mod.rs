//! The time of the vCPUs on a node that is not the primary: their counters show what those on the
//! primary show, although the counters of the hosts drift apart.
//!
//! The offset of all vCPUs of the node changes at once: two of them exchange messages faster than
//! any bound of a network, and see each other's time. So all leave the guest first, none enters it
//! before the change is made, and after a step back none enters before its duration has passed: what
//! the guest reads on this node never decreases. A vCPU that waits for a page in KVM_RUN is not
//! waited for: it has a signal, and leaves before it enters the guest again.

mod counter;
mod estimate;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::thread::{MembarrierCommand, membarrier};

use super::compare::ClockSample;
use crate::error::MachineError;
use crate::lifecycle::kick::Kick;
pub use counter::{HostCounter, OtherRate, WhileStopped};
pub use estimate::Estimate;
pub(super) use estimate::Estimator;

/// The longest step back at once, while which no vCPU of the node runs.
const STEP_BACK_MAX: Duration = Duration::from_micros(100);
/// Time between two steps.
const STEP_INTERVAL: Duration = Duration::from_millis(5);
/// A counter that is further away than this has not drifted: the host was suspended, or its counter
/// is not invariant.
const DEVIATION_MAX: Duration = Duration::from_secs(1);

/// What the vCPUs of a node add to their offsets.
#[derive(Debug)]
pub(crate) struct NodeTime {
    counter: HostCounter,
    /// No vCPU may enter the guest. Sequentially consistent: stored before a kick, and loaded by the
    /// thread of a vCPU after it has cleared that.
    is_closed: AtomicBool,
    /// What to add to this host's counter to get that of the primary's host. Stored only while closed.
    difference: AtomicU64,
}

impl NodeTime {
    /// The time of the primary, which never changes.
    pub fn of_primary() -> Self {
        Self {
            counter: HostCounter::default(),
            is_closed: AtomicBool::new(false),
            difference: AtomicU64::new(0),
        }
    }

    /// The time of another node. No vCPU runs before the first comparison with the primary.
    ///
    /// # Errors
    ///
    /// When the kernel cannot interrupt all CPUs that run this process.
    pub fn of_node(counter: HostCounter, difference: u64) -> Result<Self, MachineError> {
        membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .map_err(io::Error::from)
            .map_err(failed)?;
        Ok(Self {
            counter,
            is_closed: AtomicBool::new(true),
            difference: AtomicU64::new(difference),
        })
    }

    /// This host's counter.
    pub fn counter(&self) -> &HostCounter {
        &self.counter
    }

    /// What a vCPU adds to its offset before it enters the guest. `None` while that changes: the vCPU
    /// waits for a kick. Its thread has cleared earlier kicks before it calls.
    pub fn difference(&self) -> Option<u64> {
        if self.is_closed.load(Ordering::SeqCst) {
            return None;
        }
        Some(self.newest())
    }

    /// The difference that was set last.
    pub fn newest(&self) -> u64 {
        let difference = self.difference.load(Ordering::SeqCst);
        difference.wrapping_add(self.counter.drift())
    }

    /// Sets the difference for the first time.
    fn begin(&self, difference: u64, kicks: &[Arc<Kick>]) {
        self.difference.store(difference, Ordering::SeqCst);
        self.open(kicks);
    }

    fn open(&self, kicks: &[Arc<Kick>]) {
        self.is_closed.store(false, Ordering::SeqCst);
        kicks.iter().for_each(|kick| kick.kick());
    }

    /// Changes the difference by `step`.
    fn step(&self, step: i64, kicks: &[Arc<Kick>]) -> Result<(), MachineError> {
        self.change(step, kicks, || {
            let difference = self.difference.load(Ordering::SeqCst);
            let difference = difference.wrapping_add_signed(step);
            self.difference.store(difference, Ordering::SeqCst);
        })
    }

    /// Makes a change that moves the counters of all vCPUs by `step`, while they are out of the guest.
    fn change(
        &self,
        step: i64,
        kicks: &[Arc<Kick>],
        change: impl FnOnce(),
    ) -> Result<(), MachineError> {
        self.is_closed.store(true, Ordering::SeqCst);
        kicks.iter().for_each(|kick| kick.kick());
        // Each thread that was in KVM_RUN has a signal now. This interrupts each CPU that runs a thread
        // of this process, and returns when all have taken that: those in the guest have left it,
        // and KVM looks for signals before it enters again.
        let left = membarrier(MembarrierCommand::PrivateExpedited);
        if left.is_ok() {
            self.counter.stopped();
            let back = step.min(0).unsigned_abs();
            let since = self.counter.now();
            while self.counter.now().wrapping_sub(since) < back {
                std::hint::spin_loop();
            }
            change();
        }
        self.open(kicks);
        left.map_err(io::Error::from).map_err(failed)
    }
}

fn failed(source: io::Error) -> MachineError {
    MachineError::host("interrupt all CPUs that run vCPUs (membarrier)")(source)
}

/// What is known of a node's time, for display.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TimeFacts {
    /// What is added to the counter of this host to get the primary's, in nanoseconds, as estimated.
    pub offset_ns: Option<i64>,
    /// How far the vCPUs' counters may be from the primary's.
    pub error_max: Option<Duration>,
    /// How much faster the primary's counter is, in millionths, and by how much that may be wrong.
    pub rate_ppm: Option<(f64, f64)>,
    /// Whether KVM scales this host's counter.
    pub scales: bool,
    /// How often they were corrected.
    pub corrections: u64,
    /// The sum of the corrections, in nanoseconds.
    pub corrected_ns: i64,
}

/// What to do about a deviation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// Nothing for so many ticks.
    Wait(u64),
    /// Add this to the difference.
    Step(i64),
    /// It is this far away, which is no drift.
    TooFar(i64),
}

/// Limits in ticks.
#[derive(Clone, Copy, Debug)]
struct Limits {
    step_back: u64,
    deviation: u64,
}

/// Plans the correction of a difference that is `is_set`. `rate_max` is the fastest change, in ticks
/// per 2^32.
///
/// The exact difference is in the middle of a round trip if the delays both ways are equal, and in the
/// worst case away from it by half of the difference of the shortest delays. So a message of the
/// shortest delay still arrives after it was sent when the set difference is away from the middle by
/// up to half of the shortest round trip. A quarter of that is used, and a step is made at an eighth,
/// so that steps are rare; the rest is for what the rate is not known.
fn plan(estimate: Estimate, is_set: u64, rate_max: u64, limits: Limits) -> Plan {
    let deviation = estimate.difference.wrapping_sub(is_set).cast_signed();
    let away = deviation.unsigned_abs();
    if away > limits.deviation.saturating_add(estimate.error_max) {
        return Plan::TooFar(deviation);
    }
    if away <= estimate.least / 8 {
        let left = u128::from(estimate.least / 4 - away) << 32;
        let ticks = left / u128::from(rate_max.max(1));
        return Plan::Wait(u64::try_from(ticks).unwrap_or(u64::MAX));
    }
    let back_max = limits.step_back.min(1 << 62).cast_signed();
    Plan::Step(deviation.max(-back_max))
}

/// Keeps the time of a node.
#[derive(Debug)]
pub(super) struct Correction {
    time: Arc<NodeTime>,
    kicks: Vec<Arc<Kick>>,
    /// Ticks per millisecond.
    khz: u32,
    estimator: Estimator,
    has_begun: bool,
    corrections: u64,
    /// Their sum in ticks.
    corrected: i64,
}

impl Correction {
    pub fn new(time: Arc<NodeTime>, khz: u32, kicks: &[Arc<Kick>]) -> Self {
        Self {
            time,
            kicks: kicks.to_vec(),
            khz,
            estimator: Estimator::default(),
            has_begun: false,
            corrections: 0,
            corrected: 0,
        }
    }

    /// This host's counter.
    pub fn counter(&self) -> HostCounter {
        self.time.counter().clone()
    }

    fn ticks(&self, time: Duration) -> u64 {
        let ticks = time.as_nanos() * u128::from(self.khz) / 1_000_000;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    fn time(&self, ticks: u64) -> Duration {
        let nanos = u128::from(ticks) * 1_000_000 / u128::from(self.khz.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Takes a comparison with the primary's clock. Returns whether it contradicts earlier ones.
    pub fn compared(&mut self, sample: &ClockSample) -> bool {
        self.estimator.add(sample)
    }

    /// Corrects the time if that is necessary. Returns when to call again.
    ///
    /// # Errors
    ///
    /// When it cannot be corrected.
    pub fn correct(&mut self) -> Result<Duration, MachineError> {
        let wait = self.correct_once()?;
        let counter = self.time.counter();
        let Some(step) = counter.next_drift().filter(|_| self.has_begun) else {
            return Ok(wait);
        };
        let add = || counter.add_drift(step);
        self.time.change(step, &self.kicks, add)?;
        Ok(wait.min(STEP_INTERVAL))
    }

    fn correct_once(&mut self) -> Result<Duration, MachineError> {
        let Some(estimate) = self.estimator.at(self.time.counter().now()) else {
            return Ok(Duration::MAX);
        };
        if !self.has_begun {
            self.has_begun = true;
            self.time.begin(estimate.difference, &self.kicks);
        }
        let limits = Limits {
            step_back: self.ticks(STEP_BACK_MAX),
            deviation: self.ticks(DEVIATION_MAX),
        };
        let is_set = self.time.difference.load(Ordering::SeqCst);
        match plan(estimate, is_set, self.estimator.rate_max(), limits) {
            Plan::Wait(ticks) => Ok(self.time(ticks).max(STEP_INTERVAL)),
            Plan::Step(step) => {
                self.time.step(step, &self.kicks)?;
                self.corrections += 1;
                self.corrected = self.corrected.saturating_add(step);
                Ok(STEP_INTERVAL)
            }
            Plan::TooFar(deviation) => {
                let by = self.time(deviation.unsigned_abs());
                let reason = format!(
                    "the time stamp counter of this host is {by:?} {} what it was relative to the \
                     primary's, {DEVIATION_MAX:?} is the most that is corrected: use hosts with \
                     invariant counters, and do not suspend them",
                    if deviation > 0 { "behind" } else { "ahead of" },
                );
                Err(MachineError::Nodes { reason })
            }
        }
    }

    fn nanos(&self, ticks: i64) -> i64 {
        let nanos = i128::from(ticks) * 1_000_000 / i128::from(self.khz.max(1));
        i64::try_from(nanos).unwrap_or(if nanos < 0 { i64::MIN } else { i64::MAX })
    }

    pub fn facts(&self) -> TimeFacts {
        let counter = self.time.counter();
        let estimate = self.estimator.at(counter.now());
        let error = estimate.map(|estimate| {
            let is_set = self.time.difference.load(Ordering::SeqCst);
            let deviation = estimate.difference.wrapping_sub(is_set).cast_signed();
            estimate.error_max.saturating_add(deviation.unsigned_abs())
        });
        TimeFacts {
            offset_ns: estimate.map(|found| self.nanos(found.difference.cast_signed())),
            error_max: error.map(|ticks| self.time(ticks)),
            rate_ppm: self.estimator.rate_ppm(),
            scales: counter.scales(),
            corrections: self.corrections,
            corrected_ns: self.nanos(self.corrected),
        }
    }
}

#[cfg(test)]
mod tests;
