//! The failure of a command, with its exit code.

pub use fabric_host::{Seldom, describe};

use devices::virtio::{DiskError, HostSocketError, TapError};
use memory_fabric::donor::server::DonorError;
use memory_fabric::rdma::RdmaError;

use crate::cluster::ClusterError;
use crate::config::ValidationError;
use crate::exit::ExitCode;
use crate::machine::MachineError;

/// Why a command failed, and the exit code for scripts.
#[derive(Debug)]
pub struct Failure {
    code: ExitCode,
    error: anyhow::Error,
}

impl Failure {
    /// Creates a failure with a specific exit code.
    pub fn new(code: ExitCode, error: impl Into<anyhow::Error>) -> Self {
        Self {
            code,
            error: error.into(),
        }
    }

    /// Creates a failure caused by an invalid value.
    pub fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self::new(ExitCode::Usage, error)
    }

    /// Adds context, and replaces the exit code.
    pub fn in_context(self, code: ExitCode, context: String) -> Self {
        let error = self.error.context(context);
        Self { code, error }
    }

    /// Converts the exit code where it would be that of a command in the guest.
    pub fn with_exec(self) -> Self {
        Self {
            code: self.code.with_exec(),
            ..self
        }
    }

    /// Returns the error if it is of this type.
    pub fn cause<E: std::error::Error + Send + Sync + 'static>(&self) -> Option<&E> {
        self.error.downcast_ref()
    }

    /// Adds what else is wrong, and keeps the exit code.
    pub fn beside(self, other: &(dyn std::error::Error + 'static)) -> Self {
        let code = self.code;
        let text = format!("{}; {}", self.one_line(), describe(other));
        Self {
            code,
            error: anyhow::Error::msg(text),
        }
    }

    /// The exit code.
    pub const fn code(&self) -> ExitCode {
        self.code
    }

    /// Returns the error and its causes on one line.
    pub fn one_line(&self) -> String {
        format!("{:#}", self.error).replace('\n', "; ")
    }
}

/// `?` assigns an invalid configuration its exit code, and every other error that of a host error.
impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let code = if is_usage(&error) {
            ExitCode::Usage
        } else if matches!(
            error.downcast_ref(),
            Some(
                MachineError::LostPageUsed
                    | MachineError::NoMachineChecks { .. }
                    | MachineError::DonorLost { .. }
            )
        ) {
            ExitCode::DonorLost
        } else {
            ExitCode::HostError
        };
        Self { code, error }
    }
}

/// Returns whether an invalid value is the cause, so that a retry would fail again.
fn is_usage(error: &anyhow::Error) -> bool {
    let unknown_device = matches!(
        error.downcast_ref(),
        Some(DonorError::Rdma(RdmaError::UnknownDevice { .. }))
    );
    // Parameters that this specific kernel rejects; see [`crate::config`] for the others.
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
        // A device may appear later.
        assert_eq!(code(RdmaError::NoDevice), ExitCode::HostError);
    }

    #[test]
    fn a_device_that_needs_a_lost_page_ends_the_run_as_the_loss_does() {
        for error in [
            MachineError::LostPageUsed,
            MachineError::NoMachineChecks { page: 0 },
        ] {
            assert_eq!(Failure::from(error).code(), ExitCode::DonorLost);
        }
    }
}
