//! `ssi-hv up`: starts the nodes and the VM of a file, and stops them at the end.
//!
//! All its processes end with it, however it ends: see [`child`] and [`heartbeat`].

mod before_exec;
mod child;
mod events;
mod heartbeat;
mod namespace;
mod nodes;

use std::fs::File;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use fabric_host::lock_file;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use ssi_hv::cluster::{Cluster, command_line};
use ssi_hv::config::file::{has_key, named_file};
use ssi_hv::config::{Choice as _, RunSettings};
use ssi_hv::control_socket::directory::Directory;
use ssi_hv::exit::ExitCode;
use ssi_hv::forced_end;
use ssi_hv::instance::LATE_END_TIME_MAX;
use ssi_hv::logging::{LogFormat, Verbosity};
use ssi_hv::signals;

use self::child::{Outputs, Running, ending};
use self::events::{Event, EventReceiver, EventSender};
use self::nodes::Nodes;
use super::{Failure, print};
use crate::cli::up::UpConfig;

/// How long the file may still be locked after another `up` was killed: a process that it was
/// starting has the lock until it ends, which is at once.
const LEFT_TIME_MAX: Duration = Duration::from_secs(1);

/// Margin beyond the VM's own limit for its end after a signal.
const VM_END_MARGIN: Duration = Duration::from_secs(10);

/// Follows the file until the VM has ended, and returns the VM's exit code.
pub fn up(config: &UpConfig, verbosity: Verbosity) -> Result<ExitCode, Failure> {
    let result = follow(config, verbosity);
    if has_command(config) {
        result.map_err(Failure::with_exec)
    } else {
        result
    }
}

fn follow(config: &UpConfig, verbosity: Verbosity) -> Result<ExitCode, Failure> {
    let path = &config.file;
    let cluster = Cluster::read(path)?;
    if config.print_config {
        let printed = cluster
            .printed()
            .map_err(|error| Failure::new(ExitCode::Usage, error))?;
        print(&printed)?;
        return Ok(ExitCode::Success);
    }
    cluster.validate(path)?;
    if config.check {
        print(&plan(&cluster))?;
        return Ok(ExitCode::Success);
    }
    start(path, &cluster, verbosity)
}

/// Returns whether the VM of the file runs a command, whose output is ours. The file may be
/// invalid.
pub fn has_command(config: &UpConfig) -> bool {
    let file = &config.file;
    has_key(file, &["vm", "exec"])
        || named_file(file, "vm").is_some_and(|vm| has_key(&vm, &["exec"]))
}

/// Describes what would be started.
fn plan(cluster: &Cluster) -> String {
    let mut plan = String::new();
    for node in &cluster.nodes {
        let (place, config) = (node.placement(), &node.config);
        let listen = if node.place.namespace {
            "an address that is chosen".to_owned()
        } else {
            config.listen.to_string()
        };
        let memory = config.memory;
        plan += &format!("node {}: {place}, lends {memory} on {listen}\n", node.name);
    }
    let kernel = cluster.vm.kernel.as_deref().unwrap_or(Path::new("?"));
    plan += &format!(
        "VM: {} of memory, {} CPU(s), boots {}\n",
        cluster.vm.memory,
        cluster.vm.cpus,
        kernel.display()
    );
    plan
}

fn start(path: &Path, cluster: &Cluster, verbosity: Verbosity) -> Result<ExitCode, Failure> {
    let _only = claim(path)?;
    refuse_second(&cluster.vm)?;
    let (sender, events) = events::queue();
    // Before anything is started, so that no signal ends this process in between.
    watch_signals(&sender)?;
    let mut up = Up {
        cluster,
        verbosity,
        sender,
        events,
        signal: None,
    };
    let mut nodes = Nodes::new(cluster, verbosity)?;
    let result = up.run(&mut nodes);
    nodes.stop(&mut up);
    result
}

/// Locks the file for this process. The kernel releases the lock when this process ends.
fn claim(path: &Path) -> Result<File, Failure> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    match lock_file(&file, LEFT_TIME_MAX) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(Failure::new(
                ExitCode::Usage,
                anyhow!(
                    "{} is up already, by another `ssi-hv up`; stop that first, or use another file",
                    path.display()
                ),
            ));
        }
        // Some network file systems.
        Err(error) => tracing::warn!("{} cannot be locked: {error}", path.display()),
        Ok(()) => {}
    }
    Ok(file)
}

/// Fails when a VM of this name runs, before nodes are started for another one.
fn refuse_second(vm: &RunSettings) -> Result<(), Failure> {
    let Some(name) = &vm.name else { return Ok(()) };
    if let Some(other) = Directory::vm_named(name)? {
        return Err(Failure::new(
            ExitCode::Usage,
            anyhow!(
                "a VM named {name} runs already, as process {}; stop it, or choose another name",
                other.pid
            ),
        ));
    }
    Ok(())
}

/// Forwards the first signal; the second one ends this process and thereby its children.
fn watch_signals(events: &EventSender) -> Result<(), Failure> {
    let mut signals = Signals::new(signals::ends()).context("cannot watch for signals")?;
    let events = events.clone();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut forwarded = false;
            for signal in signals.forever() {
                if forwarded {
                    forced_end::at_once(code_of(signal));
                }
                forwarded = true;
                events.send(Event::Signal(signal));
            }
        })
        .context("cannot start a thread")?;
    Ok(())
}

fn code_of(signal: i32) -> ExitCode {
    match signal {
        SIGINT => ExitCode::Interrupted,
        _ => ExitCode::Terminated,
    }
}

/// The running cluster.
#[derive(Debug)]
struct Up<'a> {
    cluster: &'a Cluster,
    verbosity: Verbosity,
    sender: EventSender,
    events: EventReceiver,
    /// The signal that requested the end.
    signal: Option<i32>,
}

impl Up<'_> {
    fn run(&mut self, nodes: &mut Nodes<'_>) -> Result<ExitCode, Failure> {
        nodes.start(&self.sender)?;
        let reached = match nodes.await_ready(self)? {
            Some(reached) => reached,
            // The end was requested before there was a VM.
            None => return Ok(self.signal.map_or(ExitCode::Terminated, code_of)),
        };
        self.run_vm(&self.cluster.vm_with(&reached), nodes)
    }

    /// Returns the next event before `deadline`, if there is one.
    fn next(&mut self, deadline: Option<Instant>) -> Event {
        let event = self.events.next(deadline);
        if let Event::Signal(signal) = event {
            self.signal = Some(signal);
        }
        event
    }

    /// Runs the VM in the foreground: it inherits console and messages.
    fn run_vm(&mut self, vm: &RunSettings, nodes: &mut Nodes<'_>) -> Result<ExitCode, Failure> {
        let index = self.cluster.nodes.len();
        let (ours, theirs) = pipe().context("cannot make a pipe")?;
        let mut command = own_program()?;
        let words =
            command_line::vm_arguments(vm).map_err(|error| Failure::new(ExitCode::Usage, error))?;
        command.args(words);
        command.args(flags_of(self.verbosity));
        let fd = before_exec::inherit(&mut command, &theirs);
        command.arg(format!("--end-with-fd={fd}"));
        let mut lifeline = Some(ours);
        tracing::info!("VM: starts, with {index} node(s)");
        let mut running = Running::start(&mut command, Outputs::Shared, index, &self.sender)
            .context("cannot start the VM")?;
        drop(theirs);
        let mut deadline = None;
        loop {
            match self.next(deadline) {
                Event::Ended(ended) if ended == index => {
                    let status = running.status().context("cannot wait for the VM")?;
                    return self.verdict(status, lifeline.is_none());
                }
                Event::Signal(_) => {
                    tracing::info!("VM: is stopped");
                    lifeline = None;
                    deadline = Some(Instant::now() + LATE_END_TIME_MAX + VM_END_MARGIN);
                }
                Event::Late => {
                    tracing::error!("VM: does not end, and is killed");
                    running.kill();
                    return Ok(self.signal.map_or(ExitCode::HostError, code_of));
                }
                other => nodes.take(other),
            }
        }
    }

    /// Converts the exit status of the VM.
    fn verdict(&self, status: ExitStatus, stopped: bool) -> Result<ExitCode, Failure> {
        tracing::info!("VM: ended with {}", ending(status));
        // The VM had no signal handler yet; a terminal sends signals to both of us.
        if let Some(signal @ (SIGINT | SIGTERM | SIGHUP)) = status.signal() {
            return Ok(code_of(self.signal.unwrap_or(signal)));
        }
        let Some(code) = status.code().and_then(|code| u8::try_from(code).ok()) else {
            let error = anyhow!("the VM was ended by {}", ending(status));
            return Err(Failure::new(ExitCode::HostError, error));
        };
        // The original signal may have been SIGINT, which the VM cannot know.
        if let (true, Some(signal)) = (stopped && code == ExitCode::Terminated.code(), self.signal)
        {
            return Ok(code_of(signal));
        }
        let known = ExitCode::ALL.into_iter().find(|known| known.code() == code);
        Ok(known.unwrap_or(ExitCode::Exec(code)))
    }
}

/// Returns a close-on-exec pipe: the end to keep, and the one to pass on.
fn pipe() -> io::Result<(io::PipeWriter, io::PipeReader)> {
    let (theirs, ours) = io::pipe()?;
    Ok((ours, theirs))
}

/// Returns the command for another process of this program.
fn own_program() -> Result<Command, Failure> {
    let program = std::env::current_exe().context("cannot find this program")?;
    Ok(Command::new(program))
}

/// Returns the flags of nodes: quiet by default, since their VM reports the same events.
fn flags_of_nodes(verbosity: Verbosity) -> Vec<String> {
    if verbosity.is_default() {
        return vec!["--quiet".into()];
    }
    flags_of(Verbosity {
        verbose: 0,
        // Their lines are printed with their names.
        log_format: LogFormat::Text,
        ..verbosity
    })
}

/// Returns the flags for a verbosity.
fn flags_of(verbosity: Verbosity) -> Vec<String> {
    let mut flags = vec!["--verbose".to_owned(); verbosity.verbose.into()];
    if verbosity.quiet {
        flags.push("--quiet".into());
    }
    if let Some(level) = verbosity.log_level {
        flags.push(format!("--log-level={}", level.word()));
    }
    if verbosity.log_format == LogFormat::Json {
        flags.push("--log-format=json".into());
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use ssi_hv::logging::LogLevel;

    #[test]
    fn nodes_say_no_more_than_was_asked_for() {
        let default = Verbosity::default();
        assert_eq!(flags_of_nodes(default), ["--quiet"]);
        let with = |log_level, verbose| Verbosity {
            log_level,
            verbose,
            log_format: LogFormat::Json,
            ..default
        };
        let errors = with(Some(LogLevel::Error), 0);
        assert_eq!(flags_of_nodes(errors), ["--log-level=error"]);
        assert!(flags_of_nodes(with(None, 2)).is_empty());
    }
}
