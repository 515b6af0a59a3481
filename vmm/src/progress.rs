//! Progress bars at the bottom of a terminal.
//!
//! They are on stderr, which must be a terminal, and are hidden while the console of a guest is on
//! that terminal. Messages go through [`Stderr`], which makes room for them. They have no colours.

mod terminal;

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use self::terminal::FreeLine;
use crate::logging::{LogFormat, LogLevel, Verbosity};
use crate::stderr::{self, Stderr};

/// Update interval of a bar that only shows time.
const TICK: Duration = Duration::from_millis(200);

/// Whether bars are allowed. It publishes no other data.
static ALLOWED: AtomicBool = AtomicBool::new(false);
/// Allows bars, unless the verbosity excludes them, or stderr is not a capable terminal.
pub fn allow(verbosity: Verbosity) {
    let capable = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
    let allowed = is_wanted(verbosity) && capable && io::stderr().is_terminal();
    ALLOWED.store(allowed, Ordering::Relaxed);
}

/// Returns whether the verbosity allows a bar.
fn is_wanted(verbosity: Verbosity) -> bool {
    let few = matches!(verbosity.log_level, Some(LogLevel::Error | LogLevel::Warn));
    !verbosity.quiet && !few && verbosity.log_format == LogFormat::Text
}

/// Removes the bar from the terminal.
pub fn clear() {
    let bar = stderr::bar().take();
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Removes the bar before a signal ends the process, for commands without other signal handling.
pub fn clear_on_signals() {
    if !ALLOWED.load(Ordering::Relaxed) {
        return;
    }
    // Best effort: otherwise the bar may remain.
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else {
        return;
    };
    let end = move || {
        for signal in signals.forever() {
            clear();
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    let _ = thread::Builder::new().name("signals".into()).spawn(end);
}

/// Work of a known number of steps. Its bar is removed on drop, without a trace.
#[derive(Debug)]
pub struct Progress {
    /// `None` when bars are not allowed, or another one is displayed.
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Displays a bar for `what`, with the current activity.
    #[must_use]
    pub fn begin(what: &str, steps: u64, doing: &str) -> Self {
        let progress = Self::still(what, steps, doing);
        if let Some(bar) = &progress.bar {
            bar.enable_steady_tick(TICK);
        }
        progress
    }

    /// Displays a bar without a timer, since nothing may run in parallel with a measurement.
    #[must_use]
    pub fn rounds(steps: u32) -> Self {
        Self::still("rounds", steps.into(), "")
    }

    /// Like [`rounds`](Self::rounds), for other steps.
    #[must_use]
    pub fn still(what: &str, steps: u64, doing: &str) -> Self {
        if !ALLOWED.load(Ordering::Relaxed) {
            return Self { bar: None };
        }
        let mut shown = stderr::bar();
        if shown.is_some() {
            return Self { bar: None };
        }
        let target = ProgressDrawTarget::term_like(Box::new(FreeLine::stderr()));
        let bar = ProgressBar::with_draw_target(Some(steps), target);
        bar.set_style(style());
        bar.set_prefix(what.to_owned());
        bar.set_message(doing.to_owned());
        bar.tick();
        *shown = Some(bar.clone());
        Self { bar: Some(bar) }
    }

    /// Returns a handle for another thread. Removing the bar does not wait for it.
    #[must_use]
    pub fn steps(&self) -> Steps {
        Steps(self.bar.clone())
    }

    /// Sets the number of completed steps.
    pub fn reach(&self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    /// Adds a completed step.
    pub fn step(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Sets the current activity.
    pub fn say(&self, doing: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(doing.to_owned());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            *stderr::bar() = None;
            bar.finish_and_clear();
        }
    }
}

/// Updates the bar of another thread; without effect once that is removed.
#[derive(Clone, Debug, Default)]
pub struct Steps(Option<ProgressBar>);

impl Steps {
    /// Adds a completed step.
    pub fn step(&self) {
        if let Some(bar) = &self.0 {
            bar.inc(1);
        }
    }

    /// Sets the current activity.
    pub fn say(&self, doing: &str) {
        if let Some(bar) = &self.0 {
            bar.set_message(doing.to_owned());
        }
    }
}

/// Displays work that another thread does, by polling its progress until this is dropped. Work
/// shorter than one interval shows no bar.
#[derive(Debug)]
pub struct Followed {
    /// `None` when bars are not allowed.
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Followed {
    /// Follows `what` with this many steps by polling the number of completed ones. The bar is
    /// removed when all are.
    #[must_use]
    pub fn begin(
        what: &'static str,
        steps: u64,
        doing: &'static str,
        done: impl Fn() -> u64 + Send + 'static,
    ) -> Self {
        Self::below("", what, steps, doing, done)
    }

    /// Like [`begin`](Self::begin), on a terminal whose last line may be incomplete: `end` is
    /// printed before the bar.
    #[must_use]
    pub fn below(
        end: &'static str,
        what: &'static str,
        steps: u64,
        doing: &'static str,
        done: impl Fn() -> u64 + Send + 'static,
    ) -> Self {
        if steps == 0 || !ALLOWED.load(Ordering::Relaxed) {
            return Self { thread: None };
        }
        let (stop, stopped) = mpsc::channel();
        let look = move || {
            let mut shown: Option<Progress> = None;
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                let now = done();
                if now >= steps {
                    return;
                }
                let bar = shown.get_or_insert_with(|| {
                    // Best effort, here and below.
                    let _ = Stderr::default().write_all(end.as_bytes());
                    Progress::begin(what, steps, doing)
                });
                bar.reach(now);
            }
        };
        let thread = thread::Builder::new().name("progress".into()).spawn(look);
        Self {
            thread: thread.ok().map(|thread| (stop, thread)),
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// Name, bar, position, time and activity, as far as the terminal is wide. The rest of the line
/// stays free, so that typed text is removed with the bar.
fn style() -> ProgressStyle {
    ProgressStyle::with_template("{prefix} [{bar:20}] {pos}/{len} {elapsed} {msg}")
        .expect("the template is right")
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_for_who_has_not_asked_for_less() {
        let quiet = Verbosity {
            quiet: true,
            ..Verbosity::default()
        };
        let json = Verbosity {
            log_format: LogFormat::Json,
            ..Verbosity::default()
        };
        let level = |level| Verbosity {
            log_level: Some(level),
            ..Verbosity::default()
        };
        assert!(is_wanted(Verbosity::default()));
        assert!(is_wanted(level(LogLevel::Debug)));
        for less in [quiet, json, level(LogLevel::Error), level(LogLevel::Warn)] {
            assert!(!is_wanted(less), "{less:?}");
        }
    }

    #[test]
    fn without_leave_there_is_no_bar() {
        let progress = Progress::begin("nothing", 3, "");
        assert!(progress.bar.is_none() && stderr::bar().is_none());
        progress.step();
        progress.reach(2);
        progress.say("still nothing");
        progress.steps().step();
        progress.steps().say("nothing at all");
        let followed = Followed::begin("nothing", 3, "", || 1);
        assert!(followed.thread.is_none());
    }
}
