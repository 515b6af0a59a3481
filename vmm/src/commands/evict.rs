//! `ssi-hv node evict` and `ssi-hv node reload`.

use anyhow::anyhow;
use serde::Serialize;
use serde::de::DeserializeOwned;
use ssi_hv::control_socket::client::call;
use ssi_hv::control_socket::directory::{Entry, Kind};
use ssi_hv::control_socket::protocol::{EvictBody, EvictTarget, ReloadBody};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;
use ssi_hv::size::ByteSize;

use super::status::{named, running};
use super::{Failure, print};
use crate::cli::node::{EvictConfig, NodeRef};

/// Ends what a member has on a node of this host.
pub fn evict(config: &EvictConfig) -> Result<ExitCode, Failure> {
    let target = EvictTarget {
        identity: config.identity.to_string(),
    };
    let evicted: EvictBody = ask_node(&config.node, "/v1/evict", Some(&target))?;
    print(&format!(
        "{}: {} lease(s) of {} ended, {} connection(s) closed\n",
        config.identity,
        evicted.leases,
        ByteSize::from_bytes(evicted.bytes),
        evicted.connections
    ))?;
    Ok(ExitCode::Success)
}

/// Makes a node of this host read its credentials and rules again.
pub fn reload(config: &NodeRef) -> Result<ExitCode, Failure> {
    let reloaded: ReloadBody = ask_node(config, "/v1/security/reload", None::<&()>)?;
    let rules = match reloaded.rules {
        None => String::new(),
        Some(count) => format!(
            "; {count} rule(s) in force, {} lease(s) of {} ended",
            reloaded.leases,
            ByteSize::from_bytes(reloaded.bytes)
        ),
    };
    print(&format!(
        "credentials were read again; {} connection(s) closed{rules}\n",
        reloaded.closed
    ))?;
    Ok(ExitCode::Success)
}

fn ask_node<T: DeserializeOwned>(
    node: &NodeRef,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<T, Failure> {
    let running = running()?;
    let entry = match &node.node {
        Some(wanted) => named(&running, wanted)?,
        None => the_only(&running)?,
    };
    if entry.kind != Kind::Node {
        return Err(anyhow!("process {} is a VM, not a node", entry.pid).into());
    }
    let answered = call(&entry.path, Method::Post, path, body);
    Ok(answered.map_err(|error| anyhow!(error).context(format!("node {}", entry.pid)))?)
}

/// Returns the node that runs here, if it is one.
fn the_only(running: &[Entry]) -> Result<&Entry, Failure> {
    let nodes: Vec<_> = running.iter().filter(|e| e.kind == Kind::Node).collect();
    match nodes[..] {
        [one] => Ok(one),
        [] => Err(anyhow!("no node of this user runs here").into()),
        _ => {
            let listed: Vec<_> = nodes.iter().map(|entry| entry.pid.to_string()).collect();
            let listed = listed.join(", ");
            Err(anyhow!("several nodes run here; give one with --node: {listed}").into())
        }
    }
}
