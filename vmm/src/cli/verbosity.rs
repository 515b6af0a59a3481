//! How much is said on stderr, and in which form.

use clap::{ArgAction, Args, ValueEnum};

/// The least important message that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What makes a command fail
    Error,
    /// What goes on, but not as was asked
    Warn,
    /// What a user wants to know once
    Info,
    /// Decisions
    Debug,
    /// Messages between nodes too
    Trace,
}

/// The form of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// An object of JSON on each line
    Json,
}

/// How much is said on stderr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct Verbosity {
    /// Say more on stderr; twice for everything
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = "Output")]
    pub verbose: u8,

    /// Say nothing on stderr but warnings and errors
    #[arg(
        short,
        long,
        global = true,
        conflicts_with = "verbose",
        help_heading = "Output"
    )]
    pub quiet: bool,

    /// Say this much on stderr: error, warn, info, debug or trace
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

    /// Say it as text, or as json: an object on each line
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
    /// Whether the user has not said how much is to be said.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.verbose == 0 && !self.quiet && self.log_level.is_none()
    }
}
