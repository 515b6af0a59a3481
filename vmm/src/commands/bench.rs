//! `ssi-hv bench`.

use anyhow::anyhow;
use ssi_hv::cli::bench::BenchFaultConfig;
use ssi_hv::exit::ExitCode;

use super::Failure;

/// Measures the latency of remote faults, and the floor beside it.
pub fn fault(config: &BenchFaultConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    Err(anyhow!("bench fault is not there yet in this build; `ssi-hv doctor` is").into())
}
