//! `ssi-hv node`.

use anyhow::anyhow;
use ssi_hv::cli::node::NodeConfig;
use ssi_hv::exit::ExitCode;

use super::Failure;

/// Lends memory until it is told to stop.
pub fn node(config: &NodeConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    Err(anyhow!("node is not there yet in this build; `ssi-hv doctor` is").into())
}
