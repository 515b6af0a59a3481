//! `ssi-hv doctor`.

use std::io::{self, IsTerminal};

use fabric_identity::Role;
use ssi_hv::credentials;
use ssi_hv::doctor::output::{self, Style};
use ssi_hv::doctor::{ExaminedNode, Host, examine, is_ready};
use ssi_hv::exit::ExitCode;
use ssi_hv::logging::may_colour;

use super::{Failure, print};
use crate::cli::DoctorConfig;

/// Checks this host and prints the findings.
pub fn doctor(config: DoctorConfig) -> Result<ExitCode, Failure> {
    let mut findings = examine(&Host::this());
    let shown = config.credentials.as_deref();
    let shown = shown.map(|directory| credentials::load(directory, Role::Vm));
    let shown = shown.transpose().map_err(Failure::usage)?;
    let nodes = ExaminedNode::resolve(&config.nodes, shown.as_ref());
    let nodes = nodes.map_err(Failure::usage)?;
    findings.extend(nodes.iter().map(ExaminedNode::examine));
    let text = if config.json {
        output::json(&findings)?
    } else {
        output::table(&findings, style())
    };
    print(&text)?;
    Ok(if is_ready(&findings) {
        ExitCode::Success
    } else {
        ExitCode::HostError
    })
}

fn style() -> Style {
    let stdout = io::stdout();
    let width = terminal_size::terminal_size_of(&stdout).map(|(width, _)| width.0.into());
    Style {
        colour: may_colour(&stdout),
        width: width.filter(|_| stdout.is_terminal()),
    }
}
