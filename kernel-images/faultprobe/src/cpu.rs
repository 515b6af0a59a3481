//! Instructions that Rust has no safe functions for.

use std::arch::asm;
use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::io;

/// Reads the time-stamp counter after all earlier instructions have finished.
#[inline]
pub fn now_ticks() -> u64 {
    // SAFETY: both instructions exist on every x86-64 CPU, touch no memory and need no
    // privilege (Linux leaves CR4.TSD clear).
    unsafe {
        _mm_lfence();
        let ticks = _rdtsc();
        _mm_lfence();
        ticks
    }
}

/// Writes a byte to an I/O port of the monitor.
///
/// # Errors
/// When the kernel grants this process no access to the port.
pub fn write_port(port: u16, value: u8) -> io::Result<()> {
    // SAFETY: ioperm takes three integers and changes only which ports this process may use.
    if unsafe { libc::ioperm(port.into(), 1, 1) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: access to the port was granted above; the instruction touches no memory and no
    // flags, and on a machine without such a device nothing happens.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags));
    }
    Ok(())
}
