//! Why an initial RAM disk cannot be created.

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
        /// Its exit status.
        status: std::process::ExitStatus,
    },
    /// A file cannot be read or written.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl InitrdError {
    /// Creates the adapter for `map_err` that adds the path to the system's error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}
