//! Raw mode of the terminal, which is left on every way out of the process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::getpgrp;
use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcgetpgrp, tcsetattr};

/// A terminal and the settings to restore.
#[derive(Debug)]
struct Saved {
    /// A duplicated descriptor.
    terminal: OwnedFd,
    settings: Termios,
    /// Settings saved by the next entry to raw mode.
    later: OnceLock<Box<Saved>>,
}

/// The settings saved first; the last in the chain are current. Entries are never removed or
/// changed, and reading takes no lock, so that a signal handler may read them at any time.
static SAVED: OnceLock<Box<Saved>> = OnceLock::new();

/// The terminal is in raw mode.
static RAW: AtomicBool = AtomicBool::new(false);

/// A terminal in raw mode: keys reach the guest one by one, including Ctrl-C. Dropping the value
/// restores the terminal; so does a panic. A process that exits in a signal handler calls
/// [`restore_terminal`] first.
#[derive(Debug)]
pub struct RawTerminal {
    _private: (),
}

impl RawTerminal {
    /// Puts the terminal `fd` into raw mode. Returns `None` if `fd` is not a terminal, the process
    /// is not in its foreground, or raw mode is already on.
    ///
    /// # Errors
    ///
    /// Fails when the terminal rejects the settings.
    pub fn enter(fd: impl AsFd) -> io::Result<Option<Self>> {
        if !is_foreground_terminal(&fd) || RAW.swap(true, Ordering::AcqRel) {
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

/// Restores the terminal if it is in raw mode. May be called at any time, from any thread and from
/// a signal handler.
pub fn restore_terminal() {
    if !RAW.swap(false, Ordering::AcqRel) {
        return;
    }
    let first = SAVED.get().map(Box::as_ref);
    let later = |saved: &&'static Saved| saved.later.get().map(Box::as_ref);
    if let Some(saved) = std::iter::successors(first, later).last() {
        // tcsetattr is async-signal-safe. A signal handler has no way to report an error.
        let _ = tcsetattr(&saved.terminal, OptionalActions::Now, &saved.settings);
    }
}

fn make_raw(fd: impl AsFd) -> io::Result<()> {
    let settings = tcgetattr(&fd)?;
    let mut raw = settings.clone();
    raw.make_raw();
    // So that the monitor's own lines still begin in the first column.
    raw.output_modes |= OutputModes::OPOST;

    let terminal = fcntl_dupfd_cloexec(&fd, 0)?;
    let saved = Box::new(Saved {
        terminal,
        settings,
        later: OnceLock::new(),
    });
    save(saved);
    restore_on_panic();
    tcsetattr(&fd, OptionalActions::Now, &raw)?;
    Ok(())
}

/// Appends to the chain. The caller has set [`RAW`], so no other thread appends at the same time.
fn save(mut saved: Box<Saved>) {
    let mut place = &SAVED;
    while let Err(ours) = place.set(saved) {
        saved = ours;
        place = &place.get().expect("it is taken").later;
    }
}

/// Restores the terminal before a panic's message is printed.
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

/// Returns whether `fd` is a terminal whose foreground job this process belongs to. Other processes
/// would be stopped when they read it or change its settings.
pub(crate) fn is_foreground_terminal(fd: impl AsFd) -> bool {
    tcgetpgrp(fd) == Ok(getpgrp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_terminal_is_left_alone() {
        let file = tempfile::tempfile().unwrap();
        assert!(RawTerminal::enter(&file).unwrap().is_none());
        assert!(!is_foreground_terminal(&file));
        restore_terminal();
    }
}
