//! `ssi-hv node`: its flags.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use fabric_identity::Holder;
use ssi_hv::config::address::HostPort;
use ssi_hv::config::membership::MemberArg;
use ssi_hv::config::policy::AllowArg;
use ssi_hv::config::rdma::RdmaArg;
use ssi_hv::config::{DEFAULT_LEASE_SECONDS, NodeSettings};
use ssi_hv::size::ByteSize;

use super::Action;

/// What is asked of `node`: to lend, or one of the commands to a node.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct NodeCli {
    #[command(subcommand)]
    command: Option<NodeCommand>,

    #[command(flatten)]
    lend: Option<NodeArgs>,
}

/// Commands to a node that runs.
#[derive(Clone, Debug, Subcommand)]
enum NodeCommand {
    /// End the leases of a member of the cluster, and close its connections
    Evict(EvictConfig),
    /// Read the files of --credentials and --allow again
    Reload(NodeRef),
}

/// The flags of `ssi-hv node evict`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct EvictConfig {
    /// The member, such as vm/web
    #[arg(value_name = "ROLE/NAME")]
    pub identity: Holder,

    #[command(flatten)]
    pub node: NodeRef,
}

/// Which node is meant.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct NodeRef {
    /// Process id of the node [default: the only one of this user]
    #[arg(long, value_name = "PID")]
    pub node: Option<String>,
}

impl NodeCli {
    pub(super) fn action(self) -> Action {
        match (self.command, self.lend) {
            (Some(NodeCommand::Evict(config)), _) => Action::Evict(config),
            (Some(NodeCommand::Reload(config)), _) => Action::Reload(config),
            (None, Some(lend)) => Action::Node(Box::new(lend.settings())),
            (None, None) => unreachable!("clap requires --listen without a command"),
        }
    }
}

/// The flags of `node`.
#[derive(Clone, Debug, Args)]
pub(super) struct NodeArgs {
    /// Address to listen on; port 0 selects a free port and prints it
    #[arg(long, value_name = "ADDR:PORT")]
    listen: HostPort,

    /// How much memory to lend
    #[arg(long, value_name = "SIZE")]
    memory: ByteSize,

    /// Virtual CPUs to lend, for `run --node`
    #[arg(long, value_name = "N", default_value_t = 0)]
    cpus: u32,

    /// Longest lease that is granted without renewal
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_LEASE_SECONDS)]
    lease_seconds: u32,

    /// RDMA device through which VMs read [default: the one with the address they use]; or none
    #[arg(long, value_name = "NAME")]
    rdma_device: Option<String>,

    /// Settings of RDMA connections, KEY=VALUE,...
    #[arg(long, value_name = "SETTINGS")]
    rdma: Option<RdmaArg>,

    /// Limit of RDMA connections; each uses a queue pair [default: 1024]
    #[arg(long, value_name = "N")]
    rdma_connections: Option<u32>,

    /// Limit of lent memory that VMs access by RDMA, in all [default: all of it]
    #[arg(long, value_name = "SIZE")]
    rdma_memory: Option<ByteSize>,

    /// Serve Prometheus metrics on this address, at /metrics; port 0 selects a free port and prints
    /// it
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<HostPort>,

    /// Directory of this node's certificate; VMs must have one of the same authority
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,

    /// A member that may use this node, ROLE/NAME or ROLE/PREFIX*, and how much: then bytes=SIZE,
    /// leases=N, connections=N, pinned=SIZE or cpus=N, each after a comma; or @FILE with a rule in
    /// each line; without any, every member may use all
    #[arg(long, value_name = "RULE")]
    allow: Vec<AllowArg>,

    /// Register in this etcd, etcd://HOST:PORT, where VMs find the node
    #[arg(long, value_name = "URL")]
    cluster: Option<String>,

    /// Directory with ca.pem, cert.pem and key.pem for etcd. Hidden: docs/cluster.md
    #[arg(long, value_name = "DIR", hide = true)]
    cluster_credentials: Option<PathBuf>,

    /// What is registered, name=NAME,zone=ZONE,address=HOST:PORT or some of them [default: the name
    /// in the certificate, or of the host; the address of --listen]. Hidden: docs/cluster.md
    #[arg(long, value_name = "MEMBER", hide = true)]
    member: Option<MemberArg>,

    /// Allow addresses beyond this host, without authentication or encryption
    #[arg(long)]
    insecure: bool,

    /// Exit when standard input ends, or is silent for as long as the lease
    #[arg(long)]
    end_with_stdin: bool,

    /// Write counters in JSON at the end, and on SIGUSR1
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

impl NodeArgs {
    pub(super) fn settings(self) -> NodeSettings {
        NodeSettings {
            listen: self.listen,
            memory: self.memory,
            cpus: self.cpus,
            lease_seconds: self.lease_seconds,
            rdma_device: self.rdma_device,
            rdma: self.rdma,
            rdma_connections: self.rdma_connections,
            rdma_memory: self.rdma_memory,
            metrics: self.metrics,
            credentials: self.credentials,
            allow: self.allow,
            cluster: self.cluster,
            cluster_credentials: self.cluster_credentials,
            member: self.member,
            insecure: self.insecure,
            end_with_stdin: self.end_with_stdin,
            report: self.report,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Command;

    use super::*;
    use ssi_hv::config::file::keys_of;

    #[test]
    fn a_file_has_the_flags_as_keys_but_the_one_that_ties_a_node_to_its_parent() {
        let mut flags: BTreeSet<String> = NodeArgs::augment_args(Command::new("node"))
            .get_arguments()
            .filter_map(|arg| arg.get_long().map(str::to_owned))
            .collect();
        assert!(flags.remove("end-with-stdin"));
        assert_eq!(keys_of::<NodeSettings>(), flags);
    }
}
