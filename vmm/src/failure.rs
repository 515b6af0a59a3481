//! A command that failed: why, and with which exit code.

use devices::virtio::{DiskError, HostSocketError, TapError};
use memory_fabric::donor::server::DonorError;
use memory_fabric::transport::rdma::RdmaError;

use crate::cluster::ClusterError;
use crate::config::ValidationError;
use crate::exit::ExitCode;
use crate::machine::MachineError;

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

    /// A failure due to a value that was given.
    pub fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self::new(ExitCode::Usage, error)
    }

    /// The same as a part of something larger, with that one's exit code.
    pub fn in_context(self, code: ExitCode, context: String) -> Self {
        let error = self.error.context(context);
        Self { code, error }
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
    // What this one kernel does not take; see [`crate::config`] for the others.
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
