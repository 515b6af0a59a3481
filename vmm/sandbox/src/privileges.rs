//! What root gives up: the user, the groups, the capabilities, and the root directory.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::process::{chroot, fchdir, geteuid};
use rustix::thread::{CapabilitySet, capabilities};
use thiserror::Error;

use crate::ids;
use crate::user::{User, UserError};

/// Why privileges cannot be given up.
#[derive(Debug, Error)]
pub enum PrivilegeError {
    /// The user cannot be used.
    #[error(transparent)]
    User(#[from] UserError),
    /// This process is not root.
    #[error(
        "--user needs root, and this process is the user {0}; start it with sudo or as a service of the system, or omit --user and --chroot"
    )]
    NotRoot(u32),
    /// This process is root without its rights.
    #[error(
        "--user and --chroot need {missing}, which this process lacks (as root in a container may); start it with them, or omit --user and --chroot"
    )]
    Capabilities {
        /// The capabilities that it lacks.
        missing: String,
    },
    /// The directory cannot be used.
    #[error("cannot use --chroot {}; name a directory that exists", path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others could replace what is in the directory, or the directory itself.
    #[error(
        "--chroot {}: {} {problem}; give it to root with mode 0755 or less, and the user a directory in it",
        path.display(),
        part.display()
    )]
    OpenToOthers {
        /// The directory.
        path: PathBuf,
        /// The directory, or one above it.
        part: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A directory outside is open, by which the root could be left.
    #[error(
        "descriptor {descriptor} is the directory {}, by which a process leaves --chroot; start ssi-hv without it",
        path.display()
    )]
    DirectoryOpen {
        /// The descriptor.
        descriptor: RawFd,
        /// The directory.
        path: PathBuf,
    },
    /// A call failed.
    #[error("cannot {action}")]
    Call {
        /// What was to be done.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// Something is left of what root has, which is a bug, or a security module's doing.
    #[error("root's rights are not gone: {0}")]
    Left(String),
}

fn call<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> PrivilegeError {
    move |error| PrivilegeError::Call {
        action,
        source: error.into(),
    }
}

/// The user that a process becomes, and the directory that becomes its root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Privileges {
    user: User,
    root: Option<PathBuf>,
}

impl Privileges {
    /// Checks whether this process can become a user, given as [`User::find`] says, and take a
    /// directory as its root.
    ///
    /// # Errors
    ///
    /// When this process is not root, there is no such user, or the directory is open to others.
    pub fn new(user: &str, root: Option<&Path>) -> Result<Self, PrivilegeError> {
        let own = geteuid();
        if !own.is_root() {
            return Err(PrivilegeError::NotRoot(own.as_raw()));
        }
        let held = capabilities(None).map_err(call("read the capabilities of this process"))?;
        let mut needed = vec![
            (CapabilitySet::SETUID, "CAP_SETUID"),
            (CapabilitySet::SETGID, "CAP_SETGID"),
        ];
        needed.extend(root.map(|_| (CapabilitySet::SYS_CHROOT, "CAP_SYS_CHROOT")));
        needed.retain(|(one, _)| !held.effective.contains(*one));
        if !needed.is_empty() {
            let names: Vec<_> = needed.iter().map(|(_, name)| *name).collect();
            let missing = names.join(", ");
            return Err(PrivilegeError::Capabilities { missing });
        }
        Ok(Self {
            user: User::find(user)?,
            root: root.map(checked_root).transpose()?,
        })
    }

    /// The user.
    #[must_use]
    pub const fn user(&self) -> &User {
        &self.user
    }

    /// The directory that becomes the root, as a canonical path.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// Changes groups, root and user of all threads of this process, in this order, and checks that
    /// nothing is left of root. There is no way back.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or directories outside the new root are open. End the process then:
    /// some rights may be gone.
    pub fn give_up(&self) -> Result<(), PrivilegeError> {
        ids::leave_groups().map_err(call("leave the groups of root"))?;
        if let Some(root) = &self.root {
            enter_root(root)?;
        }
        ids::change_group(self.user.gid()).map_err(call("become the group of --user"))?;
        ids::change_user(self.user.uid()).map_err(call("become the user of --user"))?;
        self.check()
    }

    fn check(&self) -> Result<(), PrivilegeError> {
        let (users, groups, more) = ids::current().map_err(call("read the user"))?;
        if users != [self.user.uid(); 3] || groups != [self.user.gid(); 3] || more != 0 {
            let text = format!("users {users:?}, groups {groups:?}, and {more} more groups");
            return Err(PrivilegeError::Left(text));
        }
        let held = capabilities(None).map_err(call("read the capabilities of this process"))?;
        let held = held.effective | held.permitted;
        if !held.is_empty() {
            return Err(PrivilegeError::Left(format!("capabilities {held:?}")));
        }
        if ids::can_become_root() {
            let text = "this process can become root again".to_owned();
            return Err(PrivilegeError::Left(text));
        }
        Ok(())
    }
}

/// Returns the canonical path of a directory that, like all above it, is root's alone to change.
fn checked_root(path: &Path) -> Result<PathBuf, PrivilegeError> {
    let failed = |source| PrivilegeError::Root {
        path: path.to_owned(),
        source,
    };
    let root = fs::canonicalize(path).map_err(failed)?;
    for part in root.ancestors() {
        let found = fs::symlink_metadata(part).map_err(failed)?;
        // In a directory with this bit, such as /tmp, others replace nothing of root's.
        let is_sticky = found.mode() & libc::S_ISVTX != 0 && part != root;
        let problem = if !found.is_dir() {
            return Err(failed(io::ErrorKind::NotADirectory.into()));
        } else if found.uid() != 0 {
            "belongs to another user than root"
        } else if found.mode() & 0o022 != 0 && !is_sticky {
            "can be written by others than root"
        } else {
            continue;
        };
        return Err(PrivilegeError::OpenToOthers {
            path: path.to_owned(),
            part: part.to_owned(),
            problem,
        });
    }
    if root == Path::new("/") {
        return Err(failed(io::Error::other("it is the root already")));
    }
    Ok(root)
}

/// Makes a directory the root and the working directory of this process.
fn enter_root(root: &Path) -> Result<(), PrivilegeError> {
    check_descriptors(root)?;
    // Landlock lets no directory be read that the VM does not need, and each be named.
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(root)
        .and_then(|opened| Ok((opened.metadata()?, opened)));
    let failed = |source| PrivilegeError::Root {
        path: root.to_owned(),
        source,
    };
    let (found, opened) = opened.map_err(failed)?;
    // As at the start: only root can have changed it since.
    if found.uid() != 0 || found.mode() & 0o022 != 0 {
        return Err(failed(io::Error::other("it was given to others")));
    }
    fchdir(&opened).map_err(call("enter the directory of --chroot"))?;
    chroot(".").map_err(call("make --chroot the root"))?;
    rustix::process::chdir("/").map_err(call("enter the new root"))
}

/// Checks that no directory outside `root` is open: relative paths would lead from it to all files.
fn check_descriptors(root: &Path) -> Result<(), PrivilegeError> {
    let failed = "look at the descriptors of this process in /proc/self/fd";
    let entries = fs::read_dir("/proc/self/fd").map_err(call(failed))?;
    let links = entries.map(|entry| Ok(entry?.path()));
    let links: Vec<_> = links.collect::<io::Result<_>>().map_err(call(failed))?;
    for link in links {
        // The descriptor by which they were read is closed by now.
        let (Ok(path), Ok(found)) = (fs::read_link(&link), fs::metadata(&link)) else {
            continue;
        };
        if !found.is_dir() || path.starts_with(root) {
            continue;
        }
        let number = link
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        return Err(PrivilegeError::DirectoryOpen {
            descriptor: number.unwrap_or(-1),
            path,
        });
    }
    Ok(())
}

/// Whether a descriptor is of something below `root`.
pub(crate) fn is_below(descriptor: &impl std::os::fd::AsFd, root: &Path) -> bool {
    let link = format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd());
    fs::read_link(link).is_ok_and(|path| path.starts_with(root))
}
