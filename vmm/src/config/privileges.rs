//! `--user` and `--chroot` of a VM, checked against the settings that need more later.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use memory_fabric::fabric::TransportKind;
use ssi_hv_sandbox::{PrivilegeError, Privileges};

use super::choice::{Choice as _, OnReboot};
use super::settings::RunSettings;
use super::vsock::VsockArg;

/// Why a VM cannot give up privileges.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegesError {
    /// User or directory cannot be used.
    #[error(transparent)]
    Unusable(#[from] PrivilegeError),
    /// Root leaves a root directory at will.
    #[error("--chroot needs --user, since root can leave such a directory; add --user USER")]
    WithoutUser,
    /// Another boot opens everything again.
    #[error(
        "--on-reboot restart cannot be combined with --user: another boot opens KVM and the kernel again, which the user may not; remove one of the two, and let a service restart the VM"
    )]
    WithRestart,
    /// Each thread has rights of its own after the change, which are not those that opened a device.
    #[error(
        "--transport {0} cannot be combined with --user: the kernel refuses requests to an RDMA device from a thread that changed its user; start ssi-hv as that user, or use --transport auto, which takes TCP"
    )]
    WithRdma(&'static str),
    /// A file that is created later is elsewhere.
    #[error(
        "{flag} {} is not below --chroot {}, where the VM's process creates it; name a file there, in a directory of the user",
        path.display(),
        root.display()
    )]
    Outside {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The directory.
        root: PathBuf,
    },
    /// The directory of such a file cannot be found.
    #[error("cannot use the directory of {flag} {}; name a file in a directory that exists", path.display())]
    Directory {
        /// The flag.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl RunSettings {
    /// Returns the privileges that remain, if some are given up.
    pub(super) fn checked_privileges(&self) -> Result<Option<Privileges>, PrivilegesError> {
        let Some(user) = &self.user else {
            return match self.chroot {
                Some(_) => Err(PrivilegesError::WithoutUser),
                None => Ok(None),
            };
        };
        if self.on_reboot == OnReboot::Restart {
            return Err(PrivilegesError::WithRestart);
        }
        if let TransportKind::Rdma | TransportKind::Hybrid = self.transport {
            return Err(PrivilegesError::WithRdma(self.transport.word()));
        }
        let privileges = Privileges::new(user, self.chroot.as_deref())?;
        Ok(Some(privileges))
    }
}

/// Returns the path by which a file is created, replaced or removed while the guest runs and after.
/// With another root it is canonical and below it.
pub(super) fn placed(
    privileges: Option<&Privileges>,
    flag: &'static str,
    path: &Path,
) -> Result<PathBuf, PrivilegesError> {
    let Some(root) = privileges.and_then(Privileges::root) else {
        return Ok(path.to_owned());
    };
    let failed = |source| PrivilegesError::Directory {
        flag,
        path: path.to_owned(),
        source,
    };
    // The target of a link is replaced, not the link.
    let found = fs::canonicalize(path).or_else(|error| {
        let name = path.file_name().ok_or(error)?;
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        Ok(fs::canonicalize(directory)?.join(name))
    });
    let found = found.map_err(failed)?;
    if found.starts_with(root) {
        return Ok(found);
    }
    Err(PrivilegesError::Outside {
        flag,
        path: path.to_owned(),
        root: root.to_owned(),
    })
}

/// Likewise for the socket of `--vsock`, beside which the guest finds those of programs.
pub(super) fn placed_vsock(
    privileges: Option<&Privileges>,
    vsock: Option<&VsockArg>,
) -> Result<Option<VsockArg>, PrivilegesError> {
    let placed = vsock.map(|vsock| {
        Ok(VsockArg {
            path: placed(privileges, "--vsock path=", &vsock.path)?,
            ..vsock.clone()
        })
    });
    placed.transpose()
}

/// Returns the path by which files are read again while the guest runs: canonical if they are below
/// another root. Elsewhere they are read once.
pub(super) fn read_again(privileges: Option<&Privileges>, path: &Path) -> PathBuf {
    let root = privileges.and_then(Privileges::root);
    let found = fs::canonicalize(path).ok();
    let inside = found.filter(|found| root.is_some_and(|root| found.starts_with(root)));
    inside.unwrap_or_else(|| path.to_owned())
}
