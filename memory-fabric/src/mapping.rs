//! Owned memory mappings.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A private or shared mapping, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory that belongs to the process; who may access what, and
// how, is decided by the types that own it.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself gives out the address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed private memory, backed by the host when touched.
    pub(crate) fn anonymous(bytes: usize) -> io::Result<Self> {
        Self::new(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// A shared view of a file.
    pub(crate) fn shared(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::new(bytes, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn new(bytes: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no address is asked for, so no mapping is replaced; the kernel checks the
        // length and the descriptor.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                flags | libc::MAP_NORESERVE,
                fd,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, bytes })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `length` bytes at `offset`.
    ///
    /// Panics when they do not lie inside: callers check what others may choose.
    pub(crate) fn at(&self, offset: usize, length: usize) -> *mut u8 {
        let inside = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.bytes);
        assert!(
            inside,
            "{length} bytes at {offset} of a mapping of {}",
            self.bytes
        );
        // SAFETY: the result is inside the mapping, as checked above.
        unsafe { self.as_ptr().add(offset) }
    }

    /// `madvise` on a part.
    pub(crate) fn advise(
        &self,
        offset: usize,
        length: usize,
        advice: libc::c_int,
    ) -> io::Result<()> {
        let start = self.at(offset, length);
        // SAFETY: the range is inside this mapping; the advices used here drop mappings or
        // set attributes and never hand memory to someone else.
        if unsafe { libc::madvise(start.cast(), length, advice) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and its owner's borrowers are gone.
        unsafe { libc::munmap(self.as_ptr().cast(), self.bytes) };
    }
}
