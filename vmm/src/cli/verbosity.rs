//! How much is said on stderr, and in which form.

use clap::{ArgAction, Args, ValueEnum};

/// The least important level of messages that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Failures of a command
    Error,
    /// Problems that do not stop a command
    Warn,
    /// Events that a user needs to know once
    Info,
    /// Decisions
    Debug,
    /// Messages between nodes too
    Trace,
}

/// The format of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines of text
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// The verbosity of stderr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct Verbosity {
    /// Show more on stderr; twice for everything
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = "Output")]
    pub verbose: u8,

    /// Show only warnings and errors on stderr
    #[arg(
        short,
        long,
        global = true,
        conflicts_with = "verbose",
        help_heading = "Output"
    )]
    pub quiet: bool,

    /// Show this level on stderr: error, warn, info, debug or trace
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        value_enum,
        hide_possible_values = true,
        conflicts_with_all = ["verbose", "quiet"],
        help_heading = "Output"
    )]
    pub log_level: Option<LogLevel>,

    /// Format of messages: text, or json with one object per line
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help_heading = "Output"
    )]
    pub log_format: LogFormat,
}

impl Verbosity {
    /// Whether the user has set no verbosity.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.verbose == 0 && !self.quiet && self.log_level.is_none()
    }
}
