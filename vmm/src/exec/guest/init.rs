//! The init, from its start by the kernel to the power-off.

use core::ffi::CStr;

use super::super::frame::{COMMAND_BYTES_MAX, COMMAND_PATH, HELLO};
use super::shell;
use super::sys;

/// The boot event "init reached" (`BOOT_TIMER_INIT_REACHED` of the devices).
const INIT_REACHED: u8 = 0x7b;
/// The boot event "ready" (`BOOT_TIMER_READY`).
const READY: u8 = 0x7c;

/// The second serial port: its path, and its numbers (`Documentation/admin-guide/devices.txt`).
const CHANNEL: (&CStr, usize, usize) = (c"/dev/ttyS1", 4, 65);
const NULL: (&CStr, usize, usize) = (c"/dev/null", 1, 3);

/// File systems and their mount points. Those that a kernel lacks are skipped: the command may not
/// need them.
const MOUNTS: [(&CStr, &CStr); 7] = [
    (c"devtmpfs", c"/dev"),
    (c"devpts", c"/dev/pts"),
    (c"tmpfs", c"/dev/shm"),
    (c"proc", c"/proc"),
    (c"sysfs", c"/sys"),
    (c"tmpfs", c"/tmp"),
    (c"tmpfs", c"/run"),
];

/// Runs the init.
pub fn main() -> ! {
    sys::report_boot(INIT_REACHED);
    for (kind, on) in MOUNTS {
        sys::mkdir(on);
        let _ = sys::mount(kind, on);
    }
    for (path, major, minor) in [CHANNEL, NULL] {
        sys::mknod(path, major, minor);
    }
    // A kernel that found no console starts init without the first three files.
    while let Ok(fd) = sys::open(NULL.0, sys::O_RDWR) {
        if fd > 2 {
            sys::close(fd);
            break;
        }
    }
    // O_NONBLOCK avoids waiting for a carrier, which is never raised.
    let flags = sys::O_RDWR | sys::O_NOCTTY | sys::O_NONBLOCK | sys::O_CLOEXEC;
    let channel = sys::open(CHANNEL.0, flags).and_then(|channel| {
        sys::make_raw(channel)?;
        sys::set_blocking(channel)?;
        sys::write_all(channel, &HELLO)?;
        Ok(channel)
    });
    let Ok(channel) = channel else {
        give_up(c"ssi-hv init: the kernel has no driver for the second serial port\n");
    };
    let mut text = [0; COMMAND_BYTES_MAX + 1];
    match read_command(&mut text) {
        Some(command) => {
            sys::report_boot(READY);
            // The result says that all is written: the machine is stopped some seconds after it.
            shell::run(command, channel, true, sys::sync)
        }
        None => shell::fail(
            channel,
            b"the command cannot be read from the initial RAM disk",
        ),
    }
    sys::drain(channel);
    end()
}

fn read_command(into: &mut [u8]) -> Option<&CStr> {
    let file = sys::open(COMMAND_PATH, sys::O_RDONLY).ok()?;
    let mut len = 0;
    loop {
        match sys::read(file, into.get_mut(len..)?) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(_) => return None,
        }
    }
    sys::close(file);
    CStr::from_bytes_until_nul(into).ok()
}

/// Prints an error on the console, and powers the machine off.
pub fn give_up(text: &CStr) -> ! {
    let _ = sys::write_all(2, text.to_bytes());
    end()
}

fn end() -> ! {
    sys::power_off();
    // Init must not exit: the monitor ends a machine whose command has ended.
    loop {
        sys::pause();
    }
}
