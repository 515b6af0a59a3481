//! The file of `--console`.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// Limit of the bytes of the file, over all boots of the guest: far more than a console has, and
/// little for a disk of the host. A guest writes as much as it likes.
pub const CONSOLE_BYTES_MAX: u64 = 64 << 20;

/// Last line of a file that reached the limit.
const FULL: &str = "\n[ssi-hv: the console has more than 64 MiB; the rest is not kept]\n";

/// Permissions: what a guest prints may be secret.
const MODE: u32 = 0o600;

/// Why the file cannot be used.
#[derive(Debug, Error)]
pub enum ConsoleError {
    /// It cannot be created or written.
    #[error(
        "cannot write --console {}; name a file in a directory that exists and that you may write to",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    /// It is a symbolic link.
    #[error("--console {} is a symbolic link, which is not followed; name the file itself", .0.display())]
    Link(PathBuf),
    /// It has other names.
    #[error(
        "--console {} has {names} names (hard links), and all would be overwritten; remove it first",
        path.display()
    )]
    Names {
        /// The file.
        path: PathBuf,
        /// How many.
        names: u64,
    },
}

/// The file, of which all clones have one limit.
#[derive(Clone, Debug)]
pub struct ConsoleFile {
    file: Arc<File>,
    /// How many bytes may still be written.
    left: Arc<AtomicU64>,
}

impl ConsoleFile {
    /// Creates or overwrites a file for this user only. A device or a pipe gets all output, and keeps
    /// its permissions.
    pub fn create(path: &Path) -> Result<Self, ConsoleError> {
        Self::with_limit(path, CONSOLE_BYTES_MAX)
    }

    fn with_limit(path: &Path, limit: u64) -> Result<Self, ConsoleError> {
        let failed = |source: io::Error| {
            if source.raw_os_error() == Some(libc::ELOOP) {
                return ConsoleError::Link(path.to_owned());
            }
            let path = path.to_owned();
            ConsoleError::File { path, source }
        };
        // Not truncated yet: it may be another one than is meant.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(MODE)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NOCTTY)
            .open(path)
            .map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        let mut left = u64::MAX;
        if found.is_file() {
            if found.nlink() > 1 {
                let (path, names) = (path.to_owned(), found.nlink());
                return Err(ConsoleError::Names { path, names });
            }
            let emptied = file
                .set_permissions(Permissions::from_mode(MODE))
                .and_then(|()| file.set_len(0));
            emptied.map_err(failed)?;
            left = limit;
        }
        Ok(Self {
            file: Arc::new(file),
            left: Arc::new(AtomicU64::new(left)),
        })
    }
}

impl Write for ConsoleFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Relaxed: one thread writes at a time, and boots follow each other.
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Ok(bytes.len());
        }
        let room = usize::try_from(left).unwrap_or(usize::MAX);
        let written = (&*self.file).write(&bytes[..bytes.len().min(room)])?;
        let left = left - written as u64;
        self.left.store(left, Ordering::Relaxed);
        if left == 0 {
            tracing::warn!(
                limit = CONSOLE_BYTES_MAX,
                "the file of --console is full; the rest of the console is not kept"
            );
            (&*self.file).write_all(FULL.as_bytes())?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        (&*self.file).flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("a file").mode() & 0o777
    }

    #[test]
    fn a_file_is_for_its_user_alone_and_begins_empty() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("log");
        drop(ConsoleFile::create(&path).expect("a file"));
        assert_eq!(mode(&path), 0o600);
        fs::write(&path, "of an earlier VM").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("is set");
        let mut file = ConsoleFile::create(&path).expect("a file");
        file.write_all(b"new").expect("written");
        assert_eq!(
            (mode(&path), fs::read(&path).expect("read")),
            (0o600, b"new".to_vec())
        );
    }

    #[test]
    fn links_are_refused_and_what_they_name_is_kept() {
        let place = tempfile::tempdir().expect("a directory");
        let at = |name: &str| place.path().join(name);
        fs::write(at("precious"), "bytes").expect("written");
        symlink(at("precious"), at("soft")).expect("a link");
        fs::hard_link(at("precious"), at("hard")).expect("a link");
        for (name, part) in [
            ("soft", "is a symbolic link"),
            ("hard", "has 2 names (hard links)"),
            ("none/log", "in a directory that exists"),
        ] {
            let error = ConsoleFile::create(&at(name)).expect_err(name).to_string();
            assert!(error.contains(part) && error.contains(name), "{error}");
        }
        assert_eq!(fs::read(at("precious")).expect("read"), b"bytes");
    }

    #[test]
    fn a_guest_cannot_fill_the_disk() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("log");
        let mut first = ConsoleFile::with_limit(&path, 10).expect("a file");
        let mut second = first.clone();
        first.write_all(b"12345678").expect("written");
        // Of the next boot.
        second.write_all(b"abcdefgh").expect("accepted");
        second.write_all(b"more").expect("accepted");
        first.write_all(b"more").expect("accepted");
        let kept = fs::read_to_string(&path).expect("read");
        assert_eq!(kept, format!("12345678ab{FULL}"));
    }

    #[test]
    fn a_device_gets_all_of_it() {
        let mut null = ConsoleFile::create(Path::new("/dev/null")).expect("a device");
        null.write_all(&[0; 100]).expect("written");
        assert_ne!(mode(Path::new("/dev/null")), 0o600);
    }
}
