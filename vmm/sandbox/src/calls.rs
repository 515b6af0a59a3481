//! System calls of the process, by seccomp.
//!
//! The list is that of an ordinary service with threads, files, sockets and timers, without what starts
//! programs, changes users, name spaces, mounts, modules or the clock, or looks into other processes.
//! No argument is compared: for such filters the kernel knows the answer by the number alone
//! (Linux 5.11) and does not run them, so that a call costs some 40 ns more.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter_all_threads};

/// Makes a list of numbers of the names of system calls.
macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// Likewise, with the names.
macro_rules! named_calls {
    ($($name:ident)*) => { &[$((libc::$name, stringify!($name))),*] };
}

/// System calls that are allowed.
pub(crate) const ALLOWED: &[(libc::c_long, &str)] = named_calls! {
    // Memory.
    SYS_brk SYS_madvise SYS_mbind SYS_memfd_create SYS_mincore SYS_mlock SYS_mlock2 SYS_mmap
    SYS_move_pages SYS_mprotect SYS_mremap SYS_msync SYS_munlock SYS_munmap SYS_pkey_alloc
    SYS_pkey_free SYS_pkey_mprotect SYS_process_madvise SYS_set_mempolicy SYS_get_mempolicy
    SYS_userfaultfd
    // Threads, and the end.
    SYS_arch_prctl SYS_clone SYS_clone3 SYS_exit SYS_exit_group SYS_futex SYS_futex_waitv
    SYS_get_robust_list SYS_getcpu SYS_getpid SYS_getppid SYS_gettid SYS_membarrier SYS_prctl
    SYS_rseq SYS_sched_get_priority_max SYS_sched_get_priority_min SYS_sched_getaffinity
    SYS_sched_getattr SYS_sched_getparam SYS_sched_getscheduler SYS_sched_setaffinity
    SYS_sched_setattr SYS_sched_setparam SYS_sched_setscheduler SYS_sched_yield SYS_set_robust_list
    SYS_set_tid_address SYS_setpriority SYS_getpriority SYS_wait4 SYS_waitid
    // Signals.
    SYS_kill SYS_pause SYS_pidfd_open SYS_pidfd_send_signal SYS_restart_syscall SYS_rt_sigaction
    SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigqueueinfo SYS_rt_sigreturn SYS_rt_sigsuspend
    SYS_rt_sigtimedwait SYS_rt_tgsigqueueinfo SYS_sigaltstack SYS_signalfd SYS_signalfd4 SYS_tgkill
    SYS_tkill
    // Time.
    SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_gettimeofday SYS_nanosleep SYS_time
    SYS_timer_create SYS_timer_delete SYS_timer_getoverrun SYS_timer_gettime SYS_timer_settime
    SYS_timerfd_create SYS_timerfd_gettime SYS_timerfd_settime SYS_times
    // Descriptors.
    SYS_close SYS_close_range SYS_dup SYS_dup2 SYS_dup3 SYS_epoll_create SYS_epoll_create1
    SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_epoll_wait SYS_eventfd SYS_eventfd2 SYS_fcntl
    SYS_ioctl SYS_pipe SYS_pipe2 SYS_poll SYS_ppoll SYS_pselect6 SYS_select
    // Files.
    SYS_access SYS_chdir SYS_chmod SYS_copy_file_range SYS_creat SYS_faccessat SYS_faccessat2
    SYS_fadvise64 SYS_fallocate SYS_fchdir SYS_fchmod SYS_fchmodat SYS_fdatasync SYS_fgetxattr
    SYS_flock SYS_fstat SYS_fstatfs SYS_fsync SYS_ftruncate SYS_getcwd SYS_getdents SYS_getdents64
    SYS_getxattr SYS_lgetxattr SYS_link SYS_linkat SYS_lseek SYS_lstat SYS_mkdir SYS_mkdirat
    SYS_newfstatat SYS_open SYS_openat SYS_openat2 SYS_pread64 SYS_preadv SYS_preadv2 SYS_pwrite64
    SYS_pwritev SYS_pwritev2 SYS_read SYS_readahead SYS_readlink SYS_readlinkat SYS_readv SYS_rename
    SYS_renameat SYS_renameat2 SYS_rmdir SYS_sendfile SYS_splice SYS_stat SYS_statfs SYS_statx
    SYS_symlink SYS_symlinkat SYS_sync SYS_sync_file_range SYS_syncfs SYS_tee SYS_truncate SYS_umask
    SYS_unlink SYS_unlinkat SYS_utimensat SYS_vmsplice SYS_write SYS_writev
    // Sockets.
    SYS_accept SYS_accept4 SYS_bind SYS_connect SYS_getpeername SYS_getsockname SYS_getsockopt
    SYS_listen SYS_recvfrom SYS_recvmmsg SYS_recvmsg SYS_sendmmsg SYS_sendmsg SYS_sendto
    SYS_setsockopt SYS_shutdown SYS_socket SYS_socketpair
    // Threads restrict themselves further.
    SYS_seccomp
    // What the process is, and its limits.
    SYS_capget SYS_getegid SYS_geteuid SYS_getgid SYS_getgroups SYS_getpgid SYS_getpgrp
    SYS_getrandom SYS_getresgid SYS_getresuid SYS_getrlimit SYS_getrusage SYS_getsid SYS_getuid
    SYS_prlimit64 SYS_setrlimit SYS_sysinfo SYS_uname
};

/// Makes a filter that allows these calls, and answers all others so.
pub(crate) fn program(
    allowed: impl IntoIterator<Item = libc::c_long>,
    others: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let rules: BTreeMap<i64, Vec<_>> = allowed.into_iter().map(|call| (call, Vec::new())).collect();
    SeccompFilter::new(rules, others, SeccompAction::Allow, TargetArch::x86_64)?.try_into()
}

/// Returns the name of a system call that the process of a VM may use.
#[must_use]
pub fn call_name(number: libc::c_long) -> Option<&'static str> {
    let mut found = ALLOWED.iter().filter(|(call, _)| *call == number);
    found
        .next()
        .map(|(_, name)| name.trim_start_matches("SYS_"))
}

/// Restricts all threads of this process.
pub(crate) fn restrict() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let program = program(
        ALLOWED.iter().map(|(call, _)| *call),
        SeccompAction::KillProcess,
    )?;
    Ok(apply_filter_all_threads(&program)?)
}
