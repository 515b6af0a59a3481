//! The end of a run: who is waited for, and for how long.

use std::time::{Duration, Instant};

use super::control::Control;
use super::vcpu::Shared;

/// How long ending a run waits for the threads of vCPUs and devices. One that waits for a remote page
/// cannot go on before the page comes; it is left behind after this time.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(2);

/// How long ending a run waits for a device that is in a call of the host, such as a flush of a disk:
/// that call ends, and with it the last that is wanted of the guest's memory. Storage that takes longer
/// has failed.
pub const DISK_TIME_MAX: Duration = Duration::from_secs(30);

/// How often the devices are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Who is left behind at the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nobody,
    /// It waits for a page, or for the pager.
    Waiting,
    /// It is in a call of the host.
    AtWork,
}

/// Waits for all threads that touch guest memory, and tells whom it leaves behind.
pub(super) fn wait_for_threads(shared: &Shared) {
    let at_work = || shared.devices_at_work();
    let told = || {
        tracing::warn!(
            "{} of the guest is still at work, on what the guest had asked it for; it is waited for, up to {}s",
            shared.name_at_work(),
            DISK_TIME_MAX.as_secs()
        );
    };
    match wait(
        &shared.control,
        [STOP_TIME_MAX, DISK_TIME_MAX],
        at_work,
        told,
    ) {
        Left::Nobody => {}
        Left::Waiting => tracing::warn!(
            "a vCPU or a device waits for a page for more than {STOP_TIME_MAX:?}; its thread is left behind"
        ),
        Left::AtWork => tracing::warn!(
            "{} of the guest has not come to an end within {}s: storage of this host does not answer; its \
             thread is left behind",
            shared.name_at_work(),
            DISK_TIME_MAX.as_secs()
        ),
    }
}

/// Waits until all have ended, `idle` after the last look at which a device was `at_work`, and
/// `most` in all. Calls `told` when it takes longer than `idle` because of such a device.
fn wait(
    control: &Control,
    [idle, most]: [Duration; 2],
    at_work: impl Fn() -> bool,
    told: impl FnOnce(),
) -> Left {
    let begun = Instant::now();
    let mut last_at_work = begun;
    let mut told = Some(told);
    loop {
        let left = (last_at_work + idle).saturating_duration_since(Instant::now());
        if control.wait_all_ended(left.min(LOOK_INTERVAL)) {
            return Left::Nobody;
        }
        let now = Instant::now();
        if at_work() {
            last_at_work = now;
            if now - begun >= most {
                return Left::AtWork;
            }
            if now - begun >= idle
                && let Some(told) = told.take()
            {
                told();
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

    /// Of the tests' limits, which must not be what ends them.
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(120);

    /// With a thread of a device that does not end.
    fn control() -> Control {
        let control = Control::new(0).unwrap();
        control.device_thread_starts();
        control
    }

    #[test]
    fn who_has_ended_is_not_waited_for() {
        let control = control();
        control.device_thread_ended();
        assert_eq!(wait(&control, [LONG, LONG], || true, || {}), Left::Nobody);
    }

    #[test]
    fn who_waits_for_a_page_is_left_behind_after_a_short_time() {
        let begun = Instant::now();
        let told = || panic!("no disk is at work");
        assert_eq!(
            wait(&control(), [SHORT, LONG], || false, told),
            Left::Waiting
        );
        assert!((SHORT..LONG).contains(&begun.elapsed()));
    }

    #[test]
    fn a_disk_at_work_is_waited_for_until_it_has_ended() {
        let control = control();
        let looks = Cell::new(0);
        let begun = Instant::now();
        let at_work = || {
            looks.set(looks.get() + 1);
            // Long after others are left behind; once it is between two calls.
            if begun.elapsed() >= SHORT * 4 {
                control.device_thread_ended();
            }
            looks.get() != 3
        };
        let times_told = Cell::new(0);
        let told = || times_told.set(times_told.get() + 1);
        assert_eq!(wait(&control, [SHORT, LONG], at_work, told), Left::Nobody);
        assert!(begun.elapsed() >= SHORT * 4);
        assert_eq!(times_told.get(), 1);
    }

    #[test]
    fn a_disk_that_does_not_come_to_an_end_is_left_behind() {
        let begun = Instant::now();
        let left = wait(&control(), [SHORT, SHORT * 3], || true, || {});
        assert_eq!(left, Left::AtWork);
        assert!((SHORT * 3..LONG).contains(&begun.elapsed()));
    }
}
