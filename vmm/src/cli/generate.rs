//! What is made from the definitions of the command line: shorter help, man pages, completions.

use std::path::PathBuf;

use clap::{Arg, Args, Command, CommandFactory};
use clap_complete::Shell;

use super::Cli;

/// The flags that every command has, which the help of each would repeat.
const EVERYWHERE: [&str; 5] = ["verbose", "quiet", "log_level", "log_format", "help"];

/// What the help of each command shows instead.
const SEE_TOP: &str = "-h, -v, -q, --log-level and --log-format: see `ssi-hv --help`.";

/// The help of a command: clap's default without the empty lines around the usage and before
/// [`SEE_TOP`], so that that of `run` fits on a screen.
const TEMPLATE: &str =
    "{before-help}{about-with-newline}{usage-heading} {usage}\n{all-args}{after-help}";

/// The flags of `ssi-hv man`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ManConfig {
    /// Directory for them, one file per command; created if missing
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// The flags of `ssi-hv completions`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct CompletionsConfig {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: Shell,
}

/// The command line, with the common flags shown only at the top.
#[must_use]
pub fn command() -> Command {
    let mut top = Cli::command();
    // What is shared reaches the commands here.
    top.build();
    shorten_below(top)
}

fn shorten_below(mut command: Command) -> Command {
    for below in command.get_subcommands_mut() {
        let shortened = std::mem::take(below).mut_args(hide_what_is_shared);
        // Not a text after the help: clap puts an empty line before that.
        let gap = if shortened.get_after_help().is_some() {
            "\n"
        } else {
            ""
        };
        let shortened = shortened.help_template(format!("{TEMPLATE}{gap}\n{SEE_TOP}"));
        *below = shorten_below(shortened);
    }
    command
}

fn hide_what_is_shared(arg: Arg) -> Arg {
    let shared = EVERYWHERE.contains(&arg.get_id().as_str());
    // One that is hidden stays so.
    if shared { arg.hide(true) } else { arg }
}

/// The completions for a shell, as a script for it.
#[must_use]
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ssi-hv", &mut script);
    let script = String::from_utf8_lossy(&script);
    // In the script for bash clap_complete 4.6.11 looks for commands of `ssi__hv` and calls them
    // those of this: it takes the hyphen of our name for one between commands.
    script.replace("ssi__subcmd__hv", "ssi__hv")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_but_the_top_leaves_away_what_is_shared() {
        let mut top = command();
        assert!(top.render_help().to_string().contains("--log-level"));
        for name in ["run", "node", "bench"] {
            let below = top.find_subcommand_mut(name).expect("is there");
            let help = below.render_help().to_string();
            assert!(!help.contains("  -v, --verbose"), "{help}");
            assert!(help.contains(SEE_TOP), "{help}");
        }
    }

    #[test]
    fn every_shell_gets_completions_of_flags_and_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell);
            for word in ["local-memory", "completions", "log-level"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
