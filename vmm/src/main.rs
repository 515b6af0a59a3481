//! The `ssi-hv` command: parses the command line, runs the command, and ends with its exit code.

mod cli;
mod commands;

use std::io::{self, Write as _};
use std::process;

use ssi_hv::exit::ExitCode;
use ssi_hv::logging::LogLevel;
use ssi_hv::{compute, core_dumps, instance, logging, open_files, progress, stderr};

use crate::cli::{Action, CliError, Invocation, Refused};
use crate::commands::{
    Failure, bench, control, doctor, drain, evict, man, moving, node, nodes, pki, plug, print,
    rebalance, report, status, top, up,
};

fn main() -> process::ExitCode {
    let outcome = match cli::parse(std::env::args_os()) {
        Ok(invocation) => follow(invocation),
        Err(Refused {
            error: CliError::NothingAsked(help),
            ..
        }) => {
            // Best effort: if stderr is closed, only the exit code remains.
            let _ = write!(io::stderr(), "{help}");
            return ExitCode::Usage.into();
        }
        Err(refused) => Err(failure(refused)),
    };
    let code = outcome.unwrap_or_else(|failure| {
        logging::report_failure(failure.code(), &failure.one_line());
        failure.code()
    });
    stderr::flush();
    code.into()
}

fn failure(refused: Refused) -> Failure {
    logging::init(refused.verbosity);
    let failure = Failure::new(ExitCode::Usage, refused.error);
    if refused.exec {
        failure.with_exec()
    } else {
        failure
    }
}

fn follow(invocation: Invocation) -> Result<ExitCode, Failure> {
    let mut verbosity = invocation.verbosity;
    let bench = matches!(
        invocation.action,
        Action::BenchFault(_)
            | Action::BenchMemory(_)
            | Action::BenchClients(_)
            | Action::BenchCoherence(_)
            | Action::BenchCoherenceNode
            | Action::BenchStart(_)
            | Action::BenchTransport(_)
    );
    let exec = match &invocation.action {
        Action::Run(config) => config.exec.is_some(),
        Action::Up(config) => up::has_command(config),
        _ => false,
    };
    if bench && verbosity.is_default() {
        // Its own donors would log every lease between the results.
        verbosity.quiet = true;
    }
    if exec && verbosity.is_default() {
        // Messages must not interleave with the output of the guest's command.
        verbosity.log_level = Some(LogLevel::Error);
    }
    progress::allow(invocation.verbosity);
    logging::init(verbosity);
    if bench
        || matches!(
            invocation.action,
            Action::Hotplug(_) | Action::Drain(_) | Action::Rebalance(_)
        )
    {
        // The other commands handle signals themselves.
        progress::clear_on_signals();
    }
    if bench || matches!(invocation.action, Action::Run(_) | Action::Node(_)) {
        open_files::raise_limit();
    }
    if matches!(
        invocation.action,
        Action::Run(_) | Action::Node(_) | Action::NodeVm
    ) {
        core_dumps::forbid();
    }
    match invocation.action {
        Action::Run(settings) => instance::run(&settings),
        Action::Node(settings) => node::node(&settings),
        Action::Evict(config) => evict::evict(&config),
        Action::Reload(config) => evict::reload(&config),
        Action::NodeVm => Ok(compute::serve()),
        Action::Up(config) => up::up(&config, verbosity),
        Action::BenchFault(config) => bench::fault(&config),
        Action::Status(config) => status::status(&config),
        Action::Nodes(config) => nodes::nodes(&config),
        Action::Top(config) => top::top(&config),
        Action::Control(command) => control::control(&command),
        Action::Move(config) => moving::move_vcpu(&config),
        Action::Hotplug(config) => plug::hotplug(&config),
        Action::Drain(config) => drain::drain(&config),
        Action::Rebalance(config) => rebalance::rebalance(&config),
        Action::BenchClients(config) => bench::clients(&config),
        Action::BenchMemory(config) => bench::memory(&config),
        Action::BenchCoherence(config) => bench::coherence(&config),
        Action::BenchCoherenceNode => bench::coherence_node(),
        Action::BenchStart(config) => bench::start(&config),
        Action::BenchTransport(config) => bench::transport(&config),
        Action::Doctor(config) => doctor::doctor(config),
        Action::Pki(command) => pki::pki(&command),
        Action::Report(config) => report::report(&config),
        Action::Man(config) => man::man(&config),
        Action::Version => print(&ssi_hv::version::text()).map(|()| ExitCode::Success),
        Action::Print(text) => print(&text).map(|()| ExitCode::Success),
    }
}
