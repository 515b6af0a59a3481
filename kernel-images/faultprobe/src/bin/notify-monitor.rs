//! Reports to the monitor that the guest has reached init, by one byte to an I/O port.
//!
//! A program of its own, since Debian's cloud kernel has no `/dev/port` (`CONFIG_DEVPORT` is off).

use std::process::ExitCode;

use faultprobe::cpu::write_port;

/// The port that the monitor watches.
const PORT: u16 = 0x5f4;
/// The value that means "init reached".
const INIT_REACHED: u8 = 0x7b;

fn main() -> ExitCode {
    match write_port(PORT, INIT_REACHED) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("notify-monitor: no access to port {PORT:#x}: {error}");
            ExitCode::FAILURE
        }
    }
}
