//! `ssi-hv status`: whom to ask, and how to show it.

use clap::Args;

/// The flags of `ssi-hv status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct StatusConfig {
    /// A VM by its name or process id, or a node by its process id [default: all that run]
    #[arg(value_name = "VM", hide_default_value = true)]
    pub vm: Option<String>,

    /// Show which parts of memory are local, and which were touched recently
    #[arg(long)]
    pub heat: bool,

    /// Show where the memory is: what each donor holds, and has room for
    #[arg(long, conflicts_with = "heat")]
    pub placement: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
