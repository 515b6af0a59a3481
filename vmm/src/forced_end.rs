//! Ends the process while some of its threads are blocked: no step may wait for them.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::control_socket::files;
use crate::exit::ExitCode;
use crate::machine::restore_terminal;
use crate::report::REPORT_TIME_MAX;
use crate::{progress, stderr};

/// Upper bound of the time it takes: a report, and the same again for the rest.
pub const FORCED_END_TIME_MAX: Duration = REPORT_TIME_MAX.saturating_mul(2);

/// Ends the process at once. Restores the terminal and removes files as far as possible without
/// waiting.
pub fn at_once(code: ExitCode) -> ! {
    after(code, Duration::from_secs(1), || {})
}

/// Ends the process after `last`, for which there is a limit too.
pub fn after_last(code: ExitCode, last: impl FnOnce() + Send + 'static) -> ! {
    after(code, FORCED_END_TIME_MAX, last)
}

fn after(code: ExitCode, limit: Duration, last: impl FnOnce() + Send + 'static) -> ! {
    let (done, ended) = mpsc::channel();
    let clean = move || {
        restore_terminal();
        files::remove_all();
        last();
        // While stderr is not read, the bar is locked.
        if stderr::flush() {
            progress::clear();
        }
        let _ = done.send(());
    };
    // Without a thread nothing is cleaned up, which is better than not to end.
    let _ = thread::Builder::new().name("end".into()).spawn(clean);
    let _ = ended.recv_timeout(limit);
    std::process::exit(code.code().into());
}
