//! Locks of the directories, so that names are assigned exclusively.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fabric_host::lock_file;

use super::{Directory, DirectoryError, search_path};

/// Timeout for a lock. Processes that start at the same time hold it for milliseconds each.
const LOCK_TIME_MAX: Duration = Duration::from_secs(5);

impl Directory {
    /// Locks the directory for listening until the lock is dropped, so that only one of two VMs
    /// with the same name that start at once gets it.
    ///
    /// # Errors
    ///
    /// Fails when the directory cannot be opened, or at the timeout.
    pub fn lock(&self) -> Result<File, DirectoryError> {
        let unusable = |source| DirectoryError::Unusable {
            path: self.path.clone(),
            source,
        };
        let directory = File::open(&self.path).map_err(unusable)?;
        match lock_file(&directory, LOCK_TIME_MAX) {
            Ok(()) => Ok(directory),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(DirectoryError::Locked {
                    path: self.path.clone(),
                })
            }
            Err(error) => Err(unusable(error)),
        }
    }

    /// Locks all directories of this user until the locks are dropped: a login session and a
    /// service listen in different directories, but only one of two VMs with the same name may get
    /// it. The caller must hold no other lock of these directories.
    ///
    /// # Errors
    ///
    /// Fails when one of them cannot be opened, or at the timeout.
    pub fn lock_all() -> Result<Vec<File>, DirectoryError> {
        Self::lock_all_of(&search_path())
    }

    fn lock_all_of(paths: &[PathBuf]) -> Result<Vec<File>, DirectoryError> {
        let there = || {
            let opened = paths.iter().filter_map(|path| Self::open(path).ok());
            let mut found: Vec<_> = opened.collect();
            // All processes lock in the same order, which prevents deadlocks.
            found.sort_by_key(|directory| directory.identity);
            found.dedup_by_key(|directory| directory.identity);
            found
        };
        let mut found = there();
        loop {
            let locks: Vec<_> = found.iter().map(Self::lock).collect::<Result<_, _>>()?;
            // A process may have created another directory with a VM in the meantime. There are
            // few, and they are not removed.
            let now = there();
            if now.len() <= found.len() {
                return Ok(locks);
            }
            found = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::directory::Kind;
    use ssi_hv_api::name::VmName;

    #[test]
    fn of_vms_in_two_directories_that_start_at_once_one_gets_the_name() {
        let name: VmName = "web".parse().expect("a name");
        for _ in 0..50 {
            let place = tempfile::tempdir().expect("a temporary directory");
            let (login, service) = (place.path().join("login"), place.path().join("service"));
            let barrier = Barrier::new(4);
            let start = |number: u32| {
                // The order in which the directories are given must not matter.
                let (own, other) = match number % 2 {
                    0 => (login.clone(), service.clone()),
                    _ => (service.clone(), login.clone()),
                };
                barrier.wait();
                let listens = Directory::create(&own).expect("is made");
                let paths = [own, other];
                let _locks = Directory::lock_all_of(&paths).expect("nobody keeps it");
                let opened = paths.iter().filter_map(|path| Directory::open(path).ok());
                let mut sockets = opened.flat_map(|one| one.sockets().expect("is read"));
                let is_taken = sockets.any(|entry| entry.name.as_ref() == Some(&name));
                // Process ids are below 2^22.
                let path = listens.socket_path(Kind::Vm, (1 << 23) + number, Some(&name));
                (!is_taken).then(|| UnixListener::bind(path).expect("is bound"))
            };
            let start = &start;
            let started: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|number| scope.spawn(move || start(number)))
                    .collect();
                let ended = threads.into_iter().map(|one| one.join());
                ended.map(|one| one.expect("no panic")).collect()
            });
            assert_eq!(started.iter().flatten().count(), 1);
        }
    }

    #[test]
    fn a_directory_with_two_paths_is_one() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let parent = place.path().join("parent");
        fs::create_dir(&parent).expect("is made");
        std::os::unix::fs::symlink(&parent, place.path().join("link")).expect("a link");
        Directory::create(&parent.join("s")).expect("is made");
        let paths = [parent.join("s"), place.path().join("link/s")];
        let opened = || paths.iter().map(|path| Directory::open(path));
        assert_eq!(Directory::usable(opened()).expect("is safe").len(), 1);
        let locks = Directory::lock_all_of(&paths).expect("not against itself");
        assert_eq!(locks.len(), 1);
    }
}
