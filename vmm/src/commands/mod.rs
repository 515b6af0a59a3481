//! The commands, a file each, and what they share.

pub mod bench;
pub mod control;
mod devices;
pub mod doctor;
mod donors;
mod errors;
mod exec;
mod free_memory;
mod hotplug;
mod lifeline;
mod links;
pub mod man;
mod metrics;
pub mod node;
mod numa;
mod observe;
pub mod plug;
mod readable;
pub mod report;
#[cfg(test)]
mod routes_tests;
pub mod run;
pub mod status;
mod supervisor;
mod timeline;
pub mod top;
pub mod up;
mod vm_routes;
mod working_set;

use std::io::{self, Write};
use std::path::Path;

use ::devices::virtio::{DiskError, HostSocketError, TapError};
use memory_fabric::donor::server::DonorError;
use memory_fabric::transport::rdma::RdmaError;
use ssi_hv::cluster::ClusterError;
use ssi_hv::config::ValidationError;
use ssi_hv::exit::ExitCode;
use ssi_hv::machine::MachineError;
use ssi_hv::report::ReportFile;

/// A command that did not do what it was asked: why, and the exit code that tells scripts.
#[derive(Debug)]
pub struct Failure {
    code: ExitCode,
    error: anyhow::Error,
}

impl Failure {
    /// A failure with an exit code of its own.
    pub fn new(code: ExitCode, error: impl Into<anyhow::Error>) -> Self {
        Self {
            code,
            error: error.into(),
        }
    }

    /// The same, where the exit code is that of a command in the guest.
    pub fn with_exec(self) -> Self {
        Self {
            code: self.code.with_exec(),
            ..self
        }
    }

    /// The exit code.
    pub const fn code(&self) -> ExitCode {
        self.code
    }

    /// The error and what caused it, in one line.
    pub fn one_line(&self) -> String {
        format!("{:#}", self.error).replace('\n', "; ")
    }
}

/// `?` gives a wrong configuration its exit code, and everything else that of a host error.
impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let code = if is_usage(&error) {
            ExitCode::Usage
        } else {
            ExitCode::HostError
        };
        Self { code, error }
    }
}

/// Whether a value that was given is wrong: the same again would fail again.
fn is_usage(error: &anyhow::Error) -> bool {
    let unknown_device = matches!(
        error.downcast_ref(),
        Some(DonorError::Rdma(RdmaError::UnknownDevice { .. }))
    );
    // What this one kernel does not take; see `ssi_hv::config` for the others.
    let cmdline = matches!(
        error.downcast_ref(),
        Some(MachineError::CmdlineTooLong { .. } | MachineError::CmdlineByte { .. })
    );
    unknown_device
        || cmdline
        || error.is::<ValidationError>()
        || error.is::<DiskError>()
        || error.is::<TapError>()
        || error.is::<HostSocketError>()
        || error.is::<ClusterError>()
}

/// Where a report is to be written, if it is: a place that cannot be written is found before anything starts.
fn report_file(path: Option<&Path>) -> Result<Option<ReportFile>, Failure> {
    let prepared = path.map(ReportFile::prepare).transpose();
    prepared.map_err(|error| Failure::new(ExitCode::Usage, error))
}

/// Prints to stdout. A reader that went away has seen enough, so that is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(anyhow::Error::new(error)
            .context("cannot write to stdout")
            .into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_a_wrong_value_and_a_host_without_any_is_not() {
        let code = |error| Failure::from(DonorError::Rdma(error)).code();
        let unknown = RdmaError::UnknownDevice {
            wanted: "mlx5_O".to_owned(),
            there: "mlx5_0".to_owned(),
        };
        assert_eq!(code(unknown), ExitCode::Usage);
        // One may come yet.
        assert_eq!(code(RdmaError::NoDevice), ExitCode::HostError);
    }
}
