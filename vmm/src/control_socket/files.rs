//! The files of this process's sockets, which go with it however it ends.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is there; none when the process is about to end by force.
static BOUND: Mutex<Option<Vec<PathBuf>>> = Mutex::new(Some(Vec::new()));

fn bound() -> MutexGuard<'static, Option<Vec<PathBuf>>> {
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
    bound.push(path.to_owned());
    Ok(listener)
}

/// Removes a socket that is used no more.
pub(super) fn remove(path: &Path) {
    if let Some(bound) = &mut *bound() {
        bound.retain(|other| other != path);
    }
    let _ = fs::remove_file(path);
}

/// Has another socket of this process removed too when it ends by force.
pub fn remove_with_ours(path: PathBuf) {
    if let Some(bound) = &mut *bound() {
        bound.push(path);
    }
}

/// Removes the sockets of this process, which is about to end by force. None is made from now on.
pub fn remove_all() {
    for path in bound().take().into_iter().flatten() {
        let _ = fs::remove_file(path);
    }
}
