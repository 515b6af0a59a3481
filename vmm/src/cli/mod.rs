//! The command line: what was typed becomes an [`Action`], or one line that says what is wrong.

pub mod bench;
pub mod control;
pub mod generate;
pub mod node;
pub mod nodes;
pub mod pki;
pub mod report;
mod run;
pub mod status;
pub mod top;
pub mod up;
pub mod verbosity;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Args, FromArgMatches, Parser, Subcommand};
use ssi_hv::cluster::{self, ClusterError};
use ssi_hv::config::file::ConfigFileError;
use ssi_hv::config::node_arg::NodeArg;
use ssi_hv::config::{Choice, NodeSettings, RunSettings, file, planned};
use ssi_hv::logging::Verbosity;

use self::bench::{
    BenchClientsConfig, BenchCoherenceConfig, BenchCommand, BenchFaultConfig, BenchMemoryConfig,
    BenchStartConfig, BenchTransportConfig,
};
use self::control::{ControlCommand, ControlConfig};
use self::generate::{CompletionsConfig, ManConfig};
use self::node::{EvictConfig, NodeCli, NodeRef};
use self::nodes::NodesConfig;
use self::pki::PkiCommand;
use self::report::ReportConfig;
use self::run::RunArgs;
use self::status::StatusConfig;
use self::top::TopConfig;
use self::up::UpConfig;
use self::verbosity::VerbosityArgs;

/// One virtual machine whose memory is spread over several hosts.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "ssi-hv",
    version,
    arg_required_else_help = true,
    subcommand_required = true,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_help = "`ssi-hv COMMAND --help` has the flags of a command. Exit codes: docs/exit-codes.md."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    verbosity: VerbosityArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Boot a guest whose memory may be spread over donors
    Run(Box<RunArgs>),
    /// Lend memory of this host to guests on others
    Node(Box<NodeCli>),
    /// Run vCPUs of a VM for the node that starts this
    #[command(hide = true)]
    NodeVm,
    /// Start the nodes and the VM of a file, and stop them at the end
    Up(UpConfig),
    /// Show running VMs and nodes
    Status(StatusConfig),
    /// List the nodes that are registered in an etcd
    Nodes(NodesConfig),
    /// Show a VM's faults, links and memory, kept up to date
    Top(TopConfig),
    /// Pause a VM
    Pause(ControlConfig),
    /// Resume a paused VM
    Resume(ControlConfig),
    /// Press the power button of a VM, so that its guest shuts down
    Shutdown(control::ShutdownConfig),
    /// End a VM at once, like a power cut
    Kill(ControlConfig),
    /// Move a vCPU of a VM on several hosts to another one, while the guest runs
    Move(control::MoveConfig),
    /// Add memory to a running VM, or remove it
    Hotplug(control::HotplugConfig),
    /// Move the memory of a donor to others while the guest runs, so that the donor can leave
    Drain(control::DrainConfig),
    /// Move memory to donors with less than their share, such as new ones, while the guest runs
    Rebalance(control::RebalanceConfig),
    /// Check whether this host is ready, and how to fix what is not
    Doctor(DoctorConfig),
    /// Measure what remote memory costs
    #[command(subcommand, arg_required_else_help = true)]
    Bench(BenchCommand),
    /// Issue and revoke the certificates of a cluster
    #[command(subcommand, arg_required_else_help = true)]
    Pki(PkiCommand),
    /// Turn the report of a run, or a comparison of transports, into an HTML page
    Report(ReportConfig),
    /// Print completions for a shell
    Completions(CompletionsConfig),
    /// Write man pages
    Man(ManConfig),
}

/// The flags of `ssi-hv doctor`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct DoctorConfig {
    /// Compare clocks with a node that a VM of this host is to have vCPUs on; repeatable
    #[arg(long = "node", value_name = "HOST:PORT,cpus=N")]
    pub nodes: Vec<NodeArg>,
    /// Show the nodes the VM's certificate in this directory; each needs name=NAME then
    #[arg(long, value_name = "DIR", requires = "nodes")]
    pub credentials: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Action {
    /// Boot a guest.
    Run(Box<RunSettings>),
    /// Lend memory.
    Node(Box<NodeSettings>),
    /// End what a member has on a node.
    Evict(EvictConfig),
    /// Make a node read its credentials again.
    Reload(NodeRef),
    /// Run vCPUs of a VM for a node.
    NodeVm,
    /// Start nodes and a VM.
    Up(UpConfig),
    /// Ask what runs here.
    Status(StatusConfig),
    /// List the nodes of a cluster.
    Nodes(NodesConfig),
    /// Watch a VM.
    Top(TopConfig),
    /// Control a VM: pause, resume or end it.
    Control(ControlCommand),
    /// Move a vCPU to another host.
    Move(control::MoveConfig),
    /// Give a VM more memory.
    Hotplug(control::HotplugConfig),
    /// Drain a donor.
    Drain(control::DrainConfig),
    /// Rebalance the memory at donors.
    Rebalance(control::RebalanceConfig),
    /// Look at this host.
    Doctor(DoctorConfig),
    /// Measure faults. The configuration is not validated yet.
    BenchFault(BenchFaultConfig),
    /// Measure scans, threads, writes and growth. The configuration is not validated yet.
    BenchMemory(BenchMemoryConfig),
    /// Measure clients. The configuration is not validated yet.
    BenchClients(BenchClientsConfig),
    /// Measure a start. The configuration is not validated yet.
    BenchCoherence(BenchCoherenceConfig),
    BenchCoherenceNode,
    BenchStart(BenchStartConfig),
    /// Measure transports. The configuration is not validated yet.
    BenchTransport(BenchTransportConfig),
    /// Issue and revoke certificates.
    Pki(PkiCommand),
    /// Make a page of a report.
    Report(ReportConfig),
    /// Write man pages.
    Man(ManConfig),
    /// Say what this build contains, and what it finds on this host.
    Version,
    /// Print a text that was asked for, such as the help.
    Print(String),
}

/// What was typed.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// What is to be done.
    pub action: Action,
    /// How much to say meanwhile.
    pub verbosity: Verbosity,
}

/// Why the command line cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A command, flag or value that is wrong, in one line.
    #[error("{0}")]
    Usage(String),
    /// Nothing was asked for: the help, for stderr.
    #[error("{0}")]
    NothingAsked(String),
    /// The configuration file is wrong.
    #[error(transparent)]
    File(#[from] ConfigFileError),
    /// The file of a cluster is wrong.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// A command line that is not followed, and how to say so.
#[derive(Debug)]
pub struct Refused {
    /// Why not.
    pub error: CliError,
    /// How much to say, and in which form; the default when that is not known.
    pub verbosity: Verbosity,
    /// Whether a command in the guest was asked for: the caller takes most exit codes for that
    /// command's.
    pub exec: bool,
}

/// Reads the command line; the first argument is the name of the program.
///
/// # Errors
///
/// If it cannot be followed.
pub fn parse<I, T>(arguments: I) -> Result<Invocation, Refused>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString>,
{
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let matched = generate::command().try_get_matches_from(&arguments);
    let parsed = matched.and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches)?;
        Ok((cli, matches))
    });
    match parsed {
        Ok((cli, matches)) => {
            let verbosity = cli.verbosity.into();
            let in_file = match &cli.command {
                Command::Run(args) => args.file.clone(),
                _ => None,
            };
            action(cli, &matches)
                .map(|action| Invocation { action, verbosity })
                .map_err(|error| Refused {
                    error,
                    verbosity,
                    exec: names_exec(&arguments)
                        || in_file.is_some_and(|path| file::has_key(&path, &["exec"])),
                })
        }
        Err(error) => {
            let refused = |why| Refused {
                error: why,
                verbosity: Verbosity::default(),
                exec: names_exec(&arguments),
            };
            match error.kind() {
                ErrorKind::DisplayVersion if asks_for_more(&arguments) => Ok(Invocation {
                    action: Action::Version,
                    verbosity: Verbosity::default(),
                }),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Invocation {
                    action: Action::Print(error.render().to_string()),
                    verbosity: Verbosity::default(),
                }),
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                    let help = error.render().to_string();
                    Err(refused(CliError::NothingAsked(help)))
                }
                _ => {
                    let line = one_line(&error, &command_named(&arguments));
                    Err(refused(CliError::Usage(line)))
                }
            }
        }
    }
}

/// Whether the version was asked for with `-v`, before or behind it.
fn asks_for_more(arguments: &[OsString]) -> bool {
    let words = arguments.iter().skip(1).filter_map(|word| word.to_str());
    words.into_iter().any(|word| {
        let letters = word.strip_prefix('-').unwrap_or_default();
        let short = !letters.is_empty() && letters.chars().all(|letter| "vV".contains(letter));
        word == "--verbose" || short && letters.contains('v')
    })
}

/// Whether a command line, be it wrong, asks for a command in the guest.
fn names_exec(arguments: &[OsString]) -> bool {
    arguments.iter().any(|argument| {
        argument
            .to_str()
            .is_some_and(|text| text == "--exec" || text.starts_with("--exec="))
    })
}

fn action(cli: Cli, matches: &ArgMatches) -> Result<Action, CliError> {
    Ok(match cli.command {
        Command::Run(args) => run_action(*args, matches)?,
        Command::Node(cli) => cli.action(),
        Command::NodeVm => Action::NodeVm,
        Command::Up(config) => Action::Up(config),
        Command::Status(config) => Action::Status(config),
        Command::Top(config) => Action::Top(config),
        Command::Pause(config) => Action::Control(ControlCommand::Pause(config)),
        Command::Resume(config) => Action::Control(ControlCommand::Resume(config)),
        Command::Shutdown(config) => Action::Control(ControlCommand::Shutdown(config)),
        Command::Kill(config) => Action::Control(ControlCommand::Kill(config)),
        Command::Nodes(config) => Action::Nodes(config),
        Command::Move(config) => Action::Move(config),
        Command::Hotplug(config) => Action::Hotplug(config),
        Command::Drain(config) => Action::Drain(config),
        Command::Rebalance(config) => Action::Rebalance(config),
        Command::Doctor(config) => Action::Doctor(config),
        Command::Bench(BenchCommand::Fault(config)) => Action::BenchFault(config),
        Command::Bench(BenchCommand::Clients(config)) => Action::BenchClients(config),
        Command::Bench(BenchCommand::Memory(config)) => Action::BenchMemory(config),
        Command::Bench(BenchCommand::Coherence(config)) => Action::BenchCoherence(config),
        Command::Bench(BenchCommand::CoherenceNode) => Action::BenchCoherenceNode,
        Command::Bench(BenchCommand::Start(config)) => Action::BenchStart(config),
        Command::Bench(BenchCommand::Transport(config)) => Action::BenchTransport(config),
        Command::Pki(command) => Action::Pki(command),
        Command::Report(config) => Action::Report(config),
        Command::Completions(config) => Action::Print(generate::completions(config.shell)),
        Command::Man(config) => Action::Man(config),
    })
}

fn run_action(args: RunArgs, matches: &ArgMatches) -> Result<Action, CliError> {
    let print = args.print_config;
    let of_run = matches.subcommand().map_or(matches, |(_, of_run)| of_run);
    let settings = args.settings(of_run)?;
    Ok(if print {
        Action::Print(settings.printed()?)
    } else {
        Action::Run(Box::new(cluster::with_donors(settings)?))
    })
}

/// Parses the words of a choice, which help and completions can show.
fn words<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    let all = T::ALL.iter();
    let values = all.map(|(_, word, help)| PossibleValue::new(*word).help(*help));
    PossibleValuesParser::new(values).try_map(|word| T::named(&word).ok_or("not a known word"))
}

/// What clap says over several lines, in one: the error, its tips, and where to look.
fn one_line(error: &clap::Error, command: &str) -> String {
    let text = error.render().to_string();
    let verb = command.strip_prefix("ssi-hv ").unwrap_or_default();

    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(value)) => Some(value.as_str()),
        _ => None,
    };
    let planned = match error.kind() {
        ErrorKind::UnknownArgument => {
            context(ContextKind::InvalidArg).and_then(|name| planned::flag(verb, name))
        }
        _ => None,
    };
    if let Some(planned) = planned {
        return format!(
            "{} is not there yet in this build; {}",
            [planned.command, planned.name].join(" ").trim_start(),
            planned.instead
        );
    }

    let said: Vec<_> = text
        .lines()
        .take_while(|line| !line.starts_with("Usage: ") && !line.starts_with("For more"))
        .map(|line| line.trim().trim_start_matches("error: "))
        .filter(|line| !line.is_empty() && !line.starts_with("tip: to pass"))
        .map(|line| line.trim_start_matches("tip: ").trim_matches(['[', ']']))
        .collect();
    let said = said
        .join("; ")
        .replace(":; ", ": ")
        .replace("invalid digit found in string", "not a whole number")
        .replace("number too large to fit in target type", "too large");
    format!("{said}; see `{command} --help`")
}

/// The command that was meant: `ssi-hv bench fault` of `ssi-hv -v bench fault --memory 1G`.
fn command_named(arguments: &[OsString]) -> String {
    let top = generate::command();
    let mut command = &top;
    let mut words = vec![command.get_name()];
    for argument in arguments.iter().skip(1).filter_map(|word| word.to_str()) {
        match command.find_subcommand(argument) {
            Some(found) => {
                command = found;
                words.push(found.get_name());
            }
            None if argument.starts_with('-') => {}
            None => break,
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests;
