//! What a process of a VM may still do once it has started.
//!
//! A guest that takes over its monitor gets what the monitor has. [`Sandbox::enter`] therefore gives
//! up what a running VM does not need: all files but those that are named and those of the system
//! ([Landlock], kernels from 5.13 on), and all system calls but those of an ordinary service (seccomp).
//! Threads that the guest or a donor is closest to have fewer ([`fabric_host::ThreadClass`]).
//!
//! A process that root starts can give up more: [`Privileges`] makes it another user, in a root
//! directory of its own.
//!
//! [Landlock]: https://docs.kernel.org/userspace-api/landlock.html

#[macro_use]
mod calls;
mod classes;
mod files;
mod ids;
mod privileges;
mod threads;
mod user;

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use self::calls::call_name;
pub use self::privileges::{PrivilegeError, Privileges};
pub use self::threads::be_alone;
pub use self::user::{User, UserError};

/// Why a process cannot be restricted.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// The kernel refuses the rules for files.
    #[error("the kernel refuses the rules of Landlock")]
    Files(#[source] landlock::RulesetError),
    /// Files would stay unrestricted for other threads, with which this one shares its memory.
    #[error("files cannot be restricted for threads that exist already: {0}")]
    Threads(String),
    /// It is not known whether there are other threads.
    #[error("cannot list the threads of this process in /proc/self/task")]
    UnknownThreads(#[source] io::Error),
    /// The kernel refuses the filter of system calls.
    #[error("the kernel refuses the filter of seccomp")]
    Calls(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The kernel refuses that rights are never gained again.
    #[error("the kernel refuses no_new_privs")]
    NoNewPrivileges(#[source] io::Error),
}

/// What is in force. Keep it while the process runs: some rules hold only while their file is open.
#[must_use]
#[derive(Debug)]
pub struct Restricted {
    /// Nothing if files are not restricted.
    files: Option<Vec<landlock::PathFd>>,
}

impl Restricted {
    /// Whether files are restricted. The kernel has Landlock then, and it is on.
    #[must_use]
    pub const fn files(&self) -> bool {
        self.files.is_some()
    }

    /// Closes what is not below `root`, which becomes the root of this process: from a directory
    /// outside, it could be left. The rules for what is outside are not needed any more.
    pub fn keep_below(&mut self, root: &Path) {
        if let Some(files) = &mut self.files {
            files.retain(|file| privileges::is_below(file, root));
        }
    }
}

/// The files that a process needs beside those of the system.
#[derive(Clone, Debug, Default)]
pub struct Sandbox {
    read: Vec<PathBuf>,
    write: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

impl Sandbox {
    /// A file, or a directory with all that it contains, that is read. What does not exist is left
    /// out.
    pub fn read(&mut self, path: impl Into<PathBuf>) {
        self.read.push(path.into());
    }

    /// A file that exists and is read and written.
    pub fn write(&mut self, path: impl Into<PathBuf>) {
        self.write.push(path.into());
    }

    /// A directory in which files and sockets are created, replaced and removed.
    pub fn create_in(&mut self, path: impl Into<PathBuf>) {
        self.directories.push(path.into());
    }

    /// The directory of a file or socket that will be created or replaced. A device or pipe is only
    /// written.
    pub fn create(&mut self, path: impl Into<PathBuf>) {
        let mut path = path.into();
        let found = path.metadata();
        if found.is_ok_and(|found| {
            let kind = found.file_type();
            kind.is_char_device() || kind.is_block_device() || kind.is_fifo()
        }) {
            return self.write(path);
        }
        path.pop();
        self.create_in(if path.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            path
        });
    }

    /// Restricts this process. System calls are restricted for all its threads, files for this thread
    /// and those that it starts from here on: see [`be_alone`]. There is no way back.
    ///
    /// A file that is not allowed is `EACCES`; a system call that is not allowed ends the process with
    /// `SIGSYS`. Threads that begin a class from here on have fewer calls.
    ///
    /// # Errors
    /// When the kernel refuses. A kernel without Landlock is none: [`Restricted::files`] is false then.
    pub fn enter(&self) -> Result<Restricted, SandboxError> {
        let restricted = self.enter_files()?;
        restrict_calls()?;
        Ok(restricted)
    }

    /// Restricts files alone; [`restrict_calls`] follows.
    ///
    /// # Errors
    /// As for [`enter`](Self::enter).
    pub fn enter_files(&self) -> Result<Restricted, SandboxError> {
        let files = files::restrict(self).map_err(SandboxError::Files)?;
        Ok(Restricted { files })
    }
}

/// Restricts the system calls of all threads of this process, as [`Sandbox::enter`] does.
///
/// # Errors
/// When the kernel refuses.
pub fn restrict_calls() -> Result<(), SandboxError> {
    calls::restrict().map_err(SandboxError::Calls)?;
    fabric_host::restrict_classes(classes::restrict);
    Ok(())
}

/// Prevents this thread, those that it starts, and programs that they execute from gaining rights.
///
/// # Errors
/// When the kernel refuses.
pub fn never_gain_privileges() -> Result<(), SandboxError> {
    let set = rustix::thread::set_no_new_privs(true);
    set.map_err(|error| SandboxError::NoNewPrivileges(error.into()))
}
