//! `ssi-hv move`.

use ssi_hv::control_socket::client::call;
use ssi_hv::control_socket::protocol::{MoveBody, MoveTarget};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;

use super::control::{of_vm, vm_entry};
use super::status::running;
use super::{Failure, print};
use crate::cli::control::MoveConfig;

/// Moves a vCPU to another node, and returns when it runs there.
pub fn move_vcpu(config: &MoveConfig) -> Result<ExitCode, Failure> {
    let running = running()?;
    let (entry, who) = vm_entry(&running, &config.vm)?;
    let target = MoveTarget {
        cpu: config.cpu,
        node: config.to.clone(),
    };
    let moved = call(&entry.path, Method::Post, "/v1/move", Some(&target));
    let MoveBody { cpu, node, address } = of_vm(&who, moved)?;
    let place = address.unwrap_or_else(|| "primary".to_owned());
    print(&format!(
        "{who}: vCPU {cpu} runs on node {node} ({place})\n"
    ))?;
    Ok(ExitCode::Success)
}
