//! System calls of classes of threads: fewer than those of the process.
//!
//! Each list has what the code of the class calls, what the kernel's audit log showed to be missing in
//! the tests of `ssi-hv`, and what the C library and the standard library may use instead of a call
//! that was seen. None of the classes opens files, or makes connections beyond those of the
//! guest's sockets.

use fabric_host::ThreadClass;
use seccompiler::apply_filter;

use crate::calls::program;

/// Memory of the process, locks, time, signals, a log line, and the end: what any thread does.
const COMMON: &[libc::c_long] = calls! {
    SYS_arch_prctl SYS_brk SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_close SYS_exit
    SYS_exit_group SYS_fcntl SYS_futex SYS_get_robust_list SYS_getcpu SYS_getpid SYS_getrandom
    SYS_gettid SYS_gettimeofday SYS_madvise SYS_membarrier SYS_mmap SYS_mprotect SYS_mremap
    SYS_munmap SYS_nanosleep SYS_poll SYS_ppoll SYS_prctl SYS_read SYS_restart_syscall SYS_rseq
    SYS_rt_sigaction SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigtimedwait
    SYS_sched_getaffinity SYS_sched_yield SYS_set_robust_list SYS_sigaltstack SYS_tgkill SYS_time
    SYS_write SYS_writev
};

/// Of connections that exist.
const CONNECTED: &[libc::c_long] = calls! {
    SYS_getpeername SYS_getsockname SYS_getsockopt SYS_readv SYS_recvfrom SYS_recvmmsg SYS_recvmsg
    SYS_sendmmsg SYS_sendmsg SYS_sendto SYS_setsockopt SYS_shutdown
};

/// Of event loops and their timers.
const EVENTS: &[libc::c_long] = calls! {
    SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_epoll_wait SYS_eventfd2
    SYS_timerfd_create SYS_timerfd_gettime SYS_timerfd_settime
};

/// KVM by `ioctl`, timers of halted vCPUs, and threads for vCPUs that come from other nodes.
const VCPU: &[libc::c_long] = calls! {
    SYS_clone SYS_clone3 SYS_ioctl SYS_sched_setaffinity SYS_timer_create SYS_timer_delete
    SYS_timer_getoverrun SYS_timer_gettime SYS_timer_settime
};

/// userfaultfd and RDMA by `ioctl`, guest memory, and scheduling.
const PAGER: &[libc::c_long] = calls! {
    SYS_clone SYS_clone3 SYS_fallocate SYS_getpriority SYS_ioctl SYS_mincore SYS_mlock SYS_mlock2
    SYS_move_pages SYS_munlock SYS_pread64 SYS_process_madvise SYS_pwrite64 SYS_sched_getattr SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_setaffinity SYS_sched_setattr SYS_sched_setparam
    SYS_sched_setscheduler SYS_setpriority
};

/// Disks, taps by `ioctl`, memory that is added or given back, and sockets of host programs.
const DEVICE: &[libc::c_long] = calls! {
    SYS_accept4 SYS_clone SYS_clone3 SYS_connect SYS_fallocate SYS_fdatasync SYS_fstat SYS_fsync
    SYS_ioctl SYS_lseek SYS_mbind SYS_mincore SYS_pread64 SYS_preadv SYS_process_madvise
    SYS_pwrite64 SYS_pwritev SYS_socket SYS_statx
};

fn lists(class: ThreadClass) -> [&'static [libc::c_long]; 4] {
    let own = match class {
        ThreadClass::Vcpu => VCPU,
        ThreadClass::Pager => PAGER,
        ThreadClass::Device => DEVICE,
    };
    [COMMON, CONNECTED, EVENTS, own]
}

/// Restricts this thread, and those that it starts, to the calls of its class. The filter of the process
/// holds as well.
///
/// # Panics
/// When the kernel refuses: a thread that is not restricted must not run.
pub(crate) fn restrict(class: ThreadClass) {
    let allowed = lists(class).into_iter().flatten().copied();
    let applied = program(allowed)
        .map_err(|error| error.to_string())
        .and_then(|program| apply_filter(&program).map_err(|error| error.to_string()));
    if let Err(error) = applied {
        panic!("the kernel refuses the filter of system calls of a {class:?} thread: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::calls::ALLOWED;

    #[test]
    fn a_class_has_fewer_calls_than_the_process_and_each_once() {
        let process: HashSet<_> = ALLOWED.iter().collect();
        for class in [ThreadClass::Vcpu, ThreadClass::Pager, ThreadClass::Device] {
            let listed: Vec<_> = lists(class).into_iter().flatten().collect();
            let of_class: HashSet<_> = listed.iter().copied().collect();
            assert_eq!(of_class.len(), listed.len(), "{class:?} has a call twice");
            assert!(of_class.is_subset(&process), "{class:?}");
            for forbidden in [
                libc::SYS_openat,
                libc::SYS_kill,
                libc::SYS_bind,
                libc::SYS_seccomp,
            ] {
                assert!(!of_class.contains(&forbidden), "{class:?} has {forbidden}");
            }
        }
        assert!(
            !lists(ThreadClass::Vcpu)
                .concat()
                .contains(&libc::SYS_socket)
        );
        assert!(
            !lists(ThreadClass::Pager)
                .concat()
                .contains(&libc::SYS_connect)
        );
    }
}
