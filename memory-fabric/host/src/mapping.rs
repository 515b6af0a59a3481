//! Owned memory mappings.

use crate::PAGE_SIZE;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A private or shared mapping, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory that belongs to the process; the types that own it decide who
// may access what, and how.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself only returns addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps zeroed private memory, allocated by the kernel on first access.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let address = map(std::ptr::null_mut(), bytes, protection, flags, -1)?;
        Ok(Self { address, bytes })
    }

    /// Maps a file shared, at an address that is a multiple of `alignment`, a power of two of at
    /// least a page.
    pub fn shared(file: BorrowedFd<'_>, bytes: usize, alignment: usize) -> io::Result<Self> {
        debug_assert!(alignment.is_power_of_two());
        // An address range large enough to contain an aligned one for the view.
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
        // The parts before and after the view are unmapped; the view no longer belongs to this
        // mapping.
        let room = std::mem::ManuallyDrop::new(room);
        let after = before + bytes.next_multiple_of(PAGE_SIZE);
        for (offset, length) in [(0, before), (after, room_bytes.saturating_sub(after))] {
            if length > 0 {
                // SAFETY: the piece is ours, its address was never returned, and the view is
                // outside of it.
                unsafe { libc::munmap(room.at(offset, length).cast(), length) };
            }
        }
        Ok(Self {
            address: view,
            bytes,
        })
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the mapping as words that threads share, without bytes after the last whole word.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        let first = self.as_ptr().cast::<AtomicU64>();
        // SAFETY: the mapping is aligned to a page, lives as long as self, holds so many words,
        // and any bytes are a valid `AtomicU64`. Users of a mapping either share its words or
        // use its address, never both.
        unsafe { std::slice::from_raw_parts(first, self.bytes / size_of::<AtomicU64>()) }
    }

    /// Returns the address of `length` bytes at `offset`.
    ///
    /// Panics when they are not inside: callers validate values that others choose.
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

    /// Stores for each page from `offset` on, one per element of `found`, whether the kernel holds
    /// it in memory, in the lowest bit. Accesses none of them.
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

    /// Applies `mprotect` to a part.
    pub fn protect(&self, offset: usize, length: usize, protection: libc::c_int) -> io::Result<()> {
        let start = self.at(offset, length);
        // SAFETY: the range is inside this mapping; no memory comes or goes.
        if unsafe { libc::mprotect(start.cast(), length, protection) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Applies `madvise` to a part.
    pub fn advise(&self, offset: usize, length: usize, advice: libc::c_int) -> io::Result<()> {
        let start = self.at(offset, length);
        // SAFETY: the range is inside this mapping; the advices used here drop mappings or set
        // attributes and never give memory to another owner.
        if unsafe { libc::madvise(start.cast(), length, advice) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

/// Calls `mmap` without reserving memory. With MAP_FIXED the address range must belong to the
/// caller.
fn map(
    wanted: *mut libc::c_void,
    bytes: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> io::Result<NonNull<u8>> {
    // SAFETY: without MAP_FIXED no mapping is replaced, and with it only one that belongs to the
    // caller; the kernel checks the length and the descriptor.
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
        // SAFETY: the mapping is ours, and no borrow of it is left.
        unsafe { libc::munmap(self.as_ptr().cast(), self.bytes) };
    }
}
