//! Raw mode of the terminal, and its certain end.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

use libc::termios;

/// The settings to go back to; null until raw mode was first entered. Never freed, so that a
/// signal handler may read it at any time.
static SAVED: AtomicPtr<termios> = AtomicPtr::new(std::ptr::null_mut());
/// A descriptor of the terminal that `SAVED` belongs to, of our own and never closed, for the
/// same reason. Written before `SAVED` is, which publishes it.
static TERMINAL: AtomicI32 = AtomicI32::new(-1);
/// The terminal is in raw mode.
static RAW: AtomicBool = AtomicBool::new(false);

/// A terminal in raw mode: keys reach the guest one by one, Ctrl-C included. Dropping it
/// restores the terminal; so does a panic. A program that ends by a signal calls
/// [`restore_terminal`] first.
#[derive(Debug)]
pub struct RawTerminal {
    _private: (),
}

impl RawTerminal {
    /// Puts the terminal `fd` into raw mode. None when `fd` is no terminal, when the process
    /// is not in its foreground, or when raw mode is on already.
    ///
    /// # Errors
    ///
    /// Fails when the terminal does not take its settings.
    pub fn enter(fd: RawFd) -> io::Result<Option<Self>> {
        if !is_foreground_terminal(fd) || RAW.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        match make_raw(fd) {
            Ok(()) => Ok(Some(Self { _private: () })),
            Err(error) => {
                RAW.store(false, Ordering::Release);
                Err(error)
            }
        }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Restores the terminal if it is in raw mode. Can be called at any time, from any thread and
/// from a signal handler.
pub fn restore_terminal() {
    if !RAW.swap(false, Ordering::AcqRel) {
        return;
    }
    let saved = SAVED.load(Ordering::Acquire);
    if !saved.is_null() {
        // SAFETY: a pointer that is not null came from `Box::into_raw` in `make_raw`, and is
        // never freed or written again. `tcsetattr` is safe in signal handlers (signal-safety(7)).
        unsafe { libc::tcsetattr(TERMINAL.load(Ordering::Acquire), libc::TCSANOW, saved) };
    }
}

fn make_raw(fd: RawFd) -> io::Result<()> {
    let mut settings = MaybeUninit::<termios>::uninit();
    // SAFETY: `settings` has room for what `tcgetattr` writes.
    if unsafe { libc::tcgetattr(fd, settings.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `tcgetattr` has succeeded, so it has filled the struct.
    let saved = unsafe { settings.assume_init() };
    let mut raw = saved;
    // SAFETY: `raw` is a valid `termios`.
    unsafe { libc::cfmakeraw(&raw mut raw) };
    // Lines that the monitor itself prints still begin at the left.
    raw.c_oflag |= libc::OPOST;

    // SAFETY: takes only numbers, and gives a new descriptor or an error.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        return Err(io::Error::last_os_error());
    }
    TERMINAL.store(own, Ordering::Release);
    // The old settings, if any, are leaked: a signal handler may be reading them.
    SAVED.store(Box::into_raw(Box::new(saved)), Ordering::Release);
    restore_on_panic();
    // SAFETY: `raw` is a valid `termios`.
    if unsafe { libc::tcsetattr(own, libc::TCSANOW, &raw const raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Makes the message of a panic appear on a sane terminal.
fn restore_on_panic() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore_terminal();
            next(info);
        }));
    });
}

/// Whether `fd` is a terminal whose foreground job this process belongs to. Others would be
/// stopped for reading it or for changing its settings.
pub(crate) fn is_foreground_terminal(fd: RawFd) -> bool {
    // SAFETY: both calls take only numbers.
    unsafe { libc::tcgetpgrp(fd) == libc::getpgrp() }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn what_is_no_terminal_is_left_alone() {
        let file = tempfile::tempfile().unwrap();
        assert!(RawTerminal::enter(file.as_raw_fd()).unwrap().is_none());
        assert!(!is_foreground_terminal(-1));
        restore_terminal();
    }
}
