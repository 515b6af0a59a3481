//! What can go wrong with a testbed.

use std::time::Duration;

/// An error of the testbed, not of what is tested in it, save [`Deadline`](Self::Deadline) and
/// [`Command`](Self::Command).
#[derive(Debug, thiserror::Error)]
pub enum TestbedError {
    /// The configuration is impossible.
    #[error("testbed: {0}")]
    Config(String),
    /// A kernel or the hosts' initramfs cannot be made.
    #[error("testbed image")]
    Image(#[from] kernel_images::ImageError),
    /// A host's emulator could not be started, or ended.
    #[error("host {host}: {reason}\n--- end of {log} ---\n{tail}")]
    Boot {
        /// The host.
        host: usize,
        /// What happened.
        reason: String,
        /// The log of its console.
        log: String,
        /// The log's last lines.
        tail: String,
    },
    /// A running host stopped answering; see TCG's lost interrupts in `docs`. Restart the
    /// testbed and try again.
    #[error("host {host} hung: no heartbeat for {}s (see {log})", silent.as_secs())]
    HostHung {
        /// The host.
        host: usize,
        /// For how long it has been silent.
        silent: Duration,
        /// The log of its console.
        log: String,
    },
    /// Something in a host took too long.
    #[error("host {host}: {what}: not within {}s{detail}", within.as_secs())]
    Deadline {
        /// The host.
        host: usize,
        /// What was waited for.
        what: String,
        /// How long was waited.
        within: Duration,
        /// What had come by then, for the reader.
        detail: String,
    },
    /// A command that must succeed did not.
    #[error("host {host}: \"{command}\" ended with {status}: {stderr}")]
    Command {
        /// The host.
        host: usize,
        /// The command.
        command: String,
        /// Its exit code, or signal.
        status: String,
        /// What it wrote to its standard error.
        stderr: String,
    },
    /// The agent refused, or its connection broke.
    #[error("host {host}: agent: {reason}")]
    Agent {
        /// The host.
        host: usize,
        /// Why.
        reason: String,
    },
    /// The system refused something on this machine.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
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

    /// Whether the host itself failed, so that a new testbed may do better.
    #[must_use]
    pub fn is_hung_host(&self) -> bool {
        matches!(self, Self::HostHung { .. } | Self::Boot { .. })
    }
}
