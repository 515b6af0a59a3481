//! System calls of classes of threads: fewer than those of the process.
//!
//! A class has a list of its own, which holds in addition to that of the process: of several filters
//! the most restrictive answer counts. The kernel logs what is missing on the list of a class
//! (`SECCOMP_RET_LOG`), and makes the call: a list ends the process only once no scenario and no test
//! shows a call that it lacks. Calls that are on both lists cost no more than with one filter, since
//! the kernel keeps one table of answers for all filters of a thread.

use fabric_host::ThreadClass;
use seccompiler::{SeccompAction, apply_filter};

use crate::calls::program;

/// What any thread does: memory of the process, locks, time, signals, log lines, its start and end.
const COMMON: &[libc::c_long] = calls! {
    SYS_arch_prctl SYS_brk SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_close SYS_exit
    SYS_exit_group SYS_fcntl SYS_futex SYS_get_robust_list SYS_getcpu SYS_getpid SYS_getrandom
    SYS_gettid SYS_gettimeofday SYS_madvise SYS_membarrier SYS_mmap SYS_mprotect SYS_mremap
    SYS_munmap SYS_nanosleep SYS_poll SYS_ppoll SYS_prctl SYS_read SYS_restart_syscall SYS_rseq
    SYS_rt_sigaction SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigtimedwait
    SYS_sched_getaffinity SYS_sched_yield SYS_set_robust_list SYS_sigaltstack SYS_tgkill SYS_time
    SYS_write SYS_writev
};

/// Connections that exist.
const CONNECTED: &[libc::c_long] = calls! {
    SYS_getpeername SYS_getsockname SYS_getsockopt SYS_readv SYS_recvfrom SYS_recvmmsg SYS_recvmsg
    SYS_sendmmsg SYS_sendmsg SYS_sendto SYS_setsockopt SYS_shutdown
};

/// Event loops and their timers.
const EVENTS: &[libc::c_long] = calls! {
    SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_epoll_wait SYS_eventfd2
    SYS_timerfd_create SYS_timerfd_gettime SYS_timerfd_settime
};

/// Threads that are started.
const THREADS: &[libc::c_long] = calls! { SYS_clone SYS_clone3 SYS_sched_setaffinity };

/// KVM by `ioctl`, the timers of halted vCPUs, and `pause`: a thread that used a lost page waits for
/// the end of the run.
const VCPU: &[libc::c_long] = calls! {
    SYS_ioctl SYS_pause SYS_timer_create SYS_timer_delete SYS_timer_getoverrun SYS_timer_gettime
    SYS_timer_settime
};

/// userfaultfd and RDMA by `ioctl`, guest memory, and scheduling.
const PAGER: &[libc::c_long] = calls! {
    SYS_fallocate SYS_getpriority SYS_ioctl SYS_mincore SYS_mlock SYS_mlock2 SYS_move_pages
    SYS_munlock SYS_pread64 SYS_process_madvise SYS_pwrite64 SYS_sched_getattr SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_setattr SYS_sched_setparam SYS_sched_setscheduler
    SYS_setpriority
};

/// Connections that are made, and what RDMA opens for them.
const LINK: &[libc::c_long] = calls! {
    SYS_access SYS_bind SYS_connect SYS_dup SYS_faccessat SYS_faccessat2 SYS_fstat SYS_getdents64
    SYS_getrlimit SYS_lseek SYS_lstat SYS_newfstatat SYS_open SYS_openat SYS_pipe2 SYS_prlimit64
    SYS_readlink SYS_readlinkat SYS_socket SYS_stat SYS_statx SYS_uname
};

/// Disks, taps by `ioctl`, memory that is added, and sockets of host programs.
const DEVICE: &[libc::c_long] = calls! {
    SYS_accept4 SYS_connect SYS_fallocate SYS_fdatasync SYS_fstat SYS_fsync SYS_ftruncate SYS_ioctl
    SYS_lseek SYS_mbind SYS_mincore SYS_pause SYS_pread64 SYS_preadv SYS_preadv2 SYS_process_madvise
    SYS_pwrite64 SYS_pwritev SYS_pwritev2 SYS_socket SYS_statx SYS_sync_file_range
};

fn lists(class: ThreadClass) -> Vec<&'static [libc::c_long]> {
    let own: &[_] = match class {
        ThreadClass::Vcpu => &[VCPU],
        ThreadClass::Pager => &[PAGER],
        ThreadClass::Link => &[PAGER, LINK],
        ThreadClass::Device => &[DEVICE],
    };
    [&[COMMON, CONNECTED, EVENTS, THREADS], own].concat()
}

fn numbers(class: ThreadClass) -> impl Iterator<Item = libc::c_long> {
    lists(class).into_iter().flatten().copied()
}

/// Has the calls of this thread, and of those that it starts, logged that its class does not have. The
/// filter of the process holds as well.
///
/// # Panics
/// When the kernel refuses: a thread without its filter must not run.
pub(crate) fn restrict(class: ThreadClass) {
    if let Err(error) = try_restrict(class) {
        panic!("the kernel refuses the filter of system calls of a {class:?} thread: {error}");
    }
}

fn try_restrict(class: ThreadClass) -> Result<(), Box<dyn std::error::Error>> {
    apply_filter(&program(numbers(class), SeccompAction::Log)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::calls::ALLOWED;

    #[test]
    fn a_class_has_fewer_calls_than_the_process_and_each_once() {
        let process: HashSet<_> = ALLOWED.iter().map(|(call, _)| *call).collect();
        for class in ThreadClass::ALL {
            let listed: Vec<_> = numbers(class).collect();
            let of_class: HashSet<_> = listed.iter().copied().collect();
            assert_eq!(of_class.len(), listed.len(), "{class:?} has a call twice");
            assert!(of_class.is_subset(&process), "{class:?}");
            for forbidden in [
                libc::SYS_kill,
                libc::SYS_listen,
                libc::SYS_seccomp,
                libc::SYS_unlink,
                libc::SYS_userfaultfd,
            ] {
                assert!(!of_class.contains(&forbidden), "{class:?} has {forbidden}");
            }
        }
    }

    #[test]
    fn vcpus_and_the_pager_neither_open_files_nor_connect() {
        for class in [ThreadClass::Vcpu, ThreadClass::Pager] {
            let of_class: HashSet<_> = numbers(class).collect();
            for call in [
                libc::SYS_openat,
                libc::SYS_open,
                libc::SYS_socket,
                libc::SYS_connect,
            ] {
                assert!(!of_class.contains(&call), "{class:?} has {call}");
            }
        }
    }
}
