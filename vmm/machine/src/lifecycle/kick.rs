//! Interrupting KVM_RUN: a vCPU leaves the guest when its thread is kicked.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

use libc::{c_int, c_void, pthread_t, siginfo_t};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Makes one vCPU leave the guest.
#[derive(Debug, Default)]
pub(crate) struct Kick {
    target: Mutex<Option<Target>>,
}

#[derive(Debug)]
struct Target {
    thread: pthread_t,
    /// `immediate_exit` of the vCPU's `kvm_run`.
    immediate_exit: *const AtomicU8,
}

// SAFETY: the pointer is used only under the lock of `Kick`, while `KickRegistration` vouches
// for it, and what it points to is an atomic.
unsafe impl Send for Target {}

impl Kick {
    /// Registers the calling thread as the one that runs the vCPU, until the registration is
    /// dropped.
    ///
    /// # Safety
    ///
    /// `immediate_exit` points to that field of the mapped `kvm_run` of the vCPU, and the
    /// mapping outlives the registration. The registration is dropped on the calling thread.
    pub unsafe fn register(&self, immediate_exit: *mut u8) -> KickRegistration<'_> {
        // SAFETY: `pthread_self` has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        *self.lock() = Some(Target {
            thread,
            immediate_exit: immediate_exit.cast::<AtomicU8>().cast_const(),
        });
        KickRegistration {
            kick: self,
            immediate_exit: immediate_exit.cast::<AtomicU8>().cast_const(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Target>> {
        // The target is replaced as a whole, so a panic cannot leave it half changed.
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the vCPU leave the guest, if its thread is registered.
    pub fn kick(&self) {
        let target = self.lock();
        if let Some(target) = target.as_ref() {
            // SAFETY: the target is registered, so by the contract of `register` the pointer
            // is to a live byte; bytes have no alignment to violate, and KVM and the monitor
            // access it as a single byte.
            unsafe { &*target.immediate_exit }.store(1, Ordering::SeqCst);
            // SAFETY: the target is registered, so the thread has not ended: it drops its
            // registration first, for which it needs the lock that is held here. The signal
            // has a handler that does nothing.
            unsafe { libc::pthread_kill(target.thread, kick_signal()) };
        }
    }
}

/// The registration of a vCPU thread with its [`Kick`].
#[derive(Debug)]
pub(crate) struct KickRegistration<'a> {
    kick: &'a Kick,
    immediate_exit: *const AtomicU8,
}

impl KickRegistration<'_> {
    /// Forgets kicks that came so far. The caller looks at the state of the machine next.
    pub fn rearm(&self) {
        // SAFETY: by the contract of `register` the pointer is to a live byte while `self` is.
        unsafe { &*self.immediate_exit }.store(0, Ordering::SeqCst);
    }
}

impl Drop for KickRegistration<'_> {
    fn drop(&mut self) {
        *self.kick.lock() = None;
    }
}

/// The signal that interrupts KVM_RUN: the first real-time signal that libc leaves free.
fn kick_signal() -> c_int {
    SIGRTMIN()
}

extern "C" fn ignore_kick(_signal: c_int, _info: *mut siginfo_t, _context: *mut c_void) {}

/// Gives the kick signal a handler that does nothing, once a process.
pub(crate) fn install_kick_handler() -> io::Result<()> {
    static INSTALL: Once = Once::new();
    static FAILED: OnceLock<i32> = OnceLock::new();
    INSTALL.call_once(|| {
        if let Err(error) = register_signal_handler(kick_signal(), ignore_kick) {
            FAILED.get_or_init(|| error.errno());
        }
    });
    match FAILED.get() {
        Some(errno) => Err(io::Error::from_raw_os_error(*errno)),
        None => Ok(()),
    }
}

/// Lets the kick signal through to the calling thread, whatever mask it inherited.
pub(crate) fn unblock_kick_signal() {
    if let Err(error) = vmm_sys_util::signal::unblock_signal(kick_signal()) {
        tracing::warn!(%error, "the kick signal stays blocked");
    }
}
