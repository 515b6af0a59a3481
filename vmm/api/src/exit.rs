//! The exit codes of `ssi-hv`, which scripts rely on.
//!
//! `docs/exit-codes.md` documents the same list; a test compares them.

use std::process;

/// How the process ended.
///
/// The numbers are a contract with scripts: codes may be added, and none changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitCode {
    /// The guest shut down, or the command succeeded.
    Success,
    /// Something on this host failed: a file, a device, memory, KVM; or `doctor` found
    /// something missing.
    HostError,
    /// A flag, a configuration file or a value in them is wrong.
    Usage,
    /// The guest requested a reboot.
    GuestReboot,
    /// The guest crashed: a reported kernel panic, a triple fault, or an internal error of a vCPU.
    GuestCrash,
    /// A donor was lost while the guest ran, and memory of the guest with it.
    DonorLost,
    /// At the start a donor was unreachable, refused, or lent less than requested.
    DonorUnavailable,
    /// A node that runs vCPUs of the guest was lost.
    NodeLost,
    /// At the start a node that was to run vCPUs was unreachable, refused, or could not run them.
    NodeUnavailable,
    /// `--timeout` passed before the guest ended.
    TimedOut,
    /// With `--exec`: there is no status of the command. The report has the reason.
    ExecFailed,
    /// With `--exec`: the command ended with this status, and the guest powered itself off.
    Exec(u8),
    /// Ended by SIGINT, or by the console's escape sequence.
    Interrupted,
    /// Ended by SIGTERM or SIGHUP.
    Terminated,
}

impl ExitCode {
    /// Every exit code except the status of a command, in numeric order.
    pub const ALL: [Self; 13] = [
        Self::Success,
        Self::HostError,
        Self::Usage,
        Self::GuestReboot,
        Self::GuestCrash,
        Self::DonorLost,
        Self::DonorUnavailable,
        Self::NodeLost,
        Self::NodeUnavailable,
        Self::TimedOut,
        Self::ExecFailed,
        Self::Interrupted,
        Self::Terminated,
    ];

    /// The number that the shell sees.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::HostError => 1,
            Self::Usage => 2,
            Self::GuestReboot => 3,
            Self::GuestCrash => 4,
            Self::DonorLost => 5,
            Self::DonorUnavailable => 6,
            Self::NodeLost => 7,
            Self::NodeUnavailable => 8,
            // The codes of timeout(1): for the time limit, and for its own failures.
            Self::TimedOut => 124,
            Self::ExecFailed => 125,
            Self::Exec(status) => status,
            Self::Interrupted => 130,
            Self::Terminated => 143,
        }
    }

    /// The name of the outcome, as `outcome` in the report has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Success | Self::Exec(_) => "shutdown",
            Self::HostError => "host-error",
            Self::Usage => "usage",
            Self::GuestReboot => "reboot",
            Self::GuestCrash => "crash",
            Self::DonorLost => "donor-lost",
            Self::DonorUnavailable => "donor-unavailable",
            Self::NodeLost => "node-lost",
            Self::NodeUnavailable => "node-unavailable",
            Self::TimedOut => "timed-out",
            Self::ExecFailed => "exec-failed",
            Self::Interrupted => "interrupted",
            Self::Terminated => "terminated",
        }
    }
}

impl ExitCode {
    /// The exit code with `--exec`: one that commands do not use by convention (timeout(1),
    /// docker-run(1)), or one that shells use.
    #[must_use]
    pub const fn with_exec(self) -> Self {
        match self {
            Self::Exec(_) | Self::TimedOut | Self::Interrupted | Self::Terminated => self,
            _ => Self::ExecFailed,
        }
    }
}

impl From<ExitCode> for process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of the table in the document: number and name.
    fn documented() -> Vec<(u8, String)> {
        include_str!("../../../docs/exit-codes.md")
            .lines()
            .filter_map(|line| {
                let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
                let number = cells.next()?.trim_matches('`').parse().ok()?;
                Some((number, cells.next()?.trim_matches('`').to_owned()))
            })
            .collect()
    }

    #[test]
    fn the_document_and_the_enum_list_the_same_codes() {
        let in_code: Vec<_> = ExitCode::ALL
            .into_iter()
            .map(|code| (code.code(), code.name().to_owned()))
            .collect();
        assert_eq!(documented(), in_code);
    }

    #[test]
    fn with_a_command_every_failure_of_ours_is_125_but_those_that_shells_know() {
        let codes = ExitCode::ALL.map(|code| code.with_exec().code());
        assert_eq!(
            codes,
            [
                125, 125, 125, 125, 125, 125, 125, 125, 125, 124, 125, 130, 143
            ]
        );
        assert_eq!(ExitCode::Exec(42).with_exec().code(), 42);
    }

    #[test]
    fn a_signal_gives_128_and_its_number_as_a_shell_does() {
        assert_eq!(i32::from(ExitCode::Interrupted.code()), 128 + libc::SIGINT);
        assert_eq!(i32::from(ExitCode::Terminated.code()), 128 + libc::SIGTERM);
    }
}
