//! Why an initial RAM disk cannot be made.

use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate, in one line that names the value and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum InitrdError {
    /// This host has no statically linked busybox.
    #[error("command \"busybox\" not found: run \"apt-get install busybox-static\"")]
    BusyboxMissing,
    /// The busybox of this host does not list its commands.
    #[error("\"{} --list\" failed ({status})", path.display())]
    BusyboxList {
        /// The program.
        path: PathBuf,
        /// How it ended.
        status: std::process::ExitStatus,
    },
    /// The system would not read or write a file.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl InitrdError {
    /// Makes the adapter for `map_err` that adds the path to the system's error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}
