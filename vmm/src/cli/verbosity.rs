//! The flags that say how much is written on stderr, and in which form.

use clap::{ArgAction, Args};
use ssi_hv::logging::{LogFormat, LogLevel, Verbosity};

use super::words;

/// The verbosity of stderr.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct VerbosityArgs {
    /// Show more on stderr; twice for everything
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = "Output")]
    verbose: u8,

    /// Show only warnings and errors on stderr
    #[arg(
        short,
        long,
        global = true,
        conflicts_with = "verbose",
        help_heading = "Output"
    )]
    quiet: bool,

    /// Show this level on stderr: error, warn, info, debug or trace
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        value_parser = words::<LogLevel>(),
        hide_possible_values = true,
        conflicts_with_all = ["verbose", "quiet"],
        help_heading = "Output"
    )]
    log_level: Option<LogLevel>,

    /// Format of messages: text, or json with one object per line
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        value_parser = words::<LogFormat>(),
        default_value = "text",
        hide_possible_values = true,
        help_heading = "Output"
    )]
    log_format: LogFormat,
}

impl From<VerbosityArgs> for Verbosity {
    fn from(args: VerbosityArgs) -> Self {
        Self {
            verbose: args.verbose,
            quiet: args.quiet,
            log_level: args.log_level,
            log_format: args.log_format,
        }
    }
}
