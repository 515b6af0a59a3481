//! Messages on stderr.
//!
//! | level | meaning |
//! |---|---|
//! | error | the command fails, or data is lost |
//! | warning | the command continues, but not as requested: slower, or with less |
//! | info | what a user needs to know once: the transport, an address, a completed phase |
//! | debug | decisions, for analysis; nothing for each fault |
//! | trace | messages of the control connections; nothing for each fault |

use std::io::{self, IsTerminal, Write as _};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::time;

use crate::config::choice::choices;
use crate::exit::ExitCode;
use crate::stderr::{self, Stderr};

choices! {
    /// The least important level of messages that is shown.
    LogLevel {
        Error "error" "Failures of a command",
        Warn "warn" "Problems that do not stop a command",
        Info "info" "Events that a user needs to know once",
        Debug "debug" "Decisions",
        Trace "trace" "Messages between nodes too",
    }
    /// The format of messages.
    LogFormat {
        Text "text" "Lines of text",
        Json "json" "One JSON object per line",
    }
}

/// The verbosity of stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verbosity {
    /// Show more; twice for everything.
    pub verbose: u8,
    /// Show only warnings and errors.
    pub quiet: bool,
    /// Show this level.
    pub log_level: Option<LogLevel>,
    /// The format of messages.
    pub log_format: LogFormat,
}

impl Default for Verbosity {
    fn default() -> Self {
        Self {
            verbose: 0,
            quiet: false,
            log_level: None,
            log_format: LogFormat::Text,
        }
    }
}

impl Verbosity {
    /// Whether the user has set no verbosity.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.verbose == 0 && !self.quiet && self.log_level.is_none()
    }
}

/// Whether text on a stream may be coloured: a terminal, and the user has not set `NO_COLOR`.
#[must_use]
pub fn may_colour(stream: &impl IsTerminal) -> bool {
    // https://no-color.org: set and not empty, whatever the value.
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let capable = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
    stream.is_terminal() && capable && !refused
}

/// Starts logging to stderr. Only the first call has an effect.
pub fn init(verbosity: Verbosity) {
    stderr::set_json(verbosity.log_format == LogFormat::Json);
    let lines = tracing_subscriber::fmt()
        .with_max_level(level(verbosity))
        .with_writer(Stderr::default)
        // Reporting them panics when stderr is closed.
        .log_internal_errors(false)
        .with_ansi(may_colour(&io::stderr()))
        .with_timer(time::uptime());
    let started = match verbosity.log_format {
        LogFormat::Text => lines
            .with_target(verbosity.verbose > 0)
            .compact()
            .try_init(),
        // The time of day, since lines of several hosts are merged.
        LogFormat::Json => lines
            .with_timer(time::SystemTime)
            .json()
            .flatten_event(true)
            .try_init(),
    };
    if started.is_err() {
        tracing::debug!("logging was started before");
    }
}

/// Prints why a command fails, in one line.
pub fn report_failure(code: ExitCode, why: &str) {
    if stderr::is_json() {
        tracing::error!(exit_code = code.code(), "{why}");
    } else {
        // Best effort: if stderr is closed, only the exit code remains.
        let _ = writeln!(Stderr::default(), "ssi-hv: error: {why}");
    }
}

fn level(verbosity: Verbosity) -> LevelFilter {
    match (verbosity.log_level, verbosity.quiet, verbosity.verbose) {
        (Some(LogLevel::Error), ..) => LevelFilter::ERROR,
        (Some(LogLevel::Warn), ..) | (None, true, _) => LevelFilter::WARN,
        (Some(LogLevel::Info), ..) | (None, false, 0) => LevelFilter::INFO,
        (Some(LogLevel::Debug), ..) | (None, false, 1) => LevelFilter::DEBUG,
        (Some(LogLevel::Trace), ..) | (None, false, _) => LevelFilter::TRACE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_choose_the_level() {
        let with = |verbose, quiet| {
            level(Verbosity {
                verbose,
                quiet,
                ..Verbosity::default()
            })
        };
        assert_eq!(with(0, true), LevelFilter::WARN);
        assert_eq!(with(0, false), LevelFilter::INFO);
        assert_eq!(with(1, false), LevelFilter::DEBUG);
        assert_eq!(with(5, false), LevelFilter::TRACE);
        let error = level(Verbosity {
            log_level: Some(LogLevel::Error),
            ..Verbosity::default()
        });
        assert_eq!(error, LevelFilter::ERROR);
    }
}
