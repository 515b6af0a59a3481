//! Reading and writing files of keys and certificates.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Size limit of a file: a bundle of certificates has a few kilobytes, a list of revoked ones some
/// 40 bytes for each, and a wrong name may refer to a disk image.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// Permission bits of a private key that others than its owner have.
const OTHERS: u32 = 0o077;

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It has no reasonable size, or is no file.
    #[error("{path} is not a regular file of at most {limit} bytes")]
    Unreasonable {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// Others may read or change a private key.
    #[error(
        "{path} has mode {mode:04o}: a private key must be readable by its owner alone; chmod 600 {path}",
        path = path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

fn open(path: &Path, limit: u64) -> Result<(File, fs::Metadata), FileError> {
    let read = |source| FileError::Read {
        path: path.to_owned(),
        source,
    };
    // A FIFO would block before its kind is known.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(read)?;
    let metadata = file.metadata().map_err(read)?;
    if !metadata.is_file() || metadata.len() > limit {
        return Err(FileError::Unreasonable {
            path: path.to_owned(),
            limit,
        });
    }
    Ok((file, metadata))
}

fn content(path: &Path, file: File, limit: u64) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    let read = file.take(limit).read_to_end(&mut bytes);
    read.map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(bytes)
}

/// Reads a file that all may read.
///
/// # Errors
/// Fails when it cannot be read, is no regular file, or exceeds [`FILE_BYTES_MAX`].
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    read_within(path, FILE_BYTES_MAX)
}

/// The same with another limit.
///
/// # Errors
/// As [`read`], with that limit.
pub fn read_within(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let (file, _) = open(path, limit)?;
    content(path, file, limit)
}

/// Reads a private key.
///
/// # Errors
/// As [`read`], and when others than its owner have any permission.
pub fn read_private(path: &Path) -> Result<Vec<u8>, FileError> {
    let (file, metadata) = open(path, FILE_BYTES_MAX)?;
    let mode = metadata.mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(FileError::Open {
            path: path.to_owned(),
            mode,
        });
    }
    content(path, file, FILE_BYTES_MAX)
}

/// Who may read a written file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Readers {
    /// Its owner: a private key.
    Owner,
    /// Everybody.
    All,
}

/// Writes a file so that it has either its old content or all of the new one, also after a crash.
///
/// # Errors
/// Fails when it cannot be written; the old content is then unchanged.
pub fn write(path: &Path, content: &[u8], readers: Readers) -> Result<(), FileError> {
    let failed = |source| FileError::Write {
        path: path.to_owned(),
        source,
    };
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.new", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let mode = match readers {
        Readers::Owner => 0o600,
        Readers::All => 0o644,
    };
    let fill = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        // The name is permanent once its directory is.
        let directory = path.parent().filter(|one| !one.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    };
    fill().map_err(|source| {
        // It may not exist; the first error is the one to report.
        let _ = fs::remove_file(&temporary);
        failed(source)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_private_key_that_others_may_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key.pem");
        write(&path, b"secret", Readers::Owner).unwrap();
        assert_eq!(read_private(&path).unwrap(), b"secret");
        for mode in [0o640, 0o604, 0o660, 0o610] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = read_private(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("{mode:04o}")), "{error}");
            assert!(error.contains("chmod 600"), "{error}");
            assert_eq!(read(&path).unwrap(), b"secret");
        }
    }

    #[test]
    fn a_file_is_replaced_and_leaves_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cert.pem");
        write(&path, b"old", Readers::All).unwrap();
        write(&path, b"new", Readers::All).unwrap();
        assert_eq!(read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        let absent = directory.path().join("no/cert.pem");
        assert!(matches!(
            write(&absent, b"new", Readers::All),
            Err(FileError::Write { .. })
        ));
    }

    #[test]
    fn what_is_no_small_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let unreasonable = |path: &Path| matches!(read(path), Err(FileError::Unreasonable { .. }));
        assert!(unreasonable(directory.path()));
        let path = directory.path().join("large");
        File::create(&path)
            .unwrap()
            .set_len(FILE_BYTES_MAX + 1)
            .unwrap();
        assert!(unreasonable(&path));
    }
}
