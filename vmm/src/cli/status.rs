//! `ssi-hv status`: whom to ask, and how to show it.

use clap::Args;

/// The flags of `ssi-hv status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct StatusConfig {
    /// A VM by its name or process, or a node by its process [default: all that run]
    #[arg(value_name = "VM", hide_default_value = true)]
    pub vm: Option<String>,

    /// Show which parts of memory are here, and which were touched lately
    #[arg(long)]
    pub heat: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
