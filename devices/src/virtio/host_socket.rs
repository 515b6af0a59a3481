//! A Unix socket of the host that is a device's other end.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;

use fabric_host::lock_file;
use fabric_host::root::path_now;

/// The longest path of a socket: the kernel accepts 107 bytes, and that of a vsock may be followed
/// by `_4294967295`.
pub const HOST_SOCKET_PATH_BYTES_MAX: usize = 107 - 11;

/// How long to wait for other processes that create sockets in the same directory; each takes
/// milliseconds.
const LOCK_TIME_MAX: Duration = Duration::from_secs(5);

/// Why the host's socket cannot be used.
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
    /// Another process listens there.
    #[error("the {what} {} is in use, possibly by another VM; choose another path", path.display())]
    InUse {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("the {what} {} exists and is not a socket; choose another path", path.display())]
    NotASocket {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// Another process keeps the directory locked.
    #[error(
        "the directory of the {what} {} is locked by another process for more than {} s; choose a path in \
         another one",
        path.display(),
        LOCK_TIME_MAX.as_secs()
    )]
    Locked {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// The socket cannot be created.
    #[error(
        "cannot create the {what} {}; choose a path in a directory that exists and that you may read and \
         write",
        path.display()
    )]
    Make {
        /// The device.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// The Unix socket of the host. Dropping it removes the socket file, and closes no connection.
#[derive(Debug)]
pub struct HostSocket {
    what: &'static str,
    /// Keeps the inode number from being reused for another file.
    listener: UnixListener,
    path: PathBuf,
    /// Identity of the socket file, if the file system provides one.
    identity: Option<Identity>,
}

/// Device and inode of a file.
type Identity = (u64, u64);

impl HostSocket {
    /// Creates the socket `path` of a device, which messages call `what`. A stale socket without a
    /// listener is replaced.
    ///
    /// # Errors
    ///
    /// Fails when another process listens there, or the socket cannot be created.
    pub fn listen(what: &'static str, path: &Path) -> Result<Self, HostSocketError> {
        let path = path.to_path_buf();
        if path.as_os_str().len() > HOST_SOCKET_PATH_BYTES_MAX {
            return Err(HostSocketError::PathTooLong { what, path });
        }
        // Without the lock, the second of two simultaneous starts could take the first one's
        // socket, which does not listen yet, for a stale one.
        let _lock = match lock_directory_of(&path) {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(HostSocketError::Locked { what, path });
            }
            Err(source) => return Err(HostSocketError::Make { what, path, source }),
        };
        if let Ok(there) = fs::symlink_metadata(&path) {
            if !there.file_type().is_socket() {
                return Err(HostSocketError::NotASocket { what, path });
            }
            if is_served(&path) {
                return Err(HostSocketError::InUse { what, path });
            }
            // The socket of a killed process. If removing fails, so does the bind below.
            let _ = fs::remove_file(&path);
        }
        match UnixListener::bind(&path) {
            Ok(listener) => Ok(Self {
                what,
                listener,
                identity: identity(&path),
                path,
            }),
            Err(source) => Err(HostSocketError::Make { what, path, source }),
        }
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The listener, for the device.
    pub(super) fn listener(&self) -> io::Result<UnixListener> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// The error of a device that cannot use the socket.
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
        let path = path_now(&self.path);
        // Another process may have removed it and created another one there.
        if self.identity.is_some() && self.identity == identity(&path) {
            let _ = fs::remove_file(&path);
        }
    }
}

fn identity(path: &Path) -> Option<Identity> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Whether a process listens at a socket. The check does not block, as an ordinary connect would
/// while the queue is full.
fn is_served(path: &Path) -> bool {
    let connect = || -> io::Result<()> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    match connect() {
        Ok(()) => true,
        // Only a refusal proves that no process listens; a full queue, for example, does not.
        Err(error) => !matches!(
            error.kind(),
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
        ),
    }
}

/// Locks the directory of `path` against other processes that create sockets in it, until it is
/// dropped. `WouldBlock` when another holder keeps the lock. No lock is taken where the file system
/// has none.
fn lock_directory_of(path: &Path) -> io::Result<File> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let file = File::open(directory)?;
    match lock_file(&file, LOCK_TIME_MAX) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
        // Some network file systems.
        Err(error) => tracing::warn!("{} cannot be locked: {error}", directory.display()),
        Ok(()) => {}
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::{Barrier, mpsc};
    use std::thread;

    use super::*;
    use crate::virtio::server_threads::LIMIT;

    /// Number of simultaneous starts, and of attempts.
    const STARTS: usize = 8;
    const ROUNDS: usize = 100;

    /// A directory, and a path in it with the stale socket of a killed process.
    fn stale() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        (directory, path)
    }

    #[test]
    fn of_many_that_start_at_once_one_gets_the_path_and_is_reached_there() {
        for _ in 0..ROUNDS {
            let (_directory, path) = stale();
            let barrier = Barrier::new(STARTS);
            let start = || {
                barrier.wait();
                HostSocket::listen("vsock", &path)
            };
            let mut results: Vec<_> = thread::scope(|scope| {
                let starts: Vec<_> = (0..STARTS).map(|_| scope.spawn(start)).collect();
                starts.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let winner = results.iter().position(Result::is_ok).unwrap();
            let winner = results.swap_remove(winner).unwrap();
            for other in results {
                let error = other.map(|_| "a second one has the path").unwrap_err();
                assert!(matches!(error, HostSocketError::InUse { .. }), "{error}");
            }
            let _client = UnixStream::connect(&path).unwrap();
            winner.listener().unwrap().accept().unwrap();
            drop(winner);
            assert!(!path.exists(), "it is removed with its owner");
        }
    }

    #[test]
    fn who_has_too_many_clients_is_there_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let full = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let address = SockAddr::unix(&path).unwrap();
        full.bind(&address).unwrap();
        full.listen(0).unwrap();
        let mut clients = Vec::new();
        loop {
            let client = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            client.set_nonblocking(true).unwrap();
            match client.connect(&address) {
                Ok(()) => clients.push(client),
                Err(error) => break assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        let (sender, results) = mpsc::channel();
        thread::spawn(move || sender.send(HostSocket::listen("console", &path)));
        let error = results.recv_timeout(LIMIT).expect("it waits").unwrap_err();
        assert!(matches!(error, HostSocketError::InUse { .. }), "{error}");
    }

    #[test]
    fn a_socket_that_another_has_put_in_its_place_stays() {
        let (_directory, path) = stale();
        let ours = HostSocket::listen("vsock", &path).unwrap();
        fs::remove_file(&path).unwrap();
        let others = UnixListener::bind(&path).unwrap();
        drop(ours);
        UnixStream::connect(&path).unwrap();
        drop(others);
    }

    #[test]
    fn a_path_without_a_directory_is_in_the_current_one() {
        drop(lock_directory_of(Path::new("socket")).unwrap());
        let error = lock_directory_of(Path::new("/no/such/socket")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
