//! Errors in one line that names the value and the remedy.

use std::path::{Path, PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// `kernels.toml` cannot be used.
    #[error("kernel manifest {}: {reason}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No kernel of this name in the manifest.
    #[error("no kernel is called \"{name}\"; the manifest has: {known}")]
    UnknownKernel {
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
    },
    /// No distribution of this name in the manifest.
    #[error("no distribution is called \"{name}\"; the manifest has: {known}")]
    UnknownDistro {
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
    },
    /// Only root can create files of other users.
    #[error("only root can create the root file system of \"{name}\": run as root")]
    NeedsRoot {
        /// The distribution.
        name: String,
    },
    /// apt has no lists, or is configured for another distribution.
    #[error("apt has no lists of a Debian release: run \"apt-get update\"")]
    NoRelease,
    /// The initial RAM disk cannot be created.
    #[error(transparent)]
    Initrd(#[from] initrd::InitrdError),
    /// A command is not installed.
    #[error("command \"{command}\" not found: run \"apt-get install {package}\"")]
    CommandMissing {
        /// The command.
        command: String,
        /// The Debian package that provides it.
        package: String,
    },
    /// A program needs a library that this machine does not have.
    #[error("{} needs {library}, which this machine lacks: run scripts/setup", program.display())]
    LibraryMissing {
        /// The program.
        program: PathBuf,
        /// The library.
        library: String,
    },
    /// A command ended with an error.
    #[error("\"{command}\" failed ({status}): {detail}; {remedy}")]
    CommandFailed {
        /// The command with its arguments.
        command: String,
        /// Its exit status.
        status: String,
        /// The last line of its standard error.
        detail: String,
        /// The remedy.
        remedy: String,
    },
    /// apt does not know the package, or not its dependencies.
    #[error("apt has no versioned kernel for \"{package}\": run \"apt-get update\"")]
    Unresolved {
        /// The meta package.
        package: String,
    },
    /// apt does not know the package.
    #[error("apt has no package \"{package}\": run \"apt-get update\"")]
    UnknownPackage {
        /// The package.
        package: String,
    },
    /// A hash differs from the expected one.
    #[error(
        "{what}: sha256 is {found}, but {expected} is expected: run \"apt-get update\" and try again"
    )]
    Checksum {
        /// The file.
        what: String,
        /// The expected hash.
        expected: String,
        /// The actual hash.
        found: String,
    },
    /// A package lacks a required file.
    #[error("package \"{package}\" has no {what}")]
    Incomplete {
        /// The package.
        package: String,
        /// The missing file.
        what: String,
    },
    /// The kernel's compressed payload cannot be extracted.
    #[error("{}: {reason}", path.display())]
    NotBzImage {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file cannot be read or written.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
}

impl ImageError {
    /// Creates the adapter for `map_err` that adds the path to the system's error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}
