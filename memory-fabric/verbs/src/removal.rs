//! Objects of an adapter that was removed, or reset, before they were ended.
//!
//! The kernel ends all objects of such a device itself where the driver allows that
//! (`disassociate_ucontext`: those of adapters; not SoftRoCE). From then on every verb fails with EIO,
//! those that end an object too, and libibverbs passes that on. The error alone does not say that an
//! object has ended, since verbs are refused before. But the device's entry in
//! `/sys/class/infiniband` is removed after all objects have ended (`ib_unregister_device`). A device
//! that is renamed keeps the number of its entry.

use super::device::Device;
use super::{RdmaError, check};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often it is looked whether the kernel has ended the objects of a removed device: who watches a
/// directory of sysfs is not told of what leaves it.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A device's entry in `/sys/class/infiniband`.
#[derive(Debug)]
pub(crate) struct Entry {
    path: PathBuf,
    /// No other device has it.
    number: Option<u64>,
}

impl Entry {
    /// Returns the entry that is there now.
    pub(crate) fn at(path: PathBuf) -> Self {
        let number = fs::metadata(&path).ok().map(|entry| entry.ino());
        Self { path, number }
    }

    /// Returns whether it was there once, and is no longer under any name.
    pub(crate) fn is_removed(&self) -> bool {
        let Some(number) = self.number else {
            return false;
        };
        // Twice: one that is renamed meanwhile may be missed once.
        (0..2).all(|_| matches!(self.is_in_its_directory(number), Ok(false)))
    }

    fn is_in_its_directory(&self, number: u64) -> io::Result<bool> {
        let directory = self.path.parent().ok_or(io::ErrorKind::NotFound)?;
        for entry in fs::read_dir(directory)? {
            match fs::metadata(entry?.path()) {
                Ok(there) if there.ino() == number => return Ok(true),
                Ok(_) => {}
                // It was removed, or renamed, since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Returns whether it is removed, now or within `limit`.
    fn is_removed_within(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.is_removed() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        true
    }
}

/// Checks the result of a verb that ends an object of the device.
///
/// # Errors
///
/// When the object may not have ended. May take `limit` to find out.
pub(crate) fn check_end(
    verb: &'static str,
    on: &str,
    device: &Device,
    result: libc::c_int,
    limit: Duration,
) -> Result<(), RdmaError> {
    judge(check(verb, on, result), || {
        device.entry().is_removed_within(limit)
    })
}

/// Decides whether the object has ended; `is_removed` finds out whether its device was removed.
fn judge(
    result: Result<(), RdmaError>,
    is_removed: impl FnOnce() -> bool,
) -> Result<(), RdmaError> {
    match result {
        Err(error) if is_refused(&error) && is_removed() => {
            tracing::debug!("{error}; the kernel has ended it with its device");
            Ok(())
        }
        other => other,
    }
}

/// Returns whether the verb was refused as all are for a device that is removed.
pub(crate) fn is_refused(error: &RdmaError) -> bool {
    matches!(error, RdmaError::Verb { source, .. } if source.raw_os_error() == Some(libc::EIO))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> (tempfile::TempDir, Entry) {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("mlx5_0");
        fs::create_dir(&path).expect("a directory");
        (root, Entry::at(path))
    }

    #[test]
    fn an_entry_that_goes_is_waited_for_and_one_that_stays_is_there() {
        let (_root, entry) = entry();
        assert!(!entry.is_removed_within(Duration::from_millis(20)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| entry.is_removed_within(Duration::from_secs(60)));
            fs::remove_dir(&entry.path).expect("removed");
            assert!(waiting.join().expect("no panic"));
        });
    }

    #[test]
    fn a_new_device_of_the_same_name_is_another() {
        let (root, entry) = entry();
        // Made before the first is removed, so that it has another number.
        let other = root.path().join("new");
        fs::create_dir(&other).expect("a directory");
        fs::remove_dir(&entry.path).expect("removed");
        fs::rename(&other, &entry.path).expect("renamed");
        assert!(entry.is_removed());
    }

    #[test]
    fn a_renamed_device_is_there_and_a_directory_that_cannot_be_read_says_nothing() {
        let (root, entry) = entry();
        let renamed = root.path().join("rocep1s0");
        fs::rename(&entry.path, &renamed).expect("renamed");
        assert!(!entry.is_removed());
        fs::create_dir(&entry.path).expect("another with the first name");
        assert!(!entry.is_removed());
        fs::remove_dir(&renamed).expect("removed");
        assert!(entry.is_removed());
        fs::remove_dir_all(root.path()).expect("removed");
        assert!(!entry.is_removed());
    }

    #[test]
    fn an_entry_that_was_never_seen_says_nothing() {
        let (root, _) = entry();
        assert!(!Entry::at(root.path().join("mlx5_9")).is_removed());
    }

    #[test]
    fn an_object_has_ended_with_its_device_only_if_that_is_why_its_verb_failed() {
        let failed = |number| check("ibv_destroy_qp", "queue pair 7", number);
        let never = || -> bool { panic!("not asked") };
        assert!(judge(failed(0), never).is_ok());
        assert!(judge(failed(libc::EBUSY), never).is_err());
        assert!(judge(failed(libc::EIO), || false).is_err());
        assert!(judge(failed(libc::EIO), || true).is_ok());
    }
}
