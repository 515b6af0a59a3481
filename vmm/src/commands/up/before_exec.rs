//! What a child process does between fork and exec, where only system calls are safe, and the
//! network namespaces that it can enter.
//!
//! The memory of the child is a copy, in which other threads may have held locks. So no function
//! here allocates after the fork, or calls anything except the system.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Makes the kernel send SIGTERM to the process when this thread ends.
pub fn end_with_this_thread(command: &mut Command) {
    let parent = getpid();
    let request = move || {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        // The parent may have ended before the request.
        if getppid() != Some(parent) {
            return Err(Errno::SRCH.into());
        }
        Ok(())
    };
    // SAFETY: the closure makes two system calls.
    unsafe { command.pre_exec(request) };
}

/// Makes the next process inherit one end of a pipe, and returns its descriptor. The pipe must be
/// open until the process has started: otherwise that fails.
pub fn inherit(command: &mut Command, pipe: &impl AsRawFd) -> RawFd {
    let fd = pipe.as_raw_fd();
    let keep = move || {
        // SAFETY: the child's copy of the descriptor belongs to nothing else there: the owner is in
        // the memory of the parent.
        let pipe = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(fcntl_setfd(pipe, FdFlags::empty())?)
    };
    // SAFETY: the closure makes one system call.
    unsafe { command.pre_exec(keep) };
    fd
}

/// Makes the process start in a network namespace.
pub fn enter_network(command: &mut Command, namespace: File) {
    let enter = move || {
        let network = Some(LinkNameSpaceType::Network);
        Ok(move_into_link_name_space(namespace.as_fd(), network)?)
    };
    // SAFETY: the closure makes one system call.
    unsafe { command.pre_exec(enter) };
}

/// Moves the calling thread, and the processes that it starts, into a new network namespace.
///
/// # Errors
///
/// Fails without the permission.
pub fn new_network() -> io::Result<()> {
    // SAFETY: of the flags, only the one that separates descriptors has requirements.
    Ok(unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?)
}
