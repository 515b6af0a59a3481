//! Tells the monitor that the guest has reached init, by one byte to an I/O port.
//!
//! A program of its own, since Debian's cloud kernel has no `/dev/port` (`CONFIG_DEVPORT` is off).

use std::arch::asm;
use std::process::ExitCode;

/// The port that the monitor watches.
const PORT: u16 = 0x5f4;
/// What it takes for "init reached".
const INIT_REACHED: u8 = 0x7b;

fn main() -> ExitCode {
    // SAFETY: ioperm takes three integers and changes only which ports we may use.
    if unsafe { libc::ioperm(PORT.into(), 1, 1) } != 0 {
        eprintln!(
            "tell-monitor: no access to port {PORT:#x}: {}",
            std::io::Error::last_os_error()
        );
        return ExitCode::FAILURE;
    }
    // SAFETY: access to the port was granted above; the instruction touches no memory and no
    // flags, and on a machine without such a device nothing happens.
    unsafe {
        asm!("out dx, al", in("dx") PORT, in("al") INIT_REACHED, options(nomem, nostack, preserves_flags))
    };
    ExitCode::SUCCESS
}
