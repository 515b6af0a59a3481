//! Reports to the monitor by one byte to an I/O port that the guest has reached init, or with the
//! argument `ready` that it has booted.
//!
//! A program of its own, since Debian's cloud kernel has no `/dev/port` (`CONFIG_DEVPORT` is off).

use std::process::ExitCode;

use faultprobe::cpu::write_port;
use faultprobe::ssi::team::pin;

/// The port that the monitor watches.
const PORT: u16 = 0x5f4;
/// The value that means "init reached".
const INIT_REACHED: u8 = 0x7b;
/// The value that means "has booted".
const READY: u8 = 0x7c;

fn main() -> ExitCode {
    let event = std::env::args_os().nth(1);
    let event = match event.as_ref().map(|event| event.to_str()) {
        None => INIT_REACHED,
        Some(Some("ready")) => READY,
        Some(_) => {
            eprintln!("notify-monitor: {event:?} is no event: give none for init, or `ready`");
            return ExitCode::FAILURE;
        }
    };
    // QEMU's emulation of processors denies ports to programs on a CPU that has moved to another host
    // (docs/testbed.md). The first CPU seldom does; where it is not to be had, any is tried.
    let _ = pin(0);
    match write_port(PORT, event) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("notify-monitor: no access to port {PORT:#x}: {error}");
            ExitCode::FAILURE
        }
    }
}
