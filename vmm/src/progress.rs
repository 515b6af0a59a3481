//! Bars for work that takes long, at the bottom of a terminal.
//!
//! They are on stderr, which has to be a terminal, and never while the console of a guest is on that
//! terminal. Messages go through [`Stderr`], which makes room for them. There is no colour in them.

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

/// How often a bar moves that shows only time.
const TICK: Duration = Duration::from_millis(200);

/// Bars may be shown. Nothing else is published by it.
static ALLOWED: AtomicBool = AtomicBool::new(false);
/// From now on bars are shown, if the user has not asked for less and stderr is a terminal that can.
pub fn allow(verbosity: Verbosity) {
    let capable = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
    let allowed = is_wanted(verbosity) && capable && io::stderr().is_terminal();
    ALLOWED.store(allowed, Ordering::Relaxed);
}

/// Whether what the user has said leaves room for a bar.
fn is_wanted(verbosity: Verbosity) -> bool {
    let few = matches!(verbosity.log_level, Some(LogLevel::Error | LogLevel::Warn));
    !verbosity.quiet && !few && verbosity.log_format == LogFormat::Text
}

/// Takes the bar off the terminal, if one is there.
pub fn clear() {
    let bar = stderr::bar().take();
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Has the bar go before a signal ends the process, for commands that have nothing else to do then.
pub fn clear_on_signals() {
    if !ALLOWED.load(Ordering::Relaxed) {
        return;
    }
    // Without it a bar may stay behind, which is not worth an error.
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

/// Work of so many steps. Its bar goes when it is dropped, and leaves nothing on the terminal.
#[derive(Debug)]
pub struct Progress {
    /// None where bars are not to be seen, or another one is.
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Shows a bar for `what`, with what is done just now.
    #[must_use]
    pub fn begin(what: &str, steps: u64, doing: &str) -> Self {
        let progress = Self::still(what, steps, doing);
        if let Some(bar) = &progress.bar {
            bar.enable_steady_tick(TICK);
        }
        progress
    }

    /// Shows a bar that moves with the steps alone: nothing is to run beside what is measured.
    #[must_use]
    pub fn rounds(steps: u32) -> Self {
        Self::still("rounds", steps.into(), "")
    }

    /// The same, of other steps than rounds.
    #[must_use]
    pub fn still(what: &str, steps: u64, doing: &str) -> Self {
        let mut shown = stderr::bar();
        if !ALLOWED.load(Ordering::Relaxed) || shown.is_some() {
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

    /// What takes steps on another thread. That the bar goes waits for none of these.
    #[must_use]
    pub fn steps(&self) -> Steps {
        Steps(self.bar.clone())
    }

    /// So many steps are done in all.
    pub fn reach(&self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    /// One step more is done.
    pub fn step(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// What is done now.
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

/// Takes the steps of a bar that somebody else shows; without effect once that is gone.
#[derive(Clone, Debug, Default)]
pub struct Steps(Option<ProgressBar>);

impl Steps {
    /// One step more is done.
    pub fn step(&self) {
        if let Some(bar) = &self.0 {
            bar.inc(1);
        }
    }

    /// What is done now.
    pub fn say(&self, doing: &str) {
        if let Some(bar) = &self.0 {
            bar.set_message(doing.to_owned());
        }
    }
}

/// Work that goes on elsewhere and is looked at now and then, until this is dropped. What takes less than
/// one such interval shows no bar.
#[derive(Debug)]
pub struct Followed {
    /// None where bars are not to be seen.
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Followed {
    /// Follows `what`, of so many steps, by asking how many are done. The bar is there until all are.
    #[must_use]
    pub fn begin(
        what: &'static str,
        steps: u64,
        doing: &'static str,
        done: impl Fn() -> u64 + Send + 'static,
    ) -> Self {
        Self::below("", what, steps, doing, done)
    }

    /// The same on a terminal on which somebody else has written, whose last line may have no end: `end` goes
    /// before the bar.
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
                    // A bar is not worth an error, here and below.
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

/// What, a bar, how far, for how long, and what just now, as far as the terminal is wide. The rest of the
/// line stays free: what is typed there goes with the bar.
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
