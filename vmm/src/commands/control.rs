//! `ssi-hv pause`, `resume`, `shutdown` and `kill`.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use ssi_hv::config::name::called;
use ssi_hv::control_socket::client::{ClientError, call};
use ssi_hv::control_socket::directory::{Entry, Kind};
use ssi_hv::control_socket::protocol::StateBody;
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;
use ssi_hv::instance::LATE_END_TIME_MAX;
use ssi_hv::readable::readable_within;
use ssi_hv::status::VmState;

use super::status::{named, running};
use super::{Failure, print};
use crate::cli::control::ControlCommand;

/// Deadline for the end of a killed VM: more than the VM's own limit.
const KILL_TIME_MAX: Duration = LATE_END_TIME_MAX.saturating_add(Duration::from_secs(5));

/// Sends a command to a VM, and waits for its result.
pub fn control(command: &ControlCommand) -> Result<ExitCode, Failure> {
    let running = running()?;
    let (entry, who) = vm_entry(&running, command.vm())?;
    let (wait, said) = match command {
        ControlCommand::Shutdown(config) if config.wait == 0 => {
            of_vm(&who, send(entry, command))?;
            (None, format!("{who}: its power button is pressed\n"))
        }
        ControlCommand::Shutdown(config) => {
            let process = Process::open(entry)?;
            of_vm(&who, send(entry, command))?;
            let limit = Duration::from_secs(config.wait.into());
            (Some((process, limit)), format!("{who}: ended\n"))
        }
        ControlCommand::Kill(_) => {
            let process = Process::open(entry)?;
            match send(entry, command) {
                // The VM may end before it has sent its answer.
                Ok(_) | Err(ClientError::Http(_) | ClientError::Body(_)) => {}
                Err(error) => return Err(anyhow!(error).context(who).into()),
            }
            (Some((process, KILL_TIME_MAX)), format!("{who}: ended\n"))
        }
        ControlCommand::Pause(_) | ControlCommand::Resume(_) => {
            let said = match of_vm(&who, send(entry, command))? {
                VmState::Starting => "starting",
                VmState::Running => "running",
                VmState::Paused if matches!(command, ControlCommand::Resume(_)) => {
                    "paused still, until its donors can be reached"
                }
                VmState::Paused => "paused",
                VmState::Ending => "ending",
            };
            (None, format!("{who}: {said}\n"))
        }
    };
    if let Some((process, limit)) = wait
        && !process
            .wait_for_end(limit)
            .context("cannot wait for its end")?
    {
        let remedy = match command {
            ControlCommand::Kill(_) => format!("SIGKILL ends process {}", entry.pid),
            _ => format!("`ssi-hv kill {who}` ends it"),
        };
        let limit = limit.as_secs();
        return Err(anyhow!("{who} has not ended within {limit} s; {remedy}").into());
    }
    print(&said)?;
    Ok(ExitCode::Success)
}

/// Returns the socket of a VM, and its displayed name.
pub fn vm_entry<'a>(running: &'a [Entry], vm: &str) -> Result<(&'a Entry, String), Failure> {
    let entry = named(running, vm)?;
    if entry.kind == Kind::Node {
        return Err(anyhow!("process {} is a node, not a VM; SIGTERM ends it", entry.pid).into());
    }
    Ok((entry, called(entry.name.as_ref(), entry.pid)))
}

/// Adds the VM's name to an error of its answer.
pub fn of_vm<T>(who: &str, answer: Result<T, ClientError>) -> Result<T, Failure> {
    answer.map_err(|error| anyhow!(error).context(who.to_owned()).into())
}

fn send(entry: &Entry, command: &ControlCommand) -> Result<VmState, ClientError> {
    let body: StateBody = call(&entry.path, Method::Post, command.path(), None::<&()>)?;
    Ok(body.state)
}

/// A process whose end can be waited for.
struct Process(OwnedFd);

impl Process {
    /// Opens the process of a socket. The VM answers afterwards, so its process id cannot have been
    /// reused.
    fn open(entry: &Entry) -> Result<Self, anyhow::Error> {
        let number = i32::try_from(entry.pid).context("process number")?;
        let pid = Pid::from_raw(number).context("process number")?;
        let process = pidfd_open(pid, PidfdFlags::empty());
        let process = process.with_context(|| format!("cannot watch process {number}"))?;
        Ok(Self(process))
    }

    /// Returns whether it ends within `limit`.
    fn wait_for_end(&self, limit: Duration) -> io::Result<bool> {
        readable_within(&self.0, limit)
    }
}
