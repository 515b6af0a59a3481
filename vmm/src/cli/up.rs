//! The arguments of `ssi-hv up`.

use std::path::PathBuf;

use clap::Args;

/// The flags of `ssi-hv up`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct UpConfig {
    /// Nodes and VM, with the keys of their flags: docs/cluster.md
    #[arg(value_name = "CLUSTER.TOML")]
    pub file: PathBuf,

    /// Check the file, print what would be started, and exit
    #[arg(long, conflicts_with = "print_config")]
    pub check: bool,

    /// Print the resulting configuration and exit
    #[arg(long)]
    pub print_config: bool,
}
