//! Is this host ready for `ssi-hv run`? One finding for each thing that matters, with the exact
//! command that mends it.
//!
//! Each check is a function from what is seen (a [`Host`], whose root tests replace) to a
//! [`Finding`]. Where a device has to be asked, gathering facts and judging them are two
//! functions, so that every judgement has a test.

mod devices;
mod kernel;
mod kvm;
mod memory;
pub mod output;
pub mod userfaultfd;

pub use memory::available_bytes;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Nothing to do.
    Ok,
    /// `run` works, but something is slower, or not to be had.
    Warning,
    /// `run` does not work without it.
    Missing,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The name of the check.
    pub check: &'static str,
    /// What it came to.
    pub status: Status,
    /// What was seen, and what that means.
    pub detail: String,
    /// The command that mends it; none when there is nothing to mend, or no command does.
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, detail: impl Into<String>) -> Self {
        Self {
            check,
            status: Status::Ok,
            detail: detail.into(),
            remedy: None,
        }
    }

    fn warning(check: &'static str, detail: impl Into<String>) -> Self {
        Self {
            status: Status::Warning,
            ..Self::ok(check, detail)
        }
    }

    fn missing(check: &'static str, detail: impl Into<String>) -> Self {
        Self {
            status: Status::Missing,
            ..Self::ok(check, detail)
        }
    }

    fn remedy(self, command: impl Into<String>) -> Self {
        Self {
            remedy: Some(command.into()),
            ..self
        }
    }
}

/// Where a host's `/proc`, `/sys` and `/dev` are.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// This host.
    #[must_use]
    pub fn this() -> Self {
        Self::at("/")
    }

    /// A host whose file systems are under `root`.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file's text without the white space around it; empty when it cannot be read.
    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).map_or_else(|_| String::new(), |t| t.trim().to_owned())
    }

    /// The names in a directory, sorted; none when it cannot be read.
    fn names_in(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else {
            return Vec::new();
        };
        let mut names: Vec<_> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    fn exists(&self, path: &str) -> bool {
        Path::exists(&self.path(path))
    }

    /// Whether a device can be opened for reading and writing.
    fn opens(&self, path: &str) -> io::Result<()> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path(path))
            .map(drop)
    }

    /// Whether the kernel that runs has a module, loaded or to be loaded.
    fn has_module(&self, name: &str) -> bool {
        let release = self.read("/proc/sys/kernel/osrelease");
        let file = format!("/{name}.ko");
        self.exists(&format!("/sys/module/{name}"))
            || self
                .read(&format!("/lib/modules/{release}/modules.dep"))
                .lines()
                .any(|line| {
                    line.split(':')
                        .next()
                        .is_some_and(|path| path.contains(&file))
                })
    }
}

/// Looks at everything, in the order in which it is mended best.
#[must_use]
pub fn examine(host: &Host) -> Vec<Finding> {
    vec![
        kernel::version(host),
        kvm::judge(&kvm::gather(host)),
        userfaultfd::judge(&userfaultfd::gather(host)),
        memory::available(host),
        memory::memfd(host, memory::create_memfd()),
        memory::huge_pages(host),
        memory::locked(host),
        devices::rdma(host, &devices::verbs()),
        devices::tap(host),
        kernel::clock(host),
    ]
}

/// Whether nothing is missing that `run` needs.
#[must_use]
pub fn is_ready(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| finding.status != Status::Missing)
}

#[cfg(test)]
mod tests;
