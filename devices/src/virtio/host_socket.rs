//! A Unix socket of the host at which a device has its other end.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;

use crate::lock_file;

/// The longest path of a socket: the kernel takes 107 bytes, of which that of a vsock may be followed
/// by `_4294967295`.
pub const HOST_SOCKET_PATH_BYTES_MAX: usize = 107 - 11;

/// How long others are waited for that make sockets in the same directory, each of whom takes
/// milliseconds.
const LOCK_TIME_MAX: Duration = Duration::from_secs(5);

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
    /// Somebody keeps others from making sockets there.
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
    /// The socket cannot be made.
    #[error(
        "cannot make the {what} {}; choose a path in a directory that exists and that you may read and \
         write",
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
    /// Keeps the number of its inode from being given to another file.
    listener: UnixListener,
    path: PathBuf,
    /// What tells it from another socket at its path, if the file system says.
    identity: Option<Identity>,
}

/// Device and inode of a file.
type Identity = (u64, u64);

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
        // Of two that start at once the second one would take the socket of the first, which does not
        // listen yet, for one that was left behind.
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
            // Of a process that was killed. Where that fails, so does what follows.
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
        // Somebody may have removed it, and another one may be there now.
        if self.identity.is_some() && self.identity == identity(&self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<Identity> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Whether somebody listens at a socket. Asking does not wait: an ordinary connect would, while the queue
/// is full.
fn is_served(path: &Path) -> bool {
    let connect = || -> io::Result<()> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    match connect() {
        Ok(()) => true,
        // Anything else than a refusal, such as a full queue, is no sign of an end.
        Err(error) => !matches!(
            error.kind(),
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
        ),
    }
}

/// Keeps others out who make sockets in the directory of `path`, until it is dropped; `WouldBlock` when
/// one of them does not go. Nothing is kept where the file system has no such locks.
fn lock_directory_of(path: &Path) -> io::Result<File> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let file = File::open(directory)?;
    match lock_file(&file, LOCK_TIME_MAX) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
        // Some file systems of networks.
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

    /// Starts that are tried at once, and how often.
    const STARTS: usize = 8;
    const ROUNDS: usize = 100;

    /// A directory, and a path in it at which a process that was killed has left its socket.
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
            assert!(!path.exists(), "it goes with its owner");
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
        let (sender, told) = mpsc::channel();
        thread::spawn(move || sender.send(HostSocket::listen("console", &path)));
        let error = told.recv_timeout(LIMIT).expect("it waits").unwrap_err();
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
