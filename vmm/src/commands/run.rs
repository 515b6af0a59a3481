//! `ssi-hv run`.

use anyhow::anyhow;
use ssi_hv::config::RunConfig;
use ssi_hv::exit::ExitCode;

use super::Failure;

/// Boots a guest and stays until it ends.
pub fn run(config: &RunConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    Err(anyhow!("run is not there yet in this build; `ssi-hv doctor` is").into())
}
