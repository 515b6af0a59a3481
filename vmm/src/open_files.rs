//! How many files this process may have open.

/// Lets this process have as many files open as it may: a node has three for each connection of a VM, and the usual
/// limit of 1024, which is kept low for programs that use select(2), would be all for some ninety VMs.
pub fn raise_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call writes to this one structure.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the call reads this one structure. Where it is refused, the limit stays what it was.
    let _ = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
}
