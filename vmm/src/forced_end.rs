//! Ending the process while threads of it stand still: nothing that is done on the way may wait for them.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::control_socket::files;
use crate::exit::ExitCode;
use crate::machine::restore_terminal;
use crate::report::REPORT_TIME_MAX;
use crate::{progress, stderr};

/// The longest that it takes: a report, and as much again for the rest.
pub const FORCED_END_TIME_MAX: Duration = REPORT_TIME_MAX.saturating_mul(2);

/// Ends the process at once. What it leaves on the terminal and in files goes, as far as nobody is in the way.
pub fn at_once(code: ExitCode) -> ! {
    after(code, Duration::from_secs(1), || {})
}

/// The same after `last` things, for which there is a limit too.
pub fn after_last(code: ExitCode, last: impl FnOnce() + Send + 'static) -> ! {
    after(code, FORCED_END_TIME_MAX, last)
}

fn after(code: ExitCode, limit: Duration, last: impl FnOnce() + Send + 'static) -> ! {
    let (done, ended) = mpsc::channel();
    let clean = move || {
        restore_terminal();
        files::remove_all();
        progress::clear();
        last();
        stderr::flush();
        let _ = done.send(());
    };
    // Without a thread nothing is cleaned up, which is better than to stay.
    let _ = thread::Builder::new().name("end".into()).spawn(clean);
    let _ = ended.recv_timeout(limit);
    std::process::exit(code.code().into());
}
