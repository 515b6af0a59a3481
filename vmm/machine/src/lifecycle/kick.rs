//! Interrupting KVM_RUN: a vCPU leaves the guest when its thread is kicked, or at a set time.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use libc::{c_int, c_void, siginfo_t};
use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::process::{Pid, getpid};
use rustix::thread::gettid;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Makes one vCPU leave the guest.
#[derive(Debug, Default)]
pub(crate) struct Kick {
    target: Mutex<Option<Target>>,
    /// The thread sleeps in [`KickRegistration::sleep`], or is about to. Sequentially consistent,
    /// as is `immediate_exit`: a kick stores that, then loads this; a thread stores this, then
    /// loads that. At least one of the two sees the other's store.
    asleep: AtomicBool,
    /// The vCPU sleeps until a start-up message. Relaxed: only for display.
    offline: AtomicBool,
    /// The vCPU is on another node. Relaxed: only for display.
    away: AtomicBool,
}

/// What a vCPU does, apart from waiting for a page in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It is in the guest, or handles an exit.
    Runs,
    /// It is halted until an interrupt; only known with interrupt controllers in user space.
    Halted,
    /// It waits for a start-up message.
    Offline,
}

/// The thread of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuThread {
    /// The vCPU.
    pub cpu: u32,
    /// The thread's id.
    pub thread: u32,
    /// What it does.
    pub activity: Activity,
}

#[derive(Debug)]
struct Target {
    thread: Pid,
    sleeper: Thread,
    run: Arc<RunPage>,
}

/// The first page of a vCPU's `kvm_run`, mapped in addition to the mapping of kvm-ioctls: kicks may
/// come at any time, also while the vCPU's thread uses its mapping.
#[derive(Debug)]
struct RunPage(NonNull<kvm_run>);

// SAFETY: a mapping is not bound to a thread, and only an atomic in it is accessed.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

/// Bytes of [`RunPage`]. `immediate_exit` is among the first.
const RUN_PAGE_BYTES: usize = 4096;
const _: () = assert!(std::mem::offset_of!(kvm_run, immediate_exit) < RUN_PAGE_BYTES);

impl RunPage {
    fn new(vcpu: &VcpuFd) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: `VcpuFd` owns an open descriptor.
        let vcpu = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        // SAFETY: the kernel chooses the address, so no mapping is replaced.
        let mapped = unsafe {
            let shared = MapFlags::SHARED;
            mm::mmap(ptr::null_mut(), RUN_PAGE_BYTES, protection, shared, vcpu, 0)
        };
        let mapped = NonNull::new(mapped?.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self(mapped))
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: the field is inside the page, which is mapped while `self` is; it is a byte,
        // which KVM and the monitor access as such, and this mapping is used for nothing else.
        unsafe { AtomicU8::from_ptr(&raw mut (*self.0.as_ptr()).immediate_exit) }
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it outlives `self`.
        let _ = unsafe { mm::munmap(self.0.as_ptr().cast(), RUN_PAGE_BYTES) };
    }
}

impl Kick {
    /// Registers the calling thread as the one that runs `vcpu`, until the registration is
    /// dropped.
    ///
    /// # Errors
    ///
    /// Fails when `kvm_run` cannot be mapped.
    pub fn register(&self, vcpu: &VcpuFd) -> io::Result<KickRegistration<'_>> {
        let run = Arc::new(RunPage::new(vcpu)?);
        *self.lock() = Some(Target {
            thread: gettid(),
            sleeper: thread::current(),
            run: Arc::clone(&run),
        });
        OF_THIS_THREAD.set(ptr::from_ref(run.immediate_exit()));
        Ok(KickRegistration {
            kick: self,
            run,
            alarm: Cell::new(None),
            on_its_thread: PhantomData,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Target>> {
        // The target is replaced as a whole, so a panic cannot leave it inconsistent.
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the registered thread, which runs vCPU `cpu`, unless that is on another node.
    pub fn thread(&self, cpu: u32) -> Option<VcpuThread> {
        if self.away.load(Ordering::Relaxed) {
            return None;
        }
        let thread = self.lock().as_ref()?.thread.as_raw_nonzero().get();
        let activity = match self.asleep.load(Ordering::SeqCst) {
            true if self.offline.load(Ordering::Relaxed) => Activity::Offline,
            true => Activity::Halted,
            false => Activity::Runs,
        };
        Some(VcpuThread {
            cpu,
            thread: thread.cast_unsigned(),
            activity,
        })
    }

    /// Makes the vCPU leave the guest or wake up, if its thread is registered.
    pub fn kick(&self) {
        let target = self.lock();
        if let Some(target) = target.as_ref() {
            target.run.immediate_exit().store(1, Ordering::SeqCst);
            if self.asleep.load(Ordering::SeqCst) {
                return target.sleeper.unpark();
            }
            if target.thread == gettid() {
                // A sleeping thread is not in the guest.
                return;
            }
            let (process, thread) = (getpid().as_raw_nonzero(), target.thread.as_raw_nonzero());
            // SAFETY: takes numbers. The registered thread has not ended: it drops its registration
            // first, for which it needs the lock that is held here. To any other thread of this
            // process the signal, which has a handler, would do nothing.
            unsafe { libc::syscall(libc::SYS_tgkill, process.get(), thread.get(), kick_signal()) };
        }
    }
}

/// The registration of a vCPU thread with its [`Kick`].
#[derive(Debug)]
pub(crate) struct KickRegistration<'a> {
    kick: &'a Kick,
    run: Arc<RunPage>,
    /// The timer that kicks at a set time, created at its first use.
    alarm: Cell<Option<libc::timer_t>>,
    /// Not `Send`: dropped on the thread that it registers.
    on_its_thread: PhantomData<*const ()>,
}

impl KickRegistration<'_> {
    /// Clears earlier kicks. The caller checks the state of the machine next.
    pub fn rearm(&self) {
        self.run.immediate_exit().store(0, Ordering::SeqCst);
    }

    /// Sleeps until a kick since the last [`rearm`](Self::rearm), or for `limit`. May return early.
    pub fn sleep(&self, limit: Option<Duration>) {
        self.kick.asleep.store(true, Ordering::SeqCst);
        if self.run.immediate_exit().load(Ordering::SeqCst) == 0 {
            match limit {
                Some(limit) => thread::park_timeout(limit),
                None => thread::park(),
            }
        }
        self.kick.asleep.store(false, Ordering::SeqCst);
    }

    /// Like [`sleep`](Self::sleep), for a vCPU that waits for its start-up message.
    pub fn sleep_offline(&self) {
        self.kick.offline.store(true, Ordering::Relaxed);
        self.sleep(None);
        self.kick.offline.store(false, Ordering::Relaxed);
    }

    /// Like [`sleep`](Self::sleep), for a vCPU that is on another node.
    pub fn sleep_away(&self) {
        self.kick.away.store(true, Ordering::Relaxed);
        self.sleep(None);
        self.kick.away.store(false, Ordering::Relaxed);
    }

    /// Kicks this thread at time `at` of the monotonic clock, in nanoseconds, instead of at a time
    /// that was set before. The kick is a signal of the kernel and needs no other thread.
    pub fn set_alarm(&self, at: Option<u64>) -> io::Result<()> {
        let timer = match (self.alarm.get(), at) {
            (Some(timer), _) => timer,
            (None, None) => return Ok(()),
            (None, Some(_)) => {
                let timer = create_alarm()?;
                self.alarm.set(Some(timer));
                timer
            }
        };
        let at = at.map_or(0, |at| i64::try_from(at).unwrap_or(i64::MAX).max(1));
        let none = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let setting = libc::itimerspec {
            it_interval: none,
            // All zero stops the timer.
            it_value: libc::timespec {
                tv_sec: at / 1_000_000_000,
                tv_nsec: at % 1_000_000_000,
            },
        };
        // SAFETY: the timer was created above or before and is deleted only when `self` is dropped;
        // the setting lives through the call, and the kernel writes no old one.
        match unsafe {
            libc::timer_settime(
                timer,
                libc::TIMER_ABSTIME,
                &raw const setting,
                ptr::null_mut(),
            )
        } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Creates a timer that sends the kick signal to the calling thread.
fn create_alarm() -> io::Result<libc::timer_t> {
    // SAFETY: the struct has integers and a union of an integer and a pointer: zeroes are valid.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_THREAD_ID;
    event.sigev_signo = kick_signal();
    event.sigev_notify_thread_id = gettid().as_raw_nonzero().get();
    let mut timer: libc::timer_t = ptr::null_mut();
    // SAFETY: the event and the place for the timer live through the call.
    match unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } {
        0 => Ok(timer),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for KickRegistration<'_> {
    fn drop(&mut self) {
        OF_THIS_THREAD.set(ptr::null());
        if let Some(timer) = self.alarm.take() {
            // SAFETY: the timer was created by this registration and is not used any more.
            unsafe { libc::timer_delete(timer) };
        }
        *self.kick.lock() = None;
    }
}

/// The signal that interrupts KVM_RUN: the first real-time signal that libc leaves free.
fn kick_signal() -> c_int {
    SIGRTMIN()
}

thread_local! {
    /// `immediate_exit` of the vCPU that the thread runs; null on other threads. Without a
    /// destructor and of a constant value, so that a signal handler can read it.
    static OF_THIS_THREAD: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

/// Sets `immediate_exit`, so that a timer's kick just before KVM_RUN is not lost.
extern "C" fn on_kick(_signal: c_int, _info: *mut siginfo_t, _context: *mut c_void) {
    let immediate_exit = OF_THIS_THREAD.get();
    if !immediate_exit.is_null() {
        // SAFETY: set by `register` and cleared before the registration ends, both on this thread;
        // in between the registration, or what is left of it if it was forgotten, owns the page.
        unsafe { &*immediate_exit }.store(1, Ordering::SeqCst);
    }
}

/// Installs the handler of the kick signal, once per process.
pub(crate) fn install_kick_handler() -> io::Result<()> {
    static INSTALL: Once = Once::new();
    static FAILED: OnceLock<i32> = OnceLock::new();
    INSTALL.call_once(|| {
        if let Err(error) = register_signal_handler(kick_signal(), on_kick) {
            FAILED.get_or_init(|| error.errno());
        }
    });
    match FAILED.get() {
        Some(errno) => Err(io::Error::from_raw_os_error(*errno)),
        None => Ok(()),
    }
}

/// Unblocks the kick signal on the calling thread, regardless of the inherited mask.
pub(crate) fn unblock_kick_signal() {
    if let Err(error) = vmm_sys_util::signal::unblock_signal(kick_signal()) {
        tracing::warn!(%error, "the kick signal stays blocked");
    }
}
