//! Scheduler time slices.

use std::io;

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

#[cfg(test)]
mod tests {
    use super::*;

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
        // 0 where the kernel ignores slices.
        assert!([0, SLICE_NS].contains(&after.sched_runtime));
        assert_eq!(after.sched_runtime == 0, before.sched_runtime == 0);
    }
}
