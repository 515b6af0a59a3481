//! `ssi-hv nodes`: its flags.

use std::path::PathBuf;

use clap::Args;

/// The flags of `ssi-hv nodes`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct NodesConfig {
    /// The etcd, etcd://HOST:PORT[,HOST:PORT][/PREFIX], or etcds:// for TLS
    #[arg(long, value_name = "URL")]
    pub cluster: String,

    /// Directory with ca.pem, cert.pem and key.pem for etcd
    #[arg(long, value_name = "DIR")]
    pub cluster_credentials: Option<PathBuf>,

    /// Allow an etcd beyond this host without authentication or encryption
    #[arg(long)]
    pub insecure: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
