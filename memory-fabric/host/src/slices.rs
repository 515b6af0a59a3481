//! What the scheduler gives to threads: time slices, and time.

use std::io;
use std::time::Duration;

/// The shortest slice that Linux grants, nanoseconds.
const SLICE_NS: u64 = 100_000;

/// Requests short scheduler slices for the calling thread: it runs soon after a wake-up, ahead of
/// threads with longer slices, and is preempted as soon; its share of the CPU is unchanged. For
/// threads that do little work at a time while another thread waits for the result.
///
/// Needs no privilege. Linux before 6.12 ignores the request, and threads with a real-time policy
/// keep their setting. Child threads inherit it.
pub fn request_short_slices() {
    // Best effort: only latency depends on it.
    if let Err(error) = set_slice(SLICE_NS) {
        tracing::debug!(%error, "the scheduler grants no short slices");
    }
}

fn set_slice(nanoseconds: u64) -> io::Result<()> {
    let mut attributes = attributes()?;
    let policy = i32::try_from(attributes.sched_policy);
    if policy != Ok(libc::SCHED_OTHER) && policy != Ok(libc::SCHED_BATCH) {
        return Ok(());
    }
    attributes.sched_runtime = nanoseconds;
    // SAFETY: thread 0 is the calling one; the structure has the size it says and outlives the
    // call.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn attributes() -> io::Result<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>();
    // SAFETY: all its fields are numbers, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: as above; the kernel writes no more than `size`.
    match unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) } {
        0 => Ok(attributes),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The processor time of a thread of this process, in its guest or not; `None` if there is no such
/// thread.
#[must_use]
pub fn thread_time(id: u32) -> Option<Duration> {
    // The clock of a thread, as `include/linux/posix-timers_types.h` makes it: CPUCLOCK_PERTHREAD_MASK
    // and CPUCLOCK_SCHED.
    let clock = !i32::try_from(id)
        .ok()
        .filter(|id| *id > 0 && *id < 1 << 28)?
        << 3
        | 4
        | 2;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes the structure, which outlives the call, and refuses a wrong clock.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let nanoseconds = u32::try_from(time.tv_nsec).ok()?;
    (result == 0).then(|| Duration::new(seconds, nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_thread_grows_while_it_runs() {
        let id = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).expect("positive");
        let before = thread_time(id).expect("this thread");
        let started = std::time::Instant::now();
        while thread_time(id).expect("this thread") < before + Duration::from_millis(2) {
            assert!(started.elapsed() < Duration::from_secs(20));
        }
        assert!(started.elapsed() >= Duration::from_millis(1));
        assert_eq!(thread_time(0), None);
        assert_eq!(thread_time(u32::MAX), None);
    }

    #[test]
    fn a_slice_is_short_and_nothing_else_changes() {
        let thread = std::thread::spawn(|| {
            let before = attributes().expect("Linux");
            set_slice(SLICE_NS).expect("granted");
            (before, attributes().expect("Linux"))
        });
        let (before, after) = thread.join().expect("no panic");
        assert_eq!(after.sched_policy, before.sched_policy);
        assert_eq!(after.sched_nice, before.sched_nice);
        let policy = i32::try_from(before.sched_policy);
        if policy != Ok(libc::SCHED_OTHER) && policy != Ok(libc::SCHED_BATCH) {
            // As when the tests run at idle priority.
            assert_eq!(after.sched_runtime, before.sched_runtime);
            return;
        }
        // 0 where the kernel ignores slices.
        assert!([0, SLICE_NS].contains(&after.sched_runtime));
        assert_eq!(after.sched_runtime == 0, before.sched_runtime == 0);
    }
}
