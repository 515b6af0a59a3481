//! `ssi-hv status`.

use std::io;

use anyhow::anyhow;
use ssi_hv::control_socket::client::{ClientError, ask};
use ssi_hv::control_socket::directory::{Directory, DirectoryError, Entry, Kind};
use ssi_hv::control_socket::protocol::RefusalCode;
use ssi_hv::exit::ExitCode;
use ssi_hv::logging::may_colour;
use ssi_hv::status::{Everything, SCHEMA, VmStatus, screen};

use super::{Failure, print};
use crate::cli::status::StatusConfig;

/// Queries the running processes and prints their status.
pub fn status(config: &StatusConfig) -> Result<ExitCode, Failure> {
    let running = running()?;
    let asked: Vec<&Entry> = match &config.vm {
        None => running.iter().collect(),
        Some(wanted) => {
            let entry = named(&running, wanted)?;
            if (config.heat || config.placement) && entry.kind == Kind::Node {
                return Err(
                    anyhow!("`{wanted}` is a node; `ssi-hv status {wanted}` shows it").into(),
                );
            }
            vec![entry]
        }
    };
    let everything = everything(&asked, config)?;
    if config.json {
        print(&format!("{}\n", serde_json::to_string_pretty(&everything)?))?;
    } else {
        print(&text(&everything, config.heat || config.placement))?;
    }
    Ok(ExitCode::Success)
}

/// Returns all running processes.
pub(super) fn running() -> Result<Vec<Entry>, DirectoryError> {
    let mut running = Vec::new();
    for directory in Directory::for_looking()? {
        running.extend(directory.sockets()?);
    }
    Ok(running)
}

/// Returns the process that the user named.
pub(super) fn named<'a>(running: &'a [Entry], wanted: &str) -> Result<&'a Entry, Failure> {
    let found: Vec<_> = running.iter().filter(|e| e.is_called(wanted)).collect();
    let listed = |entries: &[&Entry]| {
        let names = entries.iter().map(|entry| match &entry.name {
            Some(name) => format!("{name} ({})", entry.pid),
            None => entry.pid.to_string(),
        });
        names.collect::<Vec<_>>().join(", ")
    };
    match found[..] {
        [one] => Ok(one),
        [] if running.is_empty() => {
            Err(anyhow!("`{wanted}` does not run here; no VM and no node of this user does").into())
        }
        [] => {
            let all: Vec<_> = running.iter().collect();
            Err(anyhow!(
                "`{wanted}` does not run here; what runs is {}",
                listed(&all)
            )
            .into())
        }
        _ => Err(anyhow!(
            "{} are called `{wanted}`; name a process: {}",
            found.len(),
            listed(&found)
        )
        .into()),
    }
}

/// Queries each process. One that has just ended is skipped; one that does not answer is an error
/// if it was named, and a warning otherwise.
fn everything(asked: &[&Entry], config: &StatusConfig) -> Result<Everything, Failure> {
    let mut everything = Everything {
        schema: SCHEMA,
        vms: Vec::new(),
        nodes: Vec::new(),
    };
    for entry in asked {
        let result = match entry.kind {
            Kind::Vm => vm_status(entry, config).map(|vm| everything.vms.push(vm)),
            Kind::Node => ask(&entry.path, "/v1/status").map(|node| everything.nodes.push(node)),
        };
        match result {
            Ok(()) => {}
            Err(error) if config.vm.is_some() => {
                return Err(anyhow!(error)
                    .context(format!("process {}", entry.pid))
                    .into());
            }
            Err(ClientError::Stream(error)) if is_end(&error) => {}
            Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::Starting => {
                tracing::warn!("process {} is starting: {}", entry.pid, refusal.text);
            }
            Err(error) => tracing::warn!("process {} {:#}", entry.pid, anyhow!(error)),
        }
    }
    Ok(everything)
}

fn vm_status(entry: &Entry, config: &StatusConfig) -> Result<VmStatus, ClientError> {
    let mut status: VmStatus = ask(&entry.path, "/v1/status")?;
    if config.heat {
        status.heat = Some(ask(&entry.path, "/v1/heat")?);
    }
    if config.placement {
        status.placement = Some(ask(&entry.path, "/v1/placement")?);
    }
    Ok(status)
}

pub(super) fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

fn text(everything: &Everything, only_vms: bool) -> String {
    let colour = may_colour(&io::stdout());
    let vms = everything.vms.iter().map(|vm| {
        let shown = match (&vm.heat, &vm.placement) {
            (Some(map), _) => screen::heat::map(map, colour),
            (None, Some(placement)) => screen::placement::text(placement),
            (None, None) => return screen::vm(vm),
        };
        format!("VM {} (process {}): {shown}", vm.name, vm.pid)
    });
    let nodes = everything.nodes.iter().filter(|_| !only_vms);
    let nodes = nodes.map(screen::node);
    let parts: Vec<String> = vms.chain(nodes).collect();
    if parts.is_empty() {
        let what = if only_vms {
            "no VM"
        } else {
            "no VM and no node"
        };
        return format!("{what} of this user runs here\n");
    }
    parts.join("\n")
}
