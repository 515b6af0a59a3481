//! Parts of the report that not every run has.

use serde::{Deserialize, Serialize};

/// What came of the command of `--exec`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// The command.
    pub command: String,
    /// How it ended, as a shell has it; `null` when that is not known.
    pub exit_status: Option<u8>,
    /// What it has written to its standard output.
    pub stdout_bytes: u64,
    /// What it has written to its standard error.
    pub stderr_bytes: u64,
}
