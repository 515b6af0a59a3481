//! Operations between fork and exec, where only a few calls are allowed.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{self, Signal};

/// Makes the kernel kill a child when the thread that started it ends for any reason.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = process::getpid();
    let hook = move || {
        process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the call.
        if process::getppid() != Some(parent) {
            return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; these are two system
    // calls, and nothing allocates or locks.
    unsafe { command.pre_exec(hook) };
}

/// Passes descriptors to a child: the first one as 3, the next one as 4, and so on.
///
/// # Panics
///
/// When one of them already has such a number here: it would be overwritten before it is copied.
pub(crate) fn pass_descriptors(command: &mut Command, descriptors: Vec<OwnedFd>) {
    use std::os::fd::AsRawFd as _;
    let end = 3 + descriptors.len();
    assert!(
        descriptors
            .iter()
            .all(|fd| usize::try_from(fd.as_raw_fd()).is_ok_and(|fd| fd >= end)),
        "descriptors {descriptors:?} are in the way"
    );
    let hook = move || {
        for (fd, wanted) in descriptors.iter().zip(3..) {
            // SAFETY: dup2 takes two integers and may be called between fork and exec. The child
            // has no other owner of the new descriptor: all of ours are closed by exec.
            if unsafe { libc::dup2(fd.as_raw_fd(), wanted) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; dup2 is one, and
    // nothing allocates or locks.
    unsafe { command.pre_exec(hook) };
}
