//! Limits of how much a device does per second.
//!
//! A bucket holds what may be done at once, fills at the rate of the limit up to what one second
//! brings, and is full at the start. A request may begin while one unit is in it, and is then taken
//! from it in full, so that one that is larger than the bucket is not refused: the bucket owes it,
//! and the next request waits until that is filled up again. Over any time of `t` seconds a device
//! therefore does at most `t + 1` times its rate, what may be done once beyond it, and one request
//! of each of its threads.
//!
//! A request that may not begin stays in its ring. A timer wakes the device's thread when it may,
//! so that no thread sleeps or polls for it, and other queues of the device are served meanwhile.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, io};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::lock;

/// A bucket counts in billionths, so that no part of a unit is lost however often it is filled.
const PER_UNIT: i128 = 1_000_000_000;

/// How much a device may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Bytes.
    pub bytes: Option<Rate>,
    /// Requests or packets.
    pub operations: Option<Rate>,
}

impl RateLimits {
    /// Returns whether nothing is limited.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A limit of one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// How much per second, at least 1.
    pub per_second: u64,
    /// What may be done once beyond that, after the start of the device.
    pub once: u64,
}

/// Tokens for one unit.
#[derive(Debug)]
struct Bucket {
    per_second: i128,
    /// What is left of what may be done once, which is taken first.
    once: i128,
    /// Below zero if more was taken than there was.
    level: i128,
    filled: Instant,
}

impl Bucket {
    fn new(rate: Rate, now: Instant) -> Self {
        let per_second = i128::from(rate.per_second.max(1));
        Self {
            per_second,
            once: i128::from(rate.once) * PER_UNIT,
            level: per_second * PER_UNIT,
            filled: now,
        }
    }

    /// Returns how long it has less than a unit; nothing if it has one.
    fn empty_for(&mut self, now: Instant) -> Option<Duration> {
        let elapsed = now.saturating_duration_since(self.filled);
        self.filled = self.filled.max(now);
        let elapsed = i128::try_from(elapsed.as_nanos()).unwrap_or(i128::MAX);
        let earned = elapsed.saturating_mul(self.per_second);
        let full = self.per_second * PER_UNIT;
        self.level = self.level.saturating_add(earned).min(full);
        if self.level >= PER_UNIT || self.once > 0 {
            return None;
        }
        let missing = PER_UNIT - self.level;
        // Up to a whole nanosecond: the timer must not expire too early.
        let wait = (missing + self.per_second - 1) / self.per_second;
        Some(Duration::from_nanos(
            u64::try_from(wait).unwrap_or(u64::MAX),
        ))
    }

    fn take(&mut self, amount: u64) {
        let amount = i128::from(amount) * PER_UNIT;
        let of_once = amount.min(self.once);
        self.once -= of_once;
        self.level = self.level.saturating_sub(amount - of_once);
    }
}

/// The shortest time of a timer: zero would stop it.
const AT_ONCE: Duration = Duration::from_nanos(1);

/// The buckets of one direction of a device.
#[derive(Debug)]
struct Lane {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

impl Lane {
    fn buckets(&mut self) -> impl Iterator<Item = &mut Bucket> {
        self.bytes.iter_mut().chain(self.operations.iter_mut())
    }
}

#[derive(Debug)]
struct State {
    lanes: Vec<Lane>,
    /// When the timer expires, or has expired without having been attended to.
    armed: Option<Instant>,
}

/// Limits the rate of a device with several directions, each by itself.
pub struct RateLimiter {
    device: String,
    limits: RateLimits,
    state: Mutex<State>,
    timer: OwnedFd,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    /// Relaxed: only for display.
    throttled: AtomicU64,
}

impl fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimiter")
            .field("device", &self.device)
            .field("limits", &self.limits)
            .field("state", &self.state)
            .field("throttled", &self.throttled)
            .finish_non_exhaustive()
    }
}

impl RateLimiter {
    /// Creates the limiter of the device with this name, with full buckets for each of `lanes`
    /// directions.
    ///
    /// # Errors
    ///
    /// Fails when the process is out of descriptors.
    pub fn new(device: &str, limits: RateLimits, lanes: usize) -> io::Result<Self> {
        Self::with_clock(device, limits, lanes, Box::new(Instant::now))
    }

    pub(super) fn with_clock(
        device: &str,
        limits: RateLimits,
        lanes: usize,
        clock: Box<dyn Fn() -> Instant + Send + Sync>,
    ) -> io::Result<Self> {
        let now = clock();
        let bucket = |rate: Option<Rate>| rate.map(|rate| Bucket::new(rate, now));
        let lane = |_| Lane {
            bytes: bucket(limits.bytes),
            operations: bucket(limits.operations),
        };
        Ok(Self {
            device: device.to_owned(),
            limits,
            state: Mutex::new(State {
                lanes: (0..lanes).map(lane).collect(),
                armed: None,
            }),
            timer: timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?,
            clock,
            throttled: AtomicU64::new(0),
        })
    }

    /// The name of its device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The limits of each direction.
    pub fn limits(&self) -> RateLimits {
        self.limits
    }

    /// How often a request that was there had to wait.
    pub fn throttled(&self) -> u64 {
        self.throttled.load(Ordering::Relaxed)
    }

    /// Becomes readable when requests that had to wait may begin.
    pub(super) fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// Whether a request of that direction, which is there, may begin now. If not, the timer will
    /// expire when it may.
    pub(super) fn may_begin(&self, lane: usize) -> bool {
        let now = (self.clock)();
        let mut state = lock(&self.state);
        let Some(lane) = state.lanes.get_mut(lane) else {
            return true;
        };
        let Some(wait) = lane.buckets().filter_map(|one| one.empty_for(now)).max() else {
            return true;
        };
        self.throttled.fetch_add(1, Ordering::Relaxed);
        let due = now + wait;
        match state.armed {
            // Setting it for later would lose that, and with it the turn of another direction.
            Some(armed) if armed <= now => self.arm(AT_ONCE),
            Some(armed) if armed <= due => {}
            _ => {
                state.armed = Some(due);
                self.arm(wait);
            }
        }
        false
    }

    /// The timer has expired: all directions are served now, and set it again for what is due later.
    pub(super) fn has_expired(&self) {
        lock(&self.state).armed = None;
    }

    /// Takes a request that has begun, with this many bytes.
    pub(super) fn take(&self, lane: usize, operations: u64, bytes: u64) {
        let now = (self.clock)();
        let mut state = lock(&self.state);
        let Some(lane) = state.lanes.get_mut(lane) else {
            return;
        };
        for (bucket, amount) in [(&mut lane.operations, operations), (&mut lane.bytes, bytes)] {
            if let Some(bucket) = bucket {
                // Filled up to now before, not after: an idle device saves no more than a second.
                let _ = bucket.empty_for(now);
                bucket.take(amount);
            }
        }
    }

    fn arm(&self, wait: Duration) {
        let value = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(wait.subsec_nanos()),
            },
        };
        // It is a timer of this process, and the time is not negative.
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value) {
            tracing::error!(%error, device = self.device, "a device that is throttled is not woken");
        }
    }
}

#[cfg(test)]
#[path = "rate_tests.rs"]
pub(super) mod tests;
