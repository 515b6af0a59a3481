//! The files of this process's sockets, which go with it however it ends.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is there; none when the process is about to end by force.
static BOUND: Mutex<Option<Vec<Bound>>> = Mutex::new(Some(Vec::new()));

/// A socket on which this process listens.
#[derive(Debug)]
struct Bound {
    path: PathBuf,
    /// Its device and inode, which no other file has while it is listened on.
    identity: Option<(u64, u64)>,
}

impl Bound {
    fn at(path: PathBuf) -> Self {
        let identity = identity(&path);
        Self { path, identity }
    }

    /// Removes it, but not what somebody else has put in its place.
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

/// Makes a socket that nobody but this user may use, in the place of one that was left there.
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
    // Nobody else can enter the directory; this is for who would change that.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    bound.push(Bound::at(path.to_owned()));
    Ok(listener)
}

/// Removes a socket that is used no more.
pub(super) fn remove(path: &Path) {
    let mut bound = bound();
    let ours = bound
        .iter_mut()
        .flat_map(|bound| bound.extract_if(.., |one| one.path == path));
    for one in ours {
        one.remove();
    }
}

/// Has another socket of this process, which listens on it to its end, removed too when it ends by force.
pub fn remove_with_ours(path: PathBuf) {
    if let Some(bound) = &mut *bound() {
        bound.push(Bound::at(path));
    }
}

/// Removes the sockets of this process, which is about to end by force. None is made from now on.
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
