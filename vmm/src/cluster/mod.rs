//! `cluster.toml`: nodes that lend memory, and the VM that has it. `ssi-hv up` starts what it says,
//! and `ssi-hv run --cluster` takes the nodes of one as donors.

pub mod command_line;
mod file;
pub mod ready;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use memory_fabric::fabric::Fingerprint;
use serde::{Deserialize, Serialize};

pub use self::file::ClusterError;
use crate::config::address::{Donor, HostPort};
use crate::config::name::VmName;
use crate::config::{NodeSettings, RunSettings};

/// Where a node of this host listens when nothing is said: a free port of its own.
const LISTEN_DEFAULT: &str = "127.0.0.1:0";

/// Where namespaces are: addresses that are for measuring networks, and are routed nowhere
/// (RFC 2544, appendix C.2.2; RFC 6890), in pairs.
pub const NAMESPACE_NETWORK: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);

/// The keys of a `[[node]]` that are no flags of `ssi-hv node`: where it runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Place {
    /// What messages call it; by default node-1, node-2 and so on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<VmName>,
    /// The host on which it is started by ssh; without it, this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh: Option<String>,
    /// What is said to ssh before everything else.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ssh_options: Vec<String>,
    /// The program that is ssh.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_program: Option<PathBuf>,
    /// Where `ssi-hv` is on its host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Whether it is in a network namespace of its own, on this host.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub namespace: bool,
    /// Where the VM finds it, if not where it listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<HostPort>,
}

impl Place {
    /// Its keys.
    const KEYS: [&str; 7] = [
        "name",
        "ssh",
        "ssh-options",
        "ssh-program",
        "program",
        "namespace",
        "address",
    ];
}

/// A node to start.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What messages call it: no other one of the file has the name.
    pub name: VmName,
    /// Where it runs.
    pub place: Place,
    /// What it is told.
    pub config: NodeSettings,
}

/// What a file says.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// The VM, without the nodes as donors.
    pub vm: RunSettings,
    /// The nodes, in their order.
    pub nodes: Vec<Node>,
}

impl Node {
    /// Where it runs, in a few words.
    #[must_use]
    pub fn whereabouts(&self) -> String {
        match &self.place.ssh {
            Some(host) => format!("on {host}"),
            None if self.place.namespace => "here, in a network namespace".to_owned(),
            None => "here".to_owned(),
        }
    }

    /// Where the VM finds it, when it says that it listens at `listening`.
    #[must_use]
    pub fn reached_at(&self, listening: HostPort) -> HostPort {
        if let Some(address) = &self.place.address {
            return address.clone();
        }
        let everywhere = listening
            .host()
            .parse()
            .is_ok_and(|ip: IpAddr| ip.is_unspecified());
        if !everywhere {
            return listening;
        }
        let host = match &self.place.ssh {
            Some(destination) => command_line::host_of(destination),
            None => "localhost",
        };
        // A destination that is no host's name is one of ssh's own, and says so when it is used.
        format!("{host}:{}", listening.port())
            .parse()
            .unwrap_or(listening)
    }
}

impl Cluster {
    /// Whether there are namespaces, and nothing that leaves this host: what goes to those has
    /// addresses of their own, and passes no cable.
    fn stays_on_this_host(&self) -> bool {
        let stays = |node: &Node| {
            node.place.namespace
                || (node.place.ssh.is_none()
                    && node.place.address.is_none()
                    && !node.config.insecure)
        };
        self.vm.donors.is_empty()
            && self.nodes.iter().any(|node| node.place.namespace)
            && self.nodes.iter().all(stays)
    }

    /// The configuration of the VM when its nodes are there: `reached` has an address for each, and
    /// what it shows over UDP.
    ///
    /// Where it is not said how much of the memory is here, nodes are asked for all that they have.
    #[must_use]
    pub fn vm_with(&self, reached: &[(HostPort, Option<Fingerprint>)]) -> RunSettings {
        let all = self.vm.local_memory.is_none();
        let nodes = self.nodes.iter().zip(reached);
        let donors = nodes.map(|(node, (address, fingerprint))| Donor {
            address: address.clone(),
            memory: all.then_some(node.config.memory),
            fingerprint: *fingerprint,
        });
        let mut vm = self.vm.clone();
        vm.donors.extend(donors);
        vm.insecure |= self.stays_on_this_host();
        vm
    }
}

/// The donors of `--cluster`, beside those that are named one by one.
///
/// # Errors
///
/// If its file is wrong, or does not say where a node listens.
pub fn with_donors(mut config: RunSettings) -> Result<RunSettings, ClusterError> {
    let Some(file) = config.cluster.take() else {
        return Ok(config);
    };
    let nodes = file::read_nodes("--cluster", &file)?;
    let reached = nodes
        .iter()
        .map(|node| Ok((file::address_of(&file, node)?, None)))
        .collect::<Result<Vec<_>, ClusterError>>()?;
    let insecure = config.insecure;
    let mut config = Cluster { vm: config, nodes }.vm_with(&reached);
    config.insecure = insecure;
    Ok(config)
}
