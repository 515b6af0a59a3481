//! The socket files of this process, which are removed however it ends.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Existing sockets; `None` when the process is about to end by force.
static BOUND: Mutex<Option<Vec<Bound>>> = Mutex::new(Some(Vec::new()));

/// A socket on which this process listens.
#[derive(Debug)]
struct Bound {
    path: PathBuf,
    /// Its device and inode, which no other file has while the socket is open.
    identity: Option<(u64, u64)>,
}

impl Bound {
    fn at(path: PathBuf) -> Self {
        let identity = identity(&path);
        Self { path, identity }
    }

    /// Removes the socket, but not another file at its path.
    fn remove(&self) {
        if self.identity.is_some() && self.identity == identity(&self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

fn bound() -> MutexGuard<'static, Option<Vec<Bound>>> {
    BOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Binds a socket that only this user can use, replacing a stale one.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    let mut bound = bound();
    let Some(bound) = &mut *bound else {
        return Err(io::Error::other("the process ends"));
    };
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    // Other users cannot enter the directory; this covers a later change of its permissions.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    bound.push(Bound::at(path.to_owned()));
    Ok(listener)
}

/// Removes a socket that is no longer used.
pub(super) fn remove(path: &Path) {
    let mut bound = bound();
    let ours = bound
        .iter_mut()
        .flat_map(|bound| bound.extract_if(.., |one| one.path == path));
    for one in ours {
        one.remove();
    }
}

/// Registers another socket of this process for removal when it ends by force; it is used until
/// then.
pub fn remove_with_ours(path: PathBuf) {
    if let Some(bound) = &mut *bound() {
        bound.push(Bound::at(path));
    }
}

/// Removes the sockets of this process, which is about to end by force, and prevents new ones.
pub fn remove_all() {
    for one in bound().take().into_iter().flatten() {
        one.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_has_put_in_its_place_stays() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let path = place.path().join("socket");
        let _ours = UnixListener::bind(&path).expect("is bound");
        let bound = Bound::at(path.clone());
        fs::remove_file(&path).expect("is there");
        let _others = UnixListener::bind(&path).expect("is bound");
        bound.remove();
        assert!(path.exists());
        super::bound()
            .as_mut()
            .expect("no end by force")
            .push(bound);
        remove(&path);
        assert!(path.exists());
        Bound::at(path.clone()).remove();
        assert!(!path.exists());
    }
}
