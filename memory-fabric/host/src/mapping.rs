//! Owned memory mappings.

use crate::PAGE_SIZE;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A private or shared mapping, unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
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
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let address = map(std::ptr::null_mut(), bytes, protection, flags, -1)?;
        Ok(Self { address, bytes })
    }

    /// A shared view of a file, at an address that is a multiple of `alignment`, a power of two
    /// of at least a page.
    pub fn shared(file: BorrowedFd<'_>, bytes: usize, alignment: usize) -> io::Result<Self> {
        debug_assert!(alignment.is_power_of_two());
        // Room that certainly has such an address in it, of which the view takes its part.
        let room_bytes = bytes
            .checked_add(alignment)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let room = map(
            std::ptr::null_mut(),
            room_bytes,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
        )?;
        let room = Self {
            address: room,
            bytes: room_bytes,
        };
        let before = room.as_ptr().addr().next_multiple_of(alignment) - room.as_ptr().addr();
        let view = map(
            room.at(before, bytes).cast(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            file.as_raw_fd(),
        )?;
        // The rest goes back in two pieces; the view is no longer part of the room.
        let room = std::mem::ManuallyDrop::new(room);
        let after = before + bytes.next_multiple_of(PAGE_SIZE);
        for (offset, length) in [(0, before), (after, room_bytes.saturating_sub(after))] {
            if length > 0 {
                // SAFETY: the piece is ours, was never given out, and the view is outside it.
                unsafe { libc::munmap(room.at(offset, length).cast(), length) };
            }
        }
        Ok(Self {
            address: view,
            bytes,
        })
    }

    /// The address of the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// The length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `length` bytes at `offset`.
    ///
    /// Panics when they do not lie inside: callers check what others may choose.
    pub fn at(&self, offset: usize, length: usize) -> *mut u8 {
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

    /// Which of the pages from `offset` on, one for each place in `found`, the kernel holds in
    /// memory: the lowest bit of each. Touches none of them.
    pub fn in_memory(&self, offset: usize, found: &mut [u8]) -> io::Result<()> {
        let length = found.len() * PAGE_SIZE;
        let start = self.at(offset, length);
        // SAFETY: the range is inside this mapping, and `found` has a byte for each of its pages.
        if unsafe { libc::mincore(start.cast(), length, found.as_mut_ptr()) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// `madvise` on a part.
    pub fn advise(&self, offset: usize, length: usize, advice: libc::c_int) -> io::Result<()> {
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

/// `mmap`, without reserving memory. With MAP_FIXED the address range must be the caller's own.
fn map(
    wanted: *mut libc::c_void,
    bytes: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> io::Result<NonNull<u8>> {
    // SAFETY: without MAP_FIXED no mapping is replaced, and with it only one that is the
    // caller's; the kernel checks the length and the descriptor.
    let address = unsafe {
        libc::mmap(
            wanted,
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
    NonNull::new(address.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and its owner's borrowers are gone.
        unsafe { libc::munmap(self.as_ptr().cast(), self.bytes) };
    }
}
