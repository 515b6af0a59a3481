//! What can go wrong, each in one line that names the value and the remedy.

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
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// No distribution of this name in the manifest.
    #[error("no distribution is called \"{name}\"; the manifest has: {known}")]
    UnknownDistro {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// Files of other users can be made by root only.
    #[error("only root can make the root file system of \"{name}\": run as root")]
    NeedsRoot {
        /// The distribution.
        name: String,
    },
    /// apt has no lists, or is set up for another distribution.
    #[error("apt has no lists of a Debian release: run \"apt-get update\"")]
    NoRelease,
    /// The initial RAM disk cannot be made.
    #[error(transparent)]
    Initrd(#[from] initrd::InitrdError),
    /// A command is not installed.
    #[error("command \"{command}\" not found: run \"apt-get install {package}\"")]
    CommandMissing {
        /// The command.
        command: String,
        /// The Debian package that has it.
        package: String,
    },
    /// A command ended with an error.
    #[error("\"{command}\" failed ({status}): {detail}; {remedy}")]
    CommandFailed {
        /// The command with its arguments.
        command: String,
        /// How it ended.
        status: String,
        /// The last line that it wrote to its standard error.
        detail: String,
        /// What to do.
        remedy: String,
    },
    /// apt does not know the package, or not what it depends on.
    #[error("apt has no versioned kernel for \"{package}\": run \"apt-get update\"")]
    Unresolved {
        /// The meta package.
        package: String,
    },
    /// A hash differs from what it must be.
    #[error(
        "{what}: sha256 is {found}, but {expected} is expected: run \"apt-get update\" and try again"
    )]
    Checksum {
        /// The file.
        what: String,
        /// The hash it must have.
        expected: String,
        /// The hash it has.
        found: String,
    },
    /// A package lacks a file that it must have.
    #[error("package \"{package}\" has no {what}")]
    Incomplete {
        /// The package.
        package: String,
        /// What was looked for.
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
    /// The system would not read or write a file.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl ImageError {
    /// Makes the adapter for `map_err` that puts the path beside the system's error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}
