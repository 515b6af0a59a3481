//! `ssi-hv node`: what a donor is asked to do.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use memory_fabric::rdma::{DeviceChoice, Settings};
use serde::{Deserialize, Serialize};

use super::CPUS_MAX;
use super::address::HostPort;
use super::membership::{MemberArg, Membership, MembershipError};
use super::policy::{AllowArg, Policy};
use super::rdma::RdmaArg;
use super::validation::{
    ValidationError, check_metrics, check_range, check_size, resolve_permitted,
};
use crate::compute::RdmaOfNode;
use crate::size::ByteSize;

/// Minimum memory that a node lends.
pub const NODE_MEMORY_MIN: ByteSize = ByteSize::from_mib(1);
/// Limit of a lease, in seconds: memory of a VM that vanished is held for up to an hour.
pub const LEASE_SECONDS_MAX: u32 = 3600;
/// Default of `--lease-seconds`.
pub const DEFAULT_LEASE_SECONDS: u32 = 120;
/// Limit of `--rdma-connections`.
pub const RDMA_CONNECTIONS_MAX: u32 = memory_fabric::donor::rdma::CONNECTIONS_MAX;

/// What a user asks of `ssi-hv node`, by flags and the file of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NodeSettings {
    /// Address to listen on; port 0 selects a free port and prints it
    pub listen: HostPort,
    /// How much memory to lend
    pub memory: ByteSize,
    /// Virtual CPUs to lend [default: 0]
    #[serde(default)]
    pub cpus: u32,
    /// Longest lease that is granted without renewal
    #[serde(default = "default_lease_seconds")]
    pub lease_seconds: u32,
    /// RDMA device through which VMs read [default: the one with the address they use]; or none
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma_device: Option<String>,
    /// Settings of RDMA connections, KEY=VALUE,... or a table
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaArg>,
    /// Limit of RDMA connections; each uses a queue pair [default: 1024]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma_connections: Option<u32>,
    /// Limit of lent memory that VMs access by RDMA, in all [default: all of it]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma_memory: Option<ByteSize>,
    /// Serve Prometheus metrics on this address, at /metrics; port 0 selects a free port and prints
    /// it
    pub metrics: Option<HostPort>,
    /// Directory of this node's certificate; VMs must have one of the same authority
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials: Option<PathBuf>,
    /// A member that may use the node, and how much, or a file of such rules; without any, every
    /// member may use all
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<AllowArg>,
    /// Register in this etcd, where VMs find the node: etcd://HOST:PORT[,HOST:PORT][/PREFIX]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Directory with the certificate for etcd, and its authority
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_credentials: Option<PathBuf>,
    /// What is registered, name=NAME,zone=ZONE,address=HOST:PORT
    #[serde(skip_serializing_if = "Option::is_none")]
    pub member: Option<MemberArg>,
    /// Allow addresses beyond this host, without authentication or encryption
    #[serde(default)]
    pub insecure: bool,
    /// Exit when standard input ends, or is silent for as long as the lease
    #[serde(skip)]
    pub end_with_stdin: bool,
    /// Write counters in JSON at the end, and on SIGUSR1
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,
}

const fn default_lease_seconds() -> u32 {
    DEFAULT_LEASE_SECONDS
}

/// A node whose settings are valid. Starting it may still fail.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeConfig {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// How much memory to lend, a multiple of the page size.
    pub memory: ByteSize,
    /// How many vCPUs to lend.
    pub cpus: u8,
    /// Longest lease that is granted without renewal.
    pub lease: Duration,
    /// The RDMA device through which VMs read.
    pub rdma: DeviceChoice,
    /// What else is set of RDMA connections.
    pub rdma_settings: Settings,
    /// What the processes of VMs may use of RDMA.
    pub rdma_of_vms: RdmaOfNode,
    /// Limit of RDMA connections.
    pub rdma_connections: Option<u32>,
    /// Limit of lent memory that VMs access by RDMA; `None` is all of it.
    pub rdma_memory: Option<ByteSize>,
    /// The directory of its certificate.
    pub credentials: Option<PathBuf>,
    /// Who may use it, and how much; `None` allows every member everything.
    pub allow: Option<Policy>,
    /// Where it registers.
    pub membership: Option<Membership>,
    /// The address for Prometheus metrics.
    pub metrics: Option<SocketAddr>,
    /// Whether the node ends with its standard input.
    pub end_with_stdin: bool,
    /// The file for its counters.
    pub report: Option<PathBuf>,
}

impl NodeSettings {
    /// Compares the values with their limits, and resolves the addresses.
    ///
    /// # Errors
    ///
    /// Returns the first invalid value, with its limit and remedy.
    pub fn parse(&self) -> Result<NodeConfig, ValidationError> {
        check_size("--memory", self.memory, NODE_MEMORY_MIN)?;
        check_range("--cpus", self.cpus, 0, CPUS_MAX.into())?;
        check_range("--lease-seconds", self.lease_seconds, 1, LEASE_SECONDS_MAX)?;
        if let Some(most) = self.rdma_connections {
            check_range("--rdma-connections", most, 1, RDMA_CONNECTIONS_MAX)?;
        }
        if let Some(most) = self.rdma_memory {
            check_size("--rdma-memory", most, NODE_MEMORY_MIN)?;
        }
        let has_credentials = self.credentials.is_some();
        let allow = self.checked_rules()?;
        Ok(NodeConfig {
            listen: resolve_permitted("--listen", &self.listen, self.insecure || has_credentials)?,
            memory: self.memory,
            cpus: u8::try_from(self.cpus).unwrap_or(CPUS_MAX),
            lease: Duration::from_secs(self.lease_seconds.into()),
            rdma: self.checked_device()?,
            rdma_settings: self.rdma_settings(),
            rdma_of_vms: self.rdma_of_vms()?,
            rdma_connections: self.rdma_connections,
            rdma_memory: self.rdma_memory,
            credentials: self.credentials.clone(),
            allow,
            membership: self.checked_membership()?,
            metrics: check_metrics(self.metrics.as_ref(), self.insecure)?,
            end_with_stdin: self.end_with_stdin,
            report: self.report.clone(),
        })
    }

    fn rdma_settings(&self) -> Settings {
        let rdma = self.rdma.as_ref();
        rdma.map_or_else(Settings::default, |rdma| rdma.settings().clone())
    }

    fn rdma_of_vms(&self) -> Result<RdmaOfNode, ValidationError> {
        Ok(match (self.checked_device()?, &self.rdma) {
            (DeviceChoice::None, _) => RdmaOfNode::Off,
            (DeviceChoice::Named(device), given) => {
                RdmaOfNode::Set(given.clone().unwrap_or_default().with_device(device))
            }
            (_, Some(given)) => RdmaOfNode::Set(given.clone()),
            (_, None) => RdmaOfNode::Default,
        })
    }

    fn checked_device(&self) -> Result<DeviceChoice, ValidationError> {
        let device = self.rdma_settings().device;
        match (self.rdma_device.as_deref(), device) {
            (None, device) => Ok(device),
            (Some(name), DeviceChoice::Named(other)) => {
                Err(ValidationError::RdmaDeviceTwice(name.to_owned(), other))
            }
            (Some("none"), _) => Ok(DeviceChoice::None),
            (Some(name), _) => Ok(DeviceChoice::Named(name.to_owned())),
        }
    }

    fn checked_rules(&self) -> Result<Option<Policy>, ValidationError> {
        let Some(policy) = Policy::of(&self.allow) else {
            return Ok(None);
        };
        if self.credentials.is_none() {
            return Err(ValidationError::AllowWithoutCredentials);
        }
        policy.check()?;
        Ok(Some(policy))
    }
}

impl NodeSettings {
    /// Returns where the node registers, if it does.
    fn checked_membership(&self) -> Result<Option<Membership>, MembershipError> {
        let Some(cluster) = &self.cluster else {
            return match (&self.cluster_credentials, &self.member) {
                (Some(_), _) => Err(MembershipError::WithoutCluster("--cluster-credentials")),
                (None, Some(_)) => Err(MembershipError::WithoutCluster("--member")),
                (None, None) => Ok(None),
            };
        };
        let member = self.member.clone().unwrap_or_default();
        let host = self.listen.host().parse::<std::net::IpAddr>();
        if host.is_ok_and(|ip| ip.is_unspecified()) && member.address.is_none() {
            return Err(MembershipError::Everywhere(self.listen.clone()));
        }
        Ok(Some(Membership {
            target: cluster.parse()?,
            credentials: self.cluster_credentials.clone(),
            insecure: self.insecure,
            member,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_vms_get_what_the_node_says_of_rdma() {
        let with = |device: Option<&str>, given: Option<&str>| {
            let mut node = settings("127.0.0.1:7000");
            node.rdma_device = device.map(Into::into);
            node.rdma = given.map(|text| text.parse().expect("settings"));
            node.parse().expect("fine").rdma_of_vms
        };
        let set = |text: &str| RdmaOfNode::Set(text.parse().expect("settings"));
        assert_eq!(with(None, None), RdmaOfNode::Default);
        assert_eq!(with(Some("none"), Some("port=1")), RdmaOfNode::Off);
        assert_eq!(with(None, Some("port=1")), set("port=1"));
        let both = with(Some("rxe0"), Some("port=1"));
        assert_eq!(both, set("device=rxe0,port=1"));
        assert_eq!(with(Some("rxe0"), None), set("device=rxe0"));
    }

    fn settings(listen: &str) -> NodeSettings {
        NodeSettings {
            listen: listen.parse().expect("an address"),
            memory: ByteSize::from_mib(64),
            cpus: 0,
            lease_seconds: DEFAULT_LEASE_SECONDS,
            rdma_device: None,
            rdma: None,
            rdma_connections: None,
            rdma_memory: None,
            metrics: None,
            credentials: None,
            allow: Vec::new(),
            cluster: None,
            cluster_credentials: None,
            member: None,
            insecure: false,
            end_with_stdin: false,
            report: None,
        }
    }

    fn refused(settings: &NodeSettings) -> String {
        settings.parse().expect_err("to be refused").to_string()
    }

    #[test]
    fn a_loopback_address_is_listened_on() {
        let config = settings("localhost:7000").parse().expect("is valid");
        assert_eq!(config.listen, "127.0.0.1:7000".parse().expect("an address"));
    }

    #[test]
    fn an_address_that_others_reach_needs_insecure() {
        let mut open = settings("0.0.0.0:7000");
        let message = refused(&open);
        assert!(message.contains("--listen 0.0.0.0:7000"), "{message}");
        assert!(message.contains("--insecure"), "{message}");
        open.insecure = true;
        assert!(open.parse().is_ok());

        let mut open = settings("127.0.0.1:7000");
        assert_eq!(open.parse().expect("none is fine").metrics, None);
        open.metrics = Some("0.0.0.0:9100".parse().expect("an address"));
        let message = refused(&open);
        assert!(message.contains("--metrics 0.0.0.0:9100"), "{message}");
        assert!(message.contains("--insecure"), "{message}");
        open.insecure = true;
        assert!(open.parse().is_ok());
    }

    #[test]
    fn an_address_that_others_reach_needs_no_insecure_with_credentials() {
        let mut open = settings("0.0.0.0:7000");
        open.credentials = Some("alpha".into());
        assert!(open.parse().is_ok());
        // Metrics are as public as before.
        open.metrics = Some("0.0.0.0:9100".parse().expect("an address"));
        assert!(refused(&open).contains("--metrics 0.0.0.0:9100"));
        open.metrics = None;
        open.cpus = 1;
        assert!(open.parse().is_ok());
    }

    #[test]
    fn rules_need_credentials_and_name_different_members() {
        let mut node = settings("127.0.0.1:7000");
        assert_eq!(node.parse().expect("is valid").allow, None);
        node.allow = vec!["vm/web,bytes=1G".parse().expect("a rule")];
        assert!(refused(&node).contains("add --credentials DIR"));
        node.credentials = Some("alpha".into());
        let allow = node.parse().expect("is valid").allow.expect("a policy");
        assert_eq!(allow.read().expect("rules")[0].limits.bytes, Some(1 << 30));
        // It may be on another host.
        node.allow.push("@no/such/file".parse().expect("a file"));
        let allow = node.parse().expect("is valid").allow.expect("a policy");
        assert!(allow.read().is_err());
        node.allow.push("vm/web".parse().expect("a rule"));
        assert!(refused(&node).contains("--allow: vm/web has a rule already in --allow"));
    }

    #[test]
    fn a_node_registers_an_address_that_vms_can_use() {
        let mut node = settings("0.0.0.0:7000");
        node.insecure = true;
        assert_eq!(node.parse().expect("is valid").membership, None);
        node.member = Some("zone=a".parse().expect("a member"));
        assert!(refused(&node).contains("--member is for nodes"));
        node.cluster = Some("etcd://127.0.0.1:2379".into());
        let text = refused(&node);
        assert!(text.contains("add --member address=HOST:PORT"), "{text}");
        node.member = Some("address=h:7000".parse().expect("a member"));
        let membership = node.parse().expect("is valid").membership;
        assert!(membership.is_some_and(|one| one.insecure));
        node.cluster = Some("cluster.toml".into());
        let text = refused(&node);
        assert!(text.contains("write etcd://HOST:PORT"), "{text}");
        node.cluster = None;
        node.member = None;
        node.cluster_credentials = Some("etcd".into());
        assert!(refused(&node).contains("--cluster-credentials is for"));
    }

    #[test]
    fn a_device_is_named_found_or_done_without() {
        let rdma = |node: &NodeSettings| node.parse().expect("is valid").rdma;
        let mut node = settings("127.0.0.1:7000");
        assert_eq!(rdma(&node), DeviceChoice::Automatic);
        node.rdma_device = Some("none".into());
        assert_eq!(rdma(&node), DeviceChoice::None);
        node.rdma_device = Some("mlx5_0".into());
        assert_eq!(rdma(&node), DeviceChoice::Named("mlx5_0".into()));
        node.rdma = Some("device=mlx5_1,mtu=1024".parse().expect("settings"));
        let text = refused(&node);
        assert!(
            text.contains("--rdma-device mlx5_0") && text.contains("device=mlx5_1"),
            "{text}"
        );
        node.rdma_device = None;
        assert_eq!(rdma(&node), DeviceChoice::Named("mlx5_1".into()));
        let settings = node.parse().expect("valid").rdma_settings;
        assert_eq!(settings.mtu.map(|mtu| mtu.bytes()), Some(1024));
    }

    #[test]
    fn memory_and_lease_have_limits() {
        let mut small = settings("[::1]:7000");
        small.memory = ByteSize::from_bytes(4096);
        assert!(refused(&small).contains("1 MiB is the least"));
        let mut pinned = settings("[::1]:7000");
        pinned.rdma_memory = Some(ByteSize::from_bytes(4096));
        let error = refused(&pinned);
        assert!(error.contains("--rdma-memory") && error.contains("1 MiB is the least"));
        pinned.rdma_memory = Some(ByteSize::from_mib(1));
        let parsed = pinned.parse().expect("enough");
        assert_eq!(parsed.rdma_memory, Some(ByteSize::from_mib(1)));
        let mut ragged = settings("[::1]:7000");
        ragged.memory = ByteSize::from_bytes((1 << 20) + 1);
        assert!(refused(&ragged).contains("multiple of the page size"));
        let mut long = settings("[::1]:7000");
        long.lease_seconds = 3601;
        assert!(refused(&long).contains("3601 is outside 1 to 3600"));
        for (connections, right) in [(0, false), (1, true), (1024, true), (1025, false)] {
            let mut node = settings("[::1]:7000");
            node.rdma_connections = Some(connections);
            let wanted = format!("--rdma-connections {connections} is outside 1 to 1024");
            match node.parse() {
                Ok(_) => assert!(right, "{connections}"),
                Err(error) => assert!(!right && error.to_string().contains(&wanted), "{error}"),
            }
        }
    }
}
