//! Errors of the guest's memory: accesses to poisoned pages (`UFFDIO_POISON`).
//!
//! The kernel reports such an access by SIGBUS on the thread that makes it. What follows depends on
//! the thread:
//!
//! - A vCPU: KVM sends the signal and leaves KVM_RUN, with the guest before the access. The guest
//!   gets a machine check ([`crate::vcpu::machine_check`]).
//! - A device that looks whether a page can be used ([`is_usable`]), before it uses the page: it
//!   finds that out, and refuses the request.
//! - A device in the middle of an access, because the page was lost after it was looked at, or is
//!   part of a ring. The thread cannot continue; it is left behind, and the run ends.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

use libc::{c_int, siginfo_t};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::{register_signal_handler, unblock_signal};

/// Limit of the regions of a guest's memory: below and above the hole, and added memory.
const REGIONS_MAX: usize = 3;

/// The guest's memory in this process: start and end of each region. Set before a thread accesses
/// it, so relaxed.
static REGIONS: [(AtomicUsize, AtomicUsize); REGIONS_MAX] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; REGIONS_MAX];

/// The descriptor that is signalled when a device cannot continue; -1 without one.
static STUCK: AtomicI32 = AtomicI32::new(-1);

/// Values of [`VCPU`] beside addresses, which are never so small.
const OUTSIDE: u64 = 0;
const INSIDE: u64 = 1;

thread_local! {
    /// What the thread does: [`INSIDE`] KVM_RUN, or [`OUTSIDE`] of it; or the address of the memory
    /// error that KVM has reported. Without a destructor and of a constant value, so that a signal
    /// handler can access it.
    static VCPU: AtomicU64 = const { AtomicU64::new(OUTSIDE) };
}

// Reads a byte. Returns 0, or 1 when the handler has continued it at the second entry.
core::arch::global_asm!(
    ".pushsection .text.ssi_hv_look,\"ax\",@progbits",
    ".globl ssi_hv_look",
    ".hidden ssi_hv_look",
    ".type ssi_hv_look,@function",
    "ssi_hv_look:",
    "movzx eax, byte ptr [rdi]",
    "xor eax, eax",
    "ret",
    ".globl ssi_hv_look_failed",
    ".hidden ssi_hv_look_failed",
    ".type ssi_hv_look_failed,@function",
    "ssi_hv_look_failed:",
    "mov eax, 1",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    fn ssi_hv_look(address: *const u8) -> u32;
    fn ssi_hv_look_failed();
}

/// Returns whether a byte of the guest's memory can be read. Waits for its page, as any access.
pub(crate) fn is_usable(address: *const u8) -> bool {
    let address_in_guest = is_guest_memory(address.addr());
    // SAFETY: the address is in the memory of the guest that the handler is installed for, which is
    // mapped while the machine exists. The instruction that reads it follows the calling convention
    // whether or not the handler diverts it.
    !address_in_guest || unsafe { ssi_hv_look(address) } == 0
}

fn is_guest_memory(address: usize) -> bool {
    REGIONS.iter().any(|(start, end)| {
        (start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed)).contains(&address)
    })
}

/// Handles memory errors, as the module says, until it is dropped. There is one handler in a
/// process: the newest one counts.
#[derive(Debug)]
pub(crate) struct MemoryErrors {
    /// Signalled when a device cannot continue.
    stuck: EventFd,
    /// Machine checks delivered to the guest.
    pub machine_checks: AtomicU64,
}

impl MemoryErrors {
    /// Installs the handler for this memory.
    ///
    /// # Errors
    ///
    /// The system's errors.
    pub fn handle(memory: &GuestMemoryMmap) -> io::Result<Self> {
        let stuck = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        for ((start, end), region) in REGIONS.iter().zip(memory.iter()) {
            let address = region.as_ptr().addr();
            let bytes = usize::try_from(region.len()).unwrap_or(usize::MAX);
            start.store(address, Ordering::Relaxed);
            end.store(address.saturating_add(bytes), Ordering::Relaxed);
        }
        STUCK.store(stuck.as_raw_fd(), Ordering::Relaxed);
        register_signal_handler(libc::SIGBUS, on_bus_error)?;
        devices::virtio::check_pages_by(is_usable);
        Ok(Self {
            stuck,
            machine_checks: AtomicU64::new(0),
        })
    }

    /// Becomes readable when a device cannot continue, because it has used a lost page.
    pub fn stuck(&self) -> &EventFd {
        &self.stuck
    }
}

impl Drop for MemoryErrors {
    fn drop(&mut self) {
        let mine = self.stuck.as_raw_fd();
        let found = STUCK.compare_exchange(mine, -1, Ordering::Relaxed, Ordering::Relaxed);
        if found.is_err() {
            // Another machine has the handler by now.
            return;
        }
        for (start, end) in &REGIONS {
            end.store(0, Ordering::Relaxed);
            start.store(0, Ordering::Relaxed);
        }
    }
}

/// Returns the guest-physical address of memory in this process.
pub(crate) fn guest_address(memory: &GuestMemoryMmap, address: u64) -> Option<GuestAddress> {
    memory.iter().find_map(|region| {
        let offset = address.checked_sub(region.as_ptr().addr() as u64)?;
        (offset < region.len()).then(|| GuestAddress(region.start_addr().0 + offset))
    })
}

/// Lets the calling thread get the signal, regardless of the inherited mask.
pub(crate) fn unblock() {
    if let Err(error) = unblock_signal(libc::SIGBUS) {
        tracing::warn!(%error, "SIGBUS stays blocked");
    }
}

/// Enters the guest by `enter`, on the thread of a vCPU. Returns also the address in this process
/// of the memory error by which the guest was left, if it was.
pub(crate) fn while_inside<T>(enter: impl FnOnce() -> T) -> (T, Option<u64>) {
    VCPU.with(|vcpu| vcpu.store(INSIDE, Ordering::SeqCst));
    let result = enter();
    let found = VCPU.with(|vcpu| vcpu.swap(OUTSIDE, Ordering::SeqCst));
    (result, (found > INSIDE).then_some(found))
}

extern "C" fn on_bus_error(_signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`. For any signal but those of memory errors the
    // address is of no meaning, and is then most likely not in the guest's memory.
    let address = unsafe { (*info).si_addr() };
    if !is_guest_memory(address.addr()) {
        return end_by_signal();
    }
    let is_in_guest = VCPU.with(|vcpu| {
        let address = address.addr() as u64;
        vcpu.compare_exchange(INSIDE, address, Ordering::SeqCst, Ordering::SeqCst)
    });
    if is_in_guest.is_ok() {
        return;
    }
    let context = context.cast::<libc::ucontext_t>();
    let at = ssi_hv_look as *const () as i64;
    // SAFETY: the kernel passes the interrupted thread's `ucontext_t`, which the handler may
    // change; it is not used by anything else until the handler returns.
    let next = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
    if *next == at {
        *next = ssi_hv_look_failed as *const () as i64;
        return;
    }
    let stuck = STUCK.load(Ordering::Relaxed);
    let one = 1_u64;
    // SAFETY: write and pause are safe to call in a handler; the number lives through the call, and
    // writing to a descriptor that is closed fails.
    unsafe {
        libc::write(stuck, ptr::from_ref(&one).cast(), size_of::<u64>());
        loop {
            libc::pause();
        }
    }
}

/// Ends the process as without a handler.
fn end_by_signal() {
    // SAFETY: both are safe to call in a handler. The signal is blocked until it returns.
    unsafe {
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
        libc::raise(libc::SIGBUS);
    }
}

#[cfg(test)]
#[path = "memory_errors_tests.rs"]
mod tests;
