//! Checks whether this host is ready for `ssi-hv run`. There is one finding for each requirement,
//! with the exact command that fixes it.
//!
//! Each check is a function from the state of a [`Host`], whose root tests replace, to a
//! [`Finding`]. Where a device must be queried, gathering facts and evaluating them are two
//! functions, so that every evaluation has a test.

mod devices;
mod kernel;
mod kvm;
mod memory;
mod mitigations;
mod nodes;
pub mod output;
mod protection;
mod remote;
pub mod userfaultfd;

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use remote::ExaminedNode;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// No action needed.
    Ok,
    /// `run` works, but slower or with fewer features.
    Warning,
    /// `run` does not work.
    Missing,
}

/// A check's result with its details.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// Its result.
    pub status: Status,
    /// The observed state and its consequence.
    pub detail: String,
    /// The command that fixes it, if one exists and is needed.
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

/// The location of a host's `/proc`, `/sys` and `/dev`.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// Returns this host.
    #[must_use]
    pub fn this() -> Self {
        Self::at("/")
    }

    /// Returns a host whose file systems are under `root`.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns a file's trimmed text; empty when it cannot be read.
    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).map_or_else(|_| String::new(), |t| t.trim().to_owned())
    }

    /// Returns the sorted names in a directory; empty when it cannot be read.
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

    /// Opens a device for reading and writing.
    fn opens(&self, path: &str) -> io::Result<()> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path(path))
            .map(drop)
    }

    /// Returns whether the running kernel has a module, loaded or not.
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

/// Runs all checks, in the order in which problems are best fixed.
#[must_use]
pub fn examine(host: &Host) -> Vec<Finding> {
    let kvm = kvm::gather(host);
    vec![
        kernel::version(host),
        kvm::judge(&kvm),
        kvm::judge_dedicated_cpus(&kvm),
        userfaultfd::judge(&userfaultfd::gather(host)),
        protection::judge(&protection::gather(host)),
        memory::available(host),
        memory::memfd(host, memory::create_memfd()),
        memory::huge_pages(host),
        memory::locked(host),
        devices::rdma(host, &devices::verbs()),
        devices::tap(host),
        kernel::clock(host),
        mitigations::judge(host),
        nodes::requirements(host),
        nodes::page_walks(host),
        nodes::time_stamps(host, &kvm),
    ]
}

/// Returns whether everything that `run` requires is present.
#[must_use]
pub fn is_ready(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| finding.status != Status::Missing)
}

#[cfg(test)]
mod tests;
