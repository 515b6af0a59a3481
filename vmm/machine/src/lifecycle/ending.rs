//! The end of a run: which threads it waits for, and for how long.

use std::time::{Duration, Instant};

use super::control::Control;
use crate::lifecycle::shared::Shared;

/// How long ending a run waits for the threads of vCPUs and devices. One that waits for a remote page
/// cannot go on before the page comes; it is left behind after this time.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(2);

/// How long ending a run waits for a device that is in a call of the host, such as a flush of a disk:
/// that call ends, and with it the last that is wanted of the guest's memory. Storage that takes longer
/// has failed.
pub const DISK_TIME_MAX: Duration = Duration::from_secs(30);

/// How often the devices are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The threads that are waited for, and the time that passes meanwhile.
trait Threads {
    fn now(&self) -> Instant;

    /// Waits up to `time` until all have ended; whether they have.
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

/// Which threads are left behind at the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// All threads have ended.
    None,
    /// It waits for a page, or for the pager.
    Waiting,
    /// It is in a call of the host.
    AtWork,
}

/// Waits for all threads that touch guest memory, and logs which of them it leaves behind.
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

/// Waits until all have ended, `idle` after the last look at which a device was `at_work`, and
/// `limit` in all. Calls `warn` when it takes longer than `idle` because of such a device.
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

    /// Threads of a time of its own, which passes only while they are waited for.
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
            // Long after others are left behind.
            threads.ended.set(threads.passed.get() >= end);
            // Now and then it is between two calls.
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
