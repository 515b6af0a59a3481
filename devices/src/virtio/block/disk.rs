//! The backing of a guest's disk: a raw image, or a block device of the host.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Deref;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use thiserror::Error;

use crate::sys;

/// Bytes in a sector (virtio 1.2, section 5.2).
pub const SECTOR_BYTES: u64 = 512;

/// The magic bytes of a QEMU image, which is not raw.
const QCOW_MAGIC: [u8; 4] = *b"QFI\xfb";

/// How much is written at once where zeroes must be written.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Why a file cannot be a disk.
#[derive(Debug, Error)]
pub enum DiskError {
    /// It cannot be opened.
    #[error(
        "cannot open the disk {}{}; name a raw image or a block device that exists and that you may use{}",
        path.display(),
        if *read_only { "" } else { " for writing" },
        if *read_only { "" } else { ", or add ,readonly" }
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Whether it was opened read-only.
        read_only: bool,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// It is neither a file nor a block device.
    #[error("the disk {} is {found}; name a raw image or a block device", path.display())]
    WrongKind {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// It is an image in another format.
    #[error(
        "the disk {0} begins like an image in QEMU's format; add `,raw` if a guest has written that to \
         its raw image, or convert it, if you trust whoever made it",
        path.display()
    )]
    NotRaw {
        /// The file.
        path: PathBuf,
    },
    /// It is empty.
    #[error("the disk {0} is empty; give it a size, such as `truncate -s 1G {0}`", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Its size is not whole sectors.
    #[error(
        "the disk {0} has {bytes} bytes, which is not a multiple of the sector size, {SECTOR_BYTES} \
         bytes; round it up with `truncate -s %{SECTOR_BYTES} {0}`",
        path.display()
    )]
    NotSectors {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Another VM or the host uses it.
    #[error(
        "the disk {} is in use{}; stop that use{}",
        path.display(),
        if *read_only { " by a VM that writes to it" } else { ": by another VM, by this one as another disk, or by the host" },
        if *read_only { "" } else { ", or give it to all of its users with ,readonly" }
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// Whether it was opened read-only.
        read_only: bool,
    },
    /// Its size is unknown.
    #[error("cannot determine the size of the disk {}", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// An open disk. A lock of its open file description, which every `ssi-hv` takes, excludes other
/// users of a writable disk, and writers of a read-only one.
#[derive(Debug)]
pub struct Disk {
    file: File,
    path: PathBuf,
    bytes: u64,
    read_only: bool,
    is_device: bool,
    /// Whether it is a regular file, which may be truncated while the guest runs; a block device
    /// reports that itself.
    may_shrink: bool,
    /// Number of threads in calls of the host for this disk. Relaxed: readers poll.
    at_work: AtomicUsize,
    /// The error of a flush: what was written before may be lost.
    failed: Mutex<Option<i32>>,
}

impl Disk {
    /// Opens and locks `path`.
    ///
    /// # Errors
    ///
    /// Fails when it is not a raw image or block device of whole sectors, or is in use.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let in_use = || DiskError::InUse {
            path: path.into(),
            read_only,
        };
        let is_device =
            std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
        // Non-blocking: opening a pipe must not wait for its other end. Exclusive: a device that
        // the host has mounted or otherwise claimed is refused for writing.
        let claim = if is_device && !read_only {
            libc::O_EXCL
        } else {
            0
        };
        let opened = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_NONBLOCK | claim)
            .open(path);
        let mut file = opened.map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY) => in_use(),
            Some(libc::EISDIR) => DiskError::WrongKind {
                path: path.into(),
                found: "a directory",
            },
            _ => DiskError::Open {
                path: path.into(),
                read_only,
                source,
            },
        })?;
        let size = |source| DiskError::Size {
            path: path.into(),
            source,
        };
        let kind = file.metadata().map_err(size)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::WrongKind {
                path: path.into(),
                found: match kind.is_dir() {
                    true => "a directory",
                    false => "neither a file nor a block device",
                },
            });
        }
        if !lock(&file, read_only, path) {
            return Err(in_use());
        }
        // Seeking works for block devices too, whose metadata has no size.
        let bytes = file.seek(SeekFrom::End(0)).map_err(size)?;
        if bytes == 0 {
            return Err(DiskError::Empty { path: path.into() });
        }
        if !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(DiskError::NotSectors {
                path: path.into(),
                bytes,
            });
        }
        Ok(Self {
            file,
            path: path.into(),
            bytes,
            read_only,
            is_device: kind.is_block_device(),
            may_shrink: kind.is_file(),
            at_work: AtomicUsize::new(0),
            failed: Mutex::default(),
        })
    }

    /// Refuses an image in another format. A guest can write the same to a raw one.
    ///
    /// # Errors
    ///
    /// [`DiskError::NotRaw`], and [`DiskError::Size`] if it cannot be read.
    pub fn check_is_raw(&self) -> Result<(), DiskError> {
        let path = || self.path.clone();
        let mut start = [0; QCOW_MAGIC.len()];
        self.read(&mut start, 0).map_err(|source| DiskError::Size {
            path: path(),
            source,
        })?;
        if start == QCOW_MAGIC {
            return Err(DiskError::NotRaw { path: path() });
        }
        Ok(())
    }

    /// Creates a disk of an open file of any kind.
    #[cfg(test)]
    pub(super) fn of(file: File, bytes: u64) -> Self {
        Self {
            file,
            path: "a file of a test".into(),
            bytes,
            read_only: false,
            is_device: false,
            may_shrink: false,
            at_work: AtomicUsize::new(0),
            failed: Mutex::default(),
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size in bytes: whole sectors.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is read-only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether a thread is in a call of the host for it. Such calls touch no guest memory.
    pub(super) fn is_at_work(&self) -> bool {
        self.at_work.load(Ordering::Relaxed) > 0
    }

    /// Its file, for a call that may take as long as the host's storage does.
    fn work(&self) -> Work<'_> {
        self.at_work.fetch_add(1, Ordering::Relaxed);
        Work(self)
    }

    /// Fails when the file was truncated. A write would restore the missing end as zeroes.
    pub(super) fn check_size(&self) -> io::Result<()> {
        if !self.may_shrink {
            return Ok(());
        }
        let now = self.work().metadata()?.len();
        if now < self.bytes {
            return Err(io::Error::other(format!(
                "the file was truncated from {} to {now} bytes",
                self.bytes
            )));
        }
        Ok(())
    }

    pub(super) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.work().read_exact_at(into, offset)
    }

    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.work().write_all_at(bytes, offset)
    }

    /// Returns when all written data is on stable storage. Once that has failed it fails for ever: the
    /// host reports data that it could not store once, to whichever thread asks next, and takes it for
    /// stored from then on. A later flush, maybe of another file system on the disk, must not be
    /// believed to be after that data.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.flush_by(|file| file.sync_data())
    }

    fn flush_by(&self, sync: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        // Held meanwhile, so that no other thread's flush ends between the failure and its note.
        let mut failed = crate::lock(&self.failed);
        if let Some(errno) = *failed {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let synced = sync(&self.work());
        if let Err(error) = &synced {
            *failed = Some(error.raw_os_error().unwrap_or(libc::EIO));
        }
        synced
    }

    /// Deallocates the range, where that is possible.
    pub(super) fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if self.is_device {
            // `fallocate` asks a device for zeroes, which thin volumes refuse and others write.
            return match sys::discard(&self.work(), offset, bytes) {
                Err(error) if is_unsupported(&error) => Ok(()),
                discarded => discarded,
            };
        }
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.fallocate(mode, offset, bytes).map(drop)
    }

    /// Zeroes the range; `unmap` allows deallocating it. Returns how many bytes had to be written.
    pub(super) fn write_zeroes(&self, offset: u64, bytes: u64, unmap: bool) -> io::Result<u64> {
        let how = if unmap {
            FallocateFlags::PUNCH_HOLE
        } else {
            FallocateFlags::ZERO_RANGE
        };
        if self.fallocate(how | FallocateFlags::KEEP_SIZE, offset, bytes)? {
            return Ok(0);
        }
        let end = offset + bytes;
        let mut at = offset;
        while at < end {
            let count = usize::try_from(end - at).map_or(ZEROES.len(), |n| n.min(ZEROES.len()));
            self.write(&ZEROES[..count], at)?;
            at += count as u64;
        }
        Ok(bytes)
    }

    /// Calls `fallocate`; false when the file system or the device does not support that, at all or
    /// for this range: block devices with sectors longer than the guest's refuse partial sectors.
    fn fallocate(&self, mode: FallocateFlags, offset: u64, bytes: u64) -> io::Result<bool> {
        let file = self.work();
        loop {
            match rustix::fs::fallocate(&*file, mode, offset, bytes) {
                Ok(()) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(error) => {
                    let error = io::Error::from(error);
                    return is_unsupported(&error).then_some(false).ok_or(error);
                }
            }
        }
    }
}

/// Whether the host cannot do something at all, or for this range.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)
    )
}

/// The file of a disk, which counts as busy until this is dropped.
struct Work<'a>(&'a Disk);

impl Deref for Work<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0.file
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.0.at_work.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Locks the whole file while it is open; false when a conflicting lock exists. Where files cannot
/// be locked, only warns.
fn lock(file: &File, read_only: bool, path: &Path) -> bool {
    let Err(error) = sys::lock_description(file, read_only) else {
        return true;
    };
    if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) {
        return false;
    }
    tracing::warn!(
        "the disk {} cannot be locked, so nothing keeps a second VM from using it: {error}",
        path.display()
    );
    true
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
