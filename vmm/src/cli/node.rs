//! `ssi-hv node`: what a donor is asked to do.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use memory_fabric::transport::rdma::DeviceChoice;
use serde::{Deserialize, Serialize};

use crate::config::address::HostPort;
use crate::config::validation::{
    ValidationError, check_metrics, check_range, check_size, resolve_permitted,
};
use crate::size::ByteSize;

/// Minimum memory that a node lends.
pub const NODE_MEMORY_MIN: ByteSize = ByteSize::from_mib(1);
/// Limit of a lease, in seconds: memory of a VM that vanished is held for up to an hour.
pub const LEASE_SECONDS_MAX: u32 = 3600;
/// Default of `--lease-seconds`.
pub const DEFAULT_LEASE_SECONDS: u32 = 120;
/// Limit of `--rdma-connections`: the node accepts no more connections in total.
pub const RDMA_CONNECTIONS_MAX: u32 = 1024;

/// The configuration of a node that lends memory, from flags and from a cluster's file.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NodeConfig {
    /// Address to listen on; port 0 selects a free port and prints it
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: HostPort,

    /// How much memory to lend
    #[arg(long, value_name = "SIZE")]
    pub memory: ByteSize,

    /// Longest lease that is granted without renewal
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_LEASE_SECONDS)]
    #[serde(default = "default_lease_seconds")]
    pub lease_seconds: u32,

    /// RDMA device through which VMs read [default: the one with the address they use]; or none
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma_device: Option<String>,

    /// Limit of RDMA connections; each uses a queue pair [default: 1024]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma_connections: Option<u32>,

    /// Serve Prometheus metrics on this address, at /metrics; port 0 selects a free port and prints
    /// it
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<HostPort>,

    /// Allow addresses beyond this host, without authentication or encryption
    #[arg(long)]
    #[serde(default)]
    pub insecure: bool,

    /// Exit when standard input ends, or is silent for as long as the lease
    #[arg(long)]
    #[serde(skip)]
    pub end_with_stdin: bool,

    /// Write counters in JSON at the end, and on SIGUSR1
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,
}

const fn default_lease_seconds() -> u32 {
    DEFAULT_LEASE_SECONDS
}

impl NodeConfig {
    /// The RDMA device to use.
    #[must_use]
    pub fn rdma(&self) -> DeviceChoice {
        match self.rdma_device.as_deref() {
            None => DeviceChoice::Automatic,
            Some("none") => DeviceChoice::None,
            Some(name) => DeviceChoice::Named(name.to_owned()),
        }
    }

    /// The address for Prometheus metrics, if one was given.
    ///
    /// # Errors
    ///
    /// Fails if the address cannot be resolved, or is not loopback without `--insecure`.
    pub fn metrics_address(&self) -> Result<Option<SocketAddr>, ValidationError> {
        check_metrics(self.metrics.as_ref(), self.insecure)
    }

    /// Validates the values and resolves the address to listen on.
    ///
    /// # Errors
    ///
    /// Returns the first invalid value, with its limit and remedy.
    pub fn validate(&self) -> Result<SocketAddr, ValidationError> {
        check_size("--memory", self.memory, NODE_MEMORY_MIN)?;
        check_range("--lease-seconds", self.lease_seconds, 1, LEASE_SECONDS_MAX)?;
        if let Some(most) = self.rdma_connections {
            check_range("--rdma-connections", most, 1, RDMA_CONNECTIONS_MAX)?;
        }
        resolve_permitted("--listen", &self.listen, self.insecure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(listen: &str) -> NodeConfig {
        NodeConfig {
            listen: listen.parse().expect("an address"),
            memory: ByteSize::from_mib(64),
            lease_seconds: DEFAULT_LEASE_SECONDS,
            rdma_device: None,
            rdma_connections: None,
            metrics: None,
            insecure: false,
            end_with_stdin: false,
            report: None,
        }
    }

    fn refused(config: &NodeConfig) -> String {
        config.validate().expect_err("to be refused").to_string()
    }

    #[test]
    fn a_loopback_address_is_listened_on() {
        let address = config("localhost:7000").validate().expect("is valid");
        assert_eq!(address, "127.0.0.1:7000".parse().expect("an address"));
    }

    #[test]
    fn an_address_that_others_reach_needs_insecure() {
        let mut open = config("0.0.0.0:7000");
        let message = refused(&open);
        assert!(message.contains("--listen 0.0.0.0:7000"), "{message}");
        assert!(message.contains("--insecure"), "{message}");
        open.insecure = true;
        assert!(open.validate().is_ok());

        let mut open = config("127.0.0.1:7000");
        assert_eq!(open.metrics_address().expect("none is fine"), None);
        open.metrics = Some("0.0.0.0:9100".parse().expect("an address"));
        let message = open.metrics_address().expect_err("open").to_string();
        assert!(message.contains("--metrics 0.0.0.0:9100"), "{message}");
        assert!(message.contains("--insecure"), "{message}");
        open.insecure = true;
        assert!(open.metrics_address().is_ok());
    }

    #[test]
    fn a_device_is_named_found_or_done_without() {
        let mut node = config("127.0.0.1:7000");
        assert_eq!(node.rdma(), DeviceChoice::Automatic);
        node.rdma_device = Some("none".into());
        assert_eq!(node.rdma(), DeviceChoice::None);
        node.rdma_device = Some("mlx5_0".into());
        assert_eq!(node.rdma(), DeviceChoice::Named("mlx5_0".into()));
    }

    #[test]
    fn memory_and_lease_have_limits() {
        let mut small = config("[::1]:7000");
        small.memory = ByteSize::from_bytes(4096);
        assert!(refused(&small).contains("1 MiB is the least"));
        let mut ragged = config("[::1]:7000");
        ragged.memory = ByteSize::from_bytes((1 << 20) + 1);
        assert!(refused(&ragged).contains("multiple of the page size"));
        let mut long = config("[::1]:7000");
        long.lease_seconds = 3601;
        assert!(refused(&long).contains("3601 is outside 1 to 3600"));
        for (connections, right) in [(0, false), (1, true), (1024, true), (1025, false)] {
            let mut node = config("[::1]:7000");
            node.rdma_connections = Some(connections);
            let wanted = format!("--rdma-connections {connections} is outside 1 to 1024");
            match node.validate() {
                Ok(_) => assert!(right, "{connections}"),
                Err(error) => assert!(!right && error.to_string().contains(&wanted), "{error}"),
            }
        }
    }
}
