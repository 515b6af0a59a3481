//! Reading and printing `cluster.toml`.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use fabric_identity::Name;
use serde::de::DeserializeOwned;
use ssi_hv_membership::TargetError;
use toml::{Table, Value};

use super::{Cluster, LISTEN_DEFAULT, NAMESPACE_NETWORK, Node, Place, command_line};
use crate::config::address::HostPort;
use crate::config::file::{self, ConfigFileError};
use crate::config::{NodeSettings, RunSettings, ValidationError};

/// Why the file of a cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// It cannot be read, is not TOML, or has an unknown key.
    #[error(transparent)]
    File(#[from] ConfigFileError),
    /// A part of it is invalid.
    #[error("{}: {part}: {message}", path.display())]
    Part {
        /// The file.
        path: PathBuf,
        /// The part.
        part: String,
        /// The problem and its remedy.
        message: String,
    },
    /// A node's flags are inconsistent.
    #[error("{}: node {node}", path.display())]
    Node {
        /// The file.
        path: PathBuf,
        /// The node.
        node: String,
        /// The problem.
        source: Box<ValidationError>,
    },
    /// The VM's flags are inconsistent.
    #[error("{}: [vm]", path.display())]
    Vm {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: Box<ValidationError>,
    },
    /// The address of an etcd, instead of a file, is malformed.
    #[error("--cluster: {0}")]
    Etcd(#[from] TargetError),
}

/// Returns the address of a running node of a file.
pub(super) fn address_of(path: &Path, node: &Node) -> Result<HostPort, ClusterError> {
    let address = node.reached_at(node.config.listen.clone());
    if address.port() != 0 {
        return Ok(address);
    }
    Err(part(
        path,
        node.name.as_str(),
        "its port is not known before it runs; give listen = \"HOST:PORT\" with a port, or address = \"HOST:PORT\"",
    ))
}

fn part(path: &Path, node: &str, message: impl Into<String>) -> ClusterError {
    ClusterError::Part {
        path: path.into(),
        part: format!("node {node}"),
        message: message.into(),
    }
}

impl Cluster {
    /// Reads the file of a cluster without validating its values.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be read, is malformed, or has an unknown key.
    pub fn read(path: &Path) -> Result<Self, ClusterError> {
        let text = file::read("the cluster's file", path)?;
        Self::of(path, &text)
    }

    /// Reads the text of the file at `path`, without validating its values.
    pub(super) fn of(path: &Path, text: &str) -> Result<Self, ClusterError> {
        let mut table = table_of(path, text)?;
        let nodes = take_nodes(path, &mut table)?;
        let vm = take_vm(path, &mut table)?;
        if vm.cluster.is_some() {
            return Err(ClusterError::Part {
                path: path.into(),
                part: "[vm]".into(),
                message: "cluster is for `ssi-hv run`; the nodes are in this file: remove it"
                    .into(),
            });
        }
        Ok(Self { vm, nodes })
    }

    /// Validates the values, as `ssi-hv run` and `ssi-hv node` do.
    ///
    /// # Errors
    ///
    /// Returns the first problem.
    pub fn validate(&self, path: &Path) -> Result<(), ClusterError> {
        for node in &self.nodes {
            let elsewhere = node.place.ssh.is_some() || node.place.namespace;
            let mut settings = node.config.clone();
            if elsewhere {
                // A name is resolved where the node runs.
                if settings.listen.host().parse::<IpAddr>().is_err() {
                    continue;
                }
                settings.metrics = None;
            }
            settings.insecure |= node.place.namespace;
            settings.parse().map_err(|source| ClusterError::Node {
                path: path.into(),
                node: node.name.to_string(),
                source: Box::new(source),
            })?;
        }
        let planned: Vec<_> = (0..)
            .zip(&self.nodes)
            .map(|(index, node)| (planned_address(index, node), None))
            .collect();
        self.vm_with(&planned)
            .parse()
            .map_err(|source| ClusterError::Vm {
                path: path.into(),
                source: Box::new(source),
            })?;
        Ok(())
    }

    /// Formats an equivalent file.
    ///
    /// # Errors
    ///
    /// Fails if a path in it is not UTF-8.
    pub fn printed(&self) -> Result<String, ConfigFileError> {
        let mut table = Table::new();
        table.insert("vm".into(), file::to_table(&self.vm)?.into());
        let mut nodes = Vec::new();
        for node in &self.nodes {
            let mut keys = file::to_table(&node.place)?;
            keys.insert("name".into(), node.name.to_string().into());
            keys.extend(file::to_table(&node.config)?);
            if node.place.namespace {
                // It is chosen, and refused if it is given.
                keys.remove("listen");
            }
            nodes.push(Value::from(keys));
        }
        table.insert("node".into(), nodes.into());
        toml::to_string(&table).map_err(|error| ConfigFileError::Unprintable {
            message: error.to_string(),
        })
    }
}

/// Returns a unique placeholder where the address is not known before the node runs.
fn planned_address(index: u16, node: &Node) -> HostPort {
    let address = node.reached_at(node.config.listen.clone());
    if address.port() != 0 {
        return address;
    }
    let namespace = NAMESPACE_NETWORK.to_string();
    let host = if node.place.namespace {
        &namespace
    } else {
        address.host()
    };
    let text = format!("{host}:{}", u16::MAX - index);
    text.parse().unwrap_or(address)
}

/// Reads only the nodes of the file.
pub(super) fn read_nodes(what: &'static str, path: &Path) -> Result<Vec<Node>, ClusterError> {
    let mut table = read_table(what, path)?;
    take_nodes(path, &mut table)
}

fn read_table(what: &'static str, path: &Path) -> Result<Table, ClusterError> {
    table_of(path, &file::read(what, path)?)
}

fn table_of(path: &Path, text: &str) -> Result<Table, ClusterError> {
    let table: Table = toml::from_str(text).map_err(|error| file::malformed(path, text, &error))?;
    let known = BTreeSet::from(["vm", "node"].map(str::to_owned));
    match file::check_keys(path, "up", &table, &known) {
        Ok(()) => Ok(table),
        // Keys of the VM or of a node outside of their sections.
        Err(ConfigFileError::UnknownKey { path, key, .. }) => Err(ConfigFileError::UnknownKey {
            path,
            key,
            remedy:
                "a cluster has [vm], with the flags of `ssi-hv run`, and a [[node]] for each node"
                    .into(),
        }
        .into()),
        Err(error) => Err(error.into()),
    }
}

/// Takes `[vm]`, or reads the file that `vm` names.
fn take_vm(path: &Path, table: &mut Table) -> Result<RunSettings, ClusterError> {
    let wrong = |message: String| ClusterError::Part {
        path: path.into(),
        part: "[vm]".into(),
        message,
    };
    let (path, keys) = match table.remove("vm") {
        Some(Value::Table(keys)) => (path.to_owned(), keys),
        Some(Value::String(other)) => {
            let other = PathBuf::from(other);
            let text = file::read("the VM's file", &other)?;
            let keys =
                toml::from_str(&text).map_err(|error| file::malformed(&other, &text, &error))?;
            (other, keys)
        }
        _ => {
            return Err(wrong(
                "is missing; write [vm] with the flags of `ssi-hv run`, or vm = \"vm.toml\"".into(),
            ));
        }
    };
    file::check_keys(&path, "run", &keys, &file::keys_of::<RunSettings>())?;
    typed(keys).map_err(wrong)
}

fn take_nodes(path: &Path, table: &mut Table) -> Result<Vec<Node>, ClusterError> {
    let tables = match table.remove("node") {
        None => Vec::new(),
        Some(Value::Array(tables)) => tables,
        Some(_) => {
            return Err(ClusterError::Part {
                path: path.into(),
                part: "node".into(),
                message: "is not a list; write [[node]] before the keys of each node".into(),
            });
        }
    };
    let mut known = file::keys_of::<NodeSettings>();
    known.extend(Place::KEYS.map(str::to_owned));
    let mut nodes = Vec::new();
    let mut names = HashSet::new();
    for (index, keys) in tables.into_iter().enumerate() {
        let default_name = format!("node-{}", index + 1);
        let Value::Table(keys) = keys else {
            let message = "is not a table; write [[node]] before the keys of each node";
            return Err(part(path, &default_name, message));
        };
        file::check_keys(path, "node", &keys, &known)?;
        let node = node(path, &default_name, keys)?;
        if !names.insert(node.name.to_string()) {
            let message = "another node has the name; give each a name of its own";
            return Err(part(path, node.name.as_str(), message));
        }
        nodes.push(node);
    }
    Ok(nodes)
}

fn node(path: &Path, default_name: &str, mut keys: Table) -> Result<Node, ClusterError> {
    let mut own = Table::new();
    for key in Place::KEYS {
        own.extend(keys.remove_entry(key));
    }
    let called = own.get("name").and_then(Value::as_str);
    let called = called.unwrap_or(default_name).to_owned();
    let wrong = |message: String| part(path, &called, message);

    let has_from = own.contains_key("from");
    let place: Place = typed(own).map_err(wrong)?;
    check_place(&place, &keys).map_err(|message| wrong(message.to_owned()))?;
    if let Some(destination) = &place.ssh {
        command_line::check_destination(destination).map_err(wrong)?;
    }
    if !keys.contains_key("listen") {
        keys.insert("listen".into(), LISTEN_DEFAULT.into());
    }
    let config: NodeSettings = typed(keys).map_err(wrong)?;
    if has_from && config.cpus == 0 {
        return Err(wrong(format!(
            "from = \"{}\" is for vCPUs, and it lends none; give cpus = N, or remove from",
            place.from
        )));
    }
    if let Some(zone) = &place.zone {
        if config.cpus > 0 {
            return Err(wrong(format!(
                "zone = \"{zone}\" is for nodes that only lend memory, and it lends {} vCPUs; remove one of \
                 the two",
                config.cpus
            )));
        }
        let named: Result<Name, _> = zone.parse();
        named.map_err(|error| wrong(format!("zone: {error}")))?;
    }
    let name = match &place.name {
        Some(name) => name.clone(),
        None => default_name
            .parse()
            .map_err(|error: crate::config::name::NameError| wrong(error.to_string()))?,
    };
    Ok(Node {
        name,
        place,
        config,
    })
}

/// Checks the combination of keys.
fn check_place(place: &Place, keys: &Table) -> Result<(), &'static str> {
    let listens = keys.contains_key("listen");
    let of_ssh = !place.ssh_options.is_empty() || place.ssh_program.is_some();
    if place.ssh.is_some() && place.namespace {
        return Err("ssh and namespace exclude each other; remove one of them");
    }
    if place.ssh.is_some() && !listens {
        return Err("a node on another host needs listen = \"ADDR:PORT\", an address of that host");
    }
    if place.ssh.is_none() && of_ssh {
        return Err("ssh-options and ssh-program need ssh = \"USER@HOST\"");
    }
    if place.namespace && (listens || place.address.is_some()) {
        return Err(
            "the address of a node with namespace = true is chosen; remove listen and address",
        );
    }
    Ok(())
}

/// Deserializes keys; an error is a single line.
fn typed<T: DeserializeOwned>(keys: Table) -> Result<T, String> {
    T::deserialize(keys).map_err(|error| {
        let text = error.to_string();
        text.trim().replace('\n', ", ")
    })
}

#[cfg(test)]
pub(super) fn keys_of_places() -> Vec<String> {
    let place = Place {
        name: "a".parse().ok(),
        ssh: Some("h".into()),
        ssh_options: vec!["-v".into()],
        ssh_program: Some("ssh".into()),
        program: Some("p".into()),
        namespace: true,
        address: "h:1".parse().ok(),
        from: crate::config::node_arg::CpusFrom::Start,
        zone: Some("z".into()),
    };
    let table = file::to_table(&place).expect("is TOML");
    table.keys().cloned().collect()
}
