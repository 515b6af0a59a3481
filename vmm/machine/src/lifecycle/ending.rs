//! The end of a run: waits for threads, within limits.

use std::time::{Duration, Instant};

use super::control::Control;
use crate::lifecycle::shared::Shared;

/// How long the end of a run waits for the threads of vCPUs and devices. A thread that waits for a
/// remote page cannot continue until the page arrives; it is left behind after this time.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(2);

/// How long the end of a run waits for a device in a system call, such as the flush of a disk: the
/// call needs guest memory until it returns. Storage that takes longer is considered failed.
pub const DISK_TIME_MAX: Duration = Duration::from_secs(30);

/// Interval between checks of the devices.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The threads to wait for, and the time that passes meanwhile.
trait Threads {
    fn now(&self) -> Instant;

    /// Waits up to `time` until all threads have ended; returns whether they have.
    fn all_ended_within(&self, time: Duration) -> bool;
}

impl Threads for Control {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn all_ended_within(&self, time: Duration) -> bool {
        self.wait_all_ended(time)
    }
}

/// The threads that are left behind at the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// All threads have ended.
    None,
    /// A thread waits for a page, or for the pager.
    Waiting,
    /// A device is in a system call.
    AtWork,
}

/// Waits for all threads that access guest memory, and logs which of them it leaves behind.
pub(crate) fn wait_for_threads(shared: &Shared) {
    let at_work = || shared.devices_at_work();
    let warn = || {
        tracing::warn!(
            "{} of the guest still carries out requests; the end of the run waits for them, up to {} s",
            shared.name_at_work(),
            DISK_TIME_MAX.as_secs()
        );
    };
    match wait(
        &shared.control,
        [STOP_TIME_MAX, DISK_TIME_MAX],
        at_work,
        warn,
    ) {
        Left::None => {}
        Left::Waiting => tracing::warn!(
            "a vCPU or a device has waited for a page for more than {STOP_TIME_MAX:?}; its thread is left behind"
        ),
        Left::AtWork => tracing::warn!(
            "{} of the guest has not ended within {} s: storage of this host does not answer; its \
             thread is left behind",
            shared.name_at_work(),
            DISK_TIME_MAX.as_secs()
        ),
    }
}

/// Waits until all threads have ended, for up to `idle` after the last check at which a device was
/// `at_work`, and up to `limit` in total. Calls `warn` when such a device makes the wait longer
/// than `idle`.
fn wait(
    threads: &impl Threads,
    [idle, limit]: [Duration; 2],
    at_work: impl Fn() -> bool,
    warn: impl FnOnce(),
) -> Left {
    let begun = threads.now();
    let mut last_at_work = begun;
    let mut warn = Some(warn);
    loop {
        let left = (last_at_work + idle).saturating_duration_since(threads.now());
        if threads.all_ended_within(left.min(LOOK_INTERVAL)) {
            return Left::None;
        }
        let now = threads.now();
        if at_work() {
            last_at_work = now;
            if now - begun >= limit {
                return Left::AtWork;
            }
            if now - begun >= idle
                && let Some(warn) = warn.take()
            {
                warn();
            }
        } else if now - last_at_work >= idle {
            return Left::Waiting;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const LIMITS: [Duration; 2] = [STOP_TIME_MAX, DISK_TIME_MAX];

    /// Threads with a simulated clock, which only advances during waits.
    struct Imagined {
        begun: Instant,
        passed: Cell<Duration>,
        ended: Cell<bool>,
    }

    impl Imagined {
        fn new() -> Self {
            Self {
                begun: Instant::now(),
                passed: Cell::default(),
                ended: Cell::new(false),
            }
        }
    }

    impl Threads for Imagined {
        fn now(&self) -> Instant {
            self.begun + self.passed.get()
        }

        fn all_ended_within(&self, time: Duration) -> bool {
            if !self.ended.get() {
                self.passed.set(self.passed.get() + time);
            }
            self.ended.get()
        }
    }

    #[test]
    fn no_time_passes_for_threads_that_have_ended() {
        let control = Control::new(0).unwrap();
        control.device_thread_starts();
        control.device_thread_ended();
        assert_eq!(wait(&control, LIMITS, || true, || {}), Left::None);
    }

    #[test]
    fn a_thread_that_waits_for_a_page_is_left_behind_after_a_short_time() {
        let threads = Imagined::new();
        let warn = || panic!("no disk is at work");
        assert_eq!(wait(&threads, LIMITS, || false, warn), Left::Waiting);
        assert_eq!(threads.passed.get(), STOP_TIME_MAX);
    }

    #[test]
    fn a_disk_at_work_is_waited_for_until_it_has_ended() {
        let threads = Imagined::new();
        let end = STOP_TIME_MAX * 4;
        let at_work = || {
            // Long after threads of vCPUs are left behind.
            threads.ended.set(threads.passed.get() >= end);
            // The device is between two calls from time to time.
            !threads.passed.get().as_millis().is_multiple_of(150)
        };
        let warnings = Cell::new(0);
        let warn = || warnings.set(warnings.get() + 1);
        assert_eq!(wait(&threads, LIMITS, at_work, warn), Left::None);
        assert_eq!((threads.passed.get(), warnings.get()), (end, 1));
    }

    #[test]
    fn a_disk_that_does_not_come_to_an_end_is_left_behind() {
        let threads = Imagined::new();
        let left = wait(&threads, LIMITS, || true, || {});
        assert_eq!((left, threads.passed.get()), (Left::AtWork, DISK_TIME_MAX));
    }

    #[test]
    fn a_disk_that_has_stopped_working_is_left_behind_as_all_are() {
        let threads = Imagined::new();
        let at_work = || threads.passed.get() <= STOP_TIME_MAX / 2;
        assert_eq!(wait(&threads, LIMITS, at_work, || {}), Left::Waiting);
        assert_eq!(threads.passed.get(), STOP_TIME_MAX / 2 + STOP_TIME_MAX);
    }
}
