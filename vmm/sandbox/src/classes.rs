//! System calls of classes of threads: fewer than those of the process.
//!
//! A class has a list of its own, which holds in addition to that of the process: of several filters
//! the most restrictive answer counts. What is missing on the list of a class ends the process, or is
//! only logged by the kernel (`SECCOMP_RET_LOG`) where the list is not proven: see [`answer`]. Calls
//! that are on both lists cost no more than with one filter, since the kernel keeps one table of
//! answers for all filters of a thread.
//!
//! The C library and the standard library open files where nobody asks them to: `malloc` reads
//! `/proc/sys/vm/overcommit_memory` when it returns memory of a thread, and a panic reads the program
//! for its backtrace. Both can do without, so these calls fail with `EACCES` in classes whose lists
//! end the process.

use std::collections::BTreeMap;

use fabric_host::ThreadClass;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};

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

/// What fails with `EACCES` in classes whose lists end the process.
const FILES: &[libc::c_long] = calls! {
    SYS_access SYS_faccessat SYS_faccessat2 SYS_fstat SYS_getcwd SYS_lstat SYS_newfstatat SYS_open
    SYS_openat SYS_openat2 SYS_readlink SYS_readlinkat SYS_stat SYS_statx
};

/// The answer to calls that a class does not have.
///
/// The lists of vCPUs and of the pager end the process. Links and devices run more code of libraries
/// (RDMA providers, the file systems of disks), and start threads of the pager's kind when a donor
/// leaves.
const fn answer(class: ThreadClass) -> SeccompAction {
    match class {
        ThreadClass::Vcpu | ThreadClass::Pager => SeccompAction::KillProcess,
        ThreadClass::Link | ThreadClass::Device => SeccompAction::Log,
    }
}

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

/// Restricts this thread, and those that it starts, to the calls of its class. The filter of the
/// process holds as well.
///
/// # Panics
/// When the kernel refuses: a thread that is not restricted must not run.
pub(crate) fn restrict(class: ThreadClass) {
    if let Err(error) = try_restrict(class) {
        panic!("the kernel refuses the filter of system calls of a {class:?} thread: {error}");
    }
}

fn try_restrict(class: ThreadClass) -> Result<(), Box<dyn std::error::Error>> {
    let answer = answer(class);
    if answer == SeccompAction::Log {
        apply_filter(&program(numbers(class), answer)?)?;
        return Ok(());
    }
    let allowed = numbers(class).chain(FILES.iter().copied());
    apply_filter(&refusing_files()?)?;
    apply_filter(&program(allowed, answer)?)?;
    Ok(())
}

/// Makes a filter that lets calls that name files fail.
fn refusing_files() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules: BTreeMap<i64, Vec<_>> = FILES.iter().map(|call| (*call, Vec::new())).collect();
    let refused = SeccompAction::Errno(libc::EACCES.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, refused, TargetArch::x86_64)?.try_into()
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
    fn a_class_that_is_ended_for_others_neither_opens_files_nor_connects() {
        for class in ThreadClass::ALL {
            if answer(class) == SeccompAction::Log {
                continue;
            }
            let of_class: HashSet<_> = numbers(class).collect();
            for call in FILES.iter().chain(&[libc::SYS_socket, libc::SYS_connect]) {
                assert!(!of_class.contains(call), "{class:?} has {call}");
            }
        }
    }
}
