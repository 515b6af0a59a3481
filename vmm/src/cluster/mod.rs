//! `cluster.toml`: nodes that lend memory or CPUs, and the VM that uses them. `ssi-hv up` starts them,
//! and `ssi-hv run --cluster` uses the nodes of the file.

pub mod command_line;
mod file;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod ready;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use fabric_identity::Name;
use memory_fabric::fabric::Fingerprint;
use serde::{Deserialize, Serialize};
use ssi_hv_membership::Target;

pub use self::file::ClusterError;
use crate::config::address::{Donor, HostPort};
use crate::config::name::VmName;
use crate::config::node_arg::{CpusFrom, NodeArg};
use crate::config::{NodeSettings, RunSettings};

/// Default address of a node on this host: a free port.
const LISTEN_DEFAULT: &str = "127.0.0.1:0";

/// Network of the namespaces: addresses for benchmarks, which are not routed (RFC 2544, appendix
/// C.2.2; RFC 6890), in pairs.
pub const NAMESPACE_NETWORK: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);

/// The keys of a `[[node]]` that are not flags of `ssi-hv node`: the place where it runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Place {
    /// Its name in messages; by default node-1, node-2 and so on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<VmName>,
    /// The host on which it is started by ssh; without it, this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh: Option<String>,
    /// Arguments of ssh before all others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ssh_options: Vec<String>,
    /// The ssh program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_program: Option<PathBuf>,
    /// Path of `ssi-hv` on its host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Whether it runs in a separate network namespace on this host.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub namespace: bool,
    /// Its address for the VM, if it differs from where it listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<HostPort>,
    /// Since when its vCPUs are there.
    #[serde(skip_serializing_if = "CpusFrom::is_default")]
    pub from: CpusFrom,
    /// The failure domain of the memory that it lends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
}

impl Place {
    /// Its keys.
    const KEYS: [&str; 9] = [
        "name",
        "ssh",
        "ssh-options",
        "ssh-program",
        "program",
        "namespace",
        "address",
        "from",
        "zone",
    ];
}

/// A node to start.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its name in messages, which is unique in the file.
    pub name: VmName,
    /// Where it runs.
    pub place: Place,
    /// Its settings.
    pub config: NodeSettings,
}

/// The contents of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// The VM, without the nodes of the file.
    pub vm: RunSettings,
    /// The nodes in order.
    pub nodes: Vec<Node>,
}

impl Node {
    /// Returns the name that its certificate has.
    #[must_use]
    pub fn identity(&self) -> Option<Name> {
        self.name.as_str().parse().ok()
    }

    /// Returns the failure domain of its memory, which was checked when the file was read.
    #[must_use]
    pub fn zone(&self) -> Option<Name> {
        self.place.zone.as_ref()?.parse().ok()
    }

    /// Describes where it runs.
    #[must_use]
    pub fn placement(&self) -> String {
        match &self.place.ssh {
            Some(host) => format!("on {host}"),
            None if self.place.namespace => "here, in a network namespace".to_owned(),
            None => "here".to_owned(),
        }
    }

    /// Returns its address for the VM when it listens at `listening`.
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
        // A destination that is not a host name is an alias of ssh, which fails when it is used.
        format!("{host}:{}", listening.port())
            .parse()
            .unwrap_or(listening)
    }
}

impl Cluster {
    /// Returns whether only namespaces of this host are used: their addresses are private, and
    /// their packets stay on this host.
    fn stays_on_this_host(&self) -> bool {
        let stays = |node: &Node| {
            node.place.namespace
                || (node.place.ssh.is_none()
                    && node.place.address.is_none()
                    && !node.config.insecure)
        };
        self.vm.donors.is_empty()
            && self.vm.nodes.is_empty()
            && self.nodes.iter().any(|node| node.place.namespace)
            && self.nodes.iter().all(stays)
    }

    /// Returns the configuration of the VM when its nodes are running: `reached` has the address of
    /// each, and its fingerprint for UDP.
    ///
    /// A node with `cpus` runs so many vCPUs of the VM, and lends its memory if it has less than the guest;
    /// the others lend memory alone. Without a setting for
    /// local memory, these are asked for all of it.
    #[must_use]
    pub fn vm_with(&self, reached: &[(HostPort, Option<Fingerprint>)]) -> RunSettings {
        let all = self.vm.local_memory.is_none();
        let mut vm = self.vm.clone();
        for (node, (address, fingerprint)) in self.nodes.iter().zip(reached) {
            let address = address.clone();
            // A name that no certificate can have is refused as a missing one.
            let name = self.vm.credentials.as_ref().and_then(|_| node.identity());
            match u8::try_from(node.config.cpus) {
                Ok(0) | Err(_) => vm.donors.push(Donor {
                    name,
                    address,
                    zone: node.zone(),
                    memory: all.then_some(node.config.memory),
                    fingerprint: fingerprint.filter(|_| self.vm.credentials.is_none()),
                }),
                Ok(cpus) => vm.nodes.push(NodeArg {
                    address,
                    cpus,
                    memory: Some(node.config.memory).filter(|lent| *lent < self.vm.shared_memory()),
                    name,
                    from: node.place.from,
                }),
            }
        }
        vm.stays_on_this_host = self.stays_on_this_host();
        vm.insecure |= vm.stays_on_this_host;
        vm
    }
}

/// Adds the nodes of `--cluster` to those of `--donor` and `--node`. An etcd is asked later, when the
/// VM starts.
///
/// # Errors
///
/// Fails if its file is invalid, or the address of a node is unknown.
pub fn with_donors(mut config: RunSettings) -> Result<RunSettings, ClusterError> {
    let Some(file) = config.cluster.take() else {
        return Ok(config);
    };
    let text = file.to_string_lossy();
    if Target::is_meant(&text) {
        text.parse::<Target>()?;
        config.cluster = Some(file);
        return Ok(config);
    }
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
