//! A Unix socket of the host at which a device has its other end.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The longest path of a socket: the kernel takes 107 bytes, of which that of a vsock may be followed
/// by `_4294967295`.
pub const HOST_SOCKET_PATH_BYTES_MAX: usize = 107 - 11;

/// Why the host's socket cannot be had.
#[derive(Debug, Error)]
pub enum HostSocketError {
    /// Its path is too long for a socket.
    #[error(
        "the path of the {what} {} has {} bytes, {HOST_SOCKET_PATH_BYTES_MAX} is the limit; choose a \
         shorter one",
        path.display(),
        path.as_os_str().len()
    )]
    PathTooLong {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// Somebody listens there.
    #[error("the {what} {} is in use, by another VM perhaps; choose another path", path.display())]
    InUse {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("the {what} {} is there already and no socket; choose another path", path.display())]
    NotASocket {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// The socket cannot be made.
    #[error(
        "cannot make the {what} {}; choose a path in a directory that exists and that you may write to",
        path.display()
    )]
    Make {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// The Unix socket of the host. It is removed when this is dropped, which ends no connection.
#[derive(Debug)]
pub struct HostSocket {
    what: &'static str,
    listener: UnixListener,
    path: PathBuf,
}

impl HostSocket {
    /// Makes the socket `path` of a device, which messages call `what`; one that nobody listens on any
    /// more is replaced.
    ///
    /// # Errors
    ///
    /// When somebody listens there, or it cannot be made.
    pub fn listen(what: &'static str, path: &Path) -> Result<Self, HostSocketError> {
        let path = path.to_path_buf();
        if path.as_os_str().len() > HOST_SOCKET_PATH_BYTES_MAX {
            return Err(HostSocketError::PathTooLong { what, path });
        }
        if let Ok(there) = std::fs::symlink_metadata(&path) {
            if !there.file_type().is_socket() {
                return Err(HostSocketError::NotASocket { what, path });
            }
            match UnixStream::connect(&path) {
                // Of a process that was killed.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    // Where that fails, so does what follows.
                    let _ = std::fs::remove_file(&path);
                }
                _ => return Err(HostSocketError::InUse { what, path }),
            }
        }
        match UnixListener::bind(&path) {
            Ok(listener) => Ok(Self {
                what,
                listener,
                path,
            }),
            Err(source) => Err(HostSocketError::Make { what, path, source }),
        }
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What accepts connections, for the device.
    pub(super) fn listener(&self) -> io::Result<UnixListener> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// The error of a device that cannot use it.
    pub(super) fn unusable(&self, source: io::Error) -> HostSocketError {
        HostSocketError::Make {
            what: self.what,
            path: self.path.clone(),
            source,
        }
    }
}

impl Drop for HostSocket {
    fn drop(&mut self) {
        // It is ours, and it may be gone already.
        let _ = std::fs::remove_file(&self.path);
    }
}
