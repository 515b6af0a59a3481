//! `ssi-hv doctor`.

use anyhow::anyhow;
use ssi_hv::cli::DoctorConfig;
use ssi_hv::exit::ExitCode;

use super::Failure;

/// Looks at this host and says what it is ready for.
pub fn doctor(_config: DoctorConfig) -> Result<ExitCode, Failure> {
    Err(anyhow!("doctor is not there yet in this build").into())
}
