//! Errors of a testbed.

use std::time::Duration;

/// An error of the testbed, not of the tested program, except [`Deadline`](Self::Deadline) and
/// [`Command`](Self::Command).
#[derive(Debug, thiserror::Error)]
pub enum TestbedError {
    /// The configuration is impossible.
    #[error("testbed: {0}")]
    Config(String),
    /// A kernel or the hosts' initramfs cannot be made.
    #[error("testbed image")]
    Image(#[from] kernel_images::ImageError),
    /// A host's emulator could not be started, or exited.
    #[error("host {host}: {reason}\n--- end of {log} ---\n{tail}")]
    Boot {
        /// Number of the host.
        host: usize,
        /// What happened.
        reason: String,
        /// Path of its console log.
        log: String,
        /// The log's last lines.
        tail: String,
    },
    /// A running host stopped answering; see TCG's lost interrupts in `docs`. Restart the testbed
    /// and retry.
    #[error("host {host} hung: no heartbeat for {}s (see {log})", silent.as_secs())]
    HostHung {
        /// Number of the host.
        host: usize,
        /// Duration of its silence.
        silent: Duration,
        /// Path of its console log.
        log: String,
    },
    /// An operation on a host exceeded its deadline.
    #[error("host {host}: {what}: not within {}s{detail}", within.as_secs())]
    Deadline {
        /// Number of the host.
        host: usize,
        /// The expected event.
        what: String,
        /// The deadline.
        within: Duration,
        /// Output until then.
        detail: String,
    },
    /// A command that must succeed failed.
    #[error("host {host}: \"{command}\" ended with {status}: {stderr}")]
    Command {
        /// Number of the host.
        host: usize,
        /// The command.
        command: String,
        /// Its exit code or signal.
        status: String,
        /// Its standard error.
        stderr: String,
    },
    /// The agent refused, or its connection broke.
    #[error("host {host}: agent: {reason}")]
    Agent {
        /// Number of the host.
        host: usize,
        /// Why.
        reason: String,
    },
    /// An operation of this machine's system failed.
    #[error("{what}")]
    Io {
        /// The operation.
        what: String,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}

impl TestbedError {
    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io {
            what: what.into(),
            source,
        }
    }

    /// Returns whether the host itself failed, so that a new testbed may succeed.
    #[must_use]
    pub fn is_hung_host(&self) -> bool {
        matches!(self, Self::HostHung { .. } | Self::Boot { .. })
    }
}
