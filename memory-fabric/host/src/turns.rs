//! How long a thread goes on when others want its processor.

use std::io;

/// The shortest turn that Linux grants, nanoseconds.
const TURN_NS: u64 = 100_000;

/// Asks the scheduler for short turns for the calling thread. It then runs soon after it is woken,
/// before threads with longer turns, and as often makes place for them: its share of the
/// processor stays what it is. For threads that do little at a time and for which somebody waits.
///
/// Needs no privilege. Linux before 6.12 takes no notice, and threads with a real-time policy are
/// left alone. Threads that the caller makes have short turns as well.
pub fn take_short_turns() {
    // What it is good for can do without.
    if let Err(error) = set_turn(TURN_NS) {
        tracing::debug!(%error, "the scheduler grants no short turns");
    }
}

fn set_turn(nanoseconds: u64) -> io::Result<()> {
    let mut attributes = attributes()?;
    let policy = i32::try_from(attributes.sched_policy);
    if policy != Ok(libc::SCHED_OTHER) && policy != Ok(libc::SCHED_BATCH) {
        return Ok(());
    }
    attributes.sched_runtime = nanoseconds;
    // SAFETY: thread 0 is the calling one; the structure has the size it says and outlives the call.
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
    fn a_turn_is_short_and_nothing_else_changes() {
        let thread = std::thread::spawn(|| {
            let before = attributes().expect("Linux");
            set_turn(TURN_NS).expect("granted");
            (before, attributes().expect("Linux"))
        });
        let (before, after) = thread.join().expect("no panic");
        assert_eq!(after.sched_policy, before.sched_policy);
        assert_eq!(after.sched_nice, before.sched_nice);
        // 0 where the kernel does not know of turns.
        assert!([0, TURN_NS].contains(&after.sched_runtime));
        assert_eq!(after.sched_runtime == 0, before.sched_runtime == 0);
    }
}
