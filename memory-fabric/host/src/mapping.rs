//! Owned memory mappings.
//!
//! A guest, an adapter or another view of the same file may write to a mapping at any time, and
//! several threads use it at once. No reference to its bytes is therefore made: they are accessed
//! as atomic words, or copied by [`Mapping::read`] and [`Mapping::write`].

use crate::PAGE_SIZE;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};
use std::arch::asm;
use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use zerocopy::FromZeros;

/// Advice for the kernel about a part of a mapping (madvise(2)).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Advice {
    /// Unmaps the pages: private memory reads as zero afterwards, and a file keeps its bytes.
    DontNeed,
    /// A child process does not inherit the part.
    DontFork,
    /// A core dump omits the part.
    DontDump,
    /// The kernel may use huge pages.
    HugePages,
    /// The kernel uses no huge pages.
    NoHugePages,
}

impl Advice {
    fn to_kernel(self) -> mm::Advice {
        match self {
            Self::DontNeed => mm::Advice::LinuxDontNeed,
            Self::DontFork => mm::Advice::LinuxDontFork,
            Self::DontDump => mm::Advice::LinuxDontDump,
            Self::HugePages => mm::Advice::LinuxHugepage,
            Self::NoHugePages => mm::Advice::LinuxNoHugepage,
        }
    }
}

/// Limit of ranges that [`Mapping::unmap_pages`] takes.
pub const UNMAP_RANGES_MAX: usize = 64;

/// Bytes that are unmapped in one call. Meanwhile the kernel holds the memory map of the process, and
/// every thread waits that allocates memory: some milliseconds for so many, and a second for 100 GiB.
const UNMAP_BYTES: usize = 256 << 20;

/// Returns the parts in which a mapping of `bytes` is unmapped, by offset and length: the last one first,
/// so that what is left is one mapping.
fn parts(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..bytes).step_by(UNMAP_BYTES).rev();
    starts.map(move |start| (start, UNMAP_BYTES.min(bytes - start)))
}

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
        Self::map_anonymous(bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Memory is not reserved.
    fn map_anonymous(bytes: usize, protection: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the address, so no mapping is replaced, and checks the length.
        let address = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) };
        Self::of(address?, bytes)
    }

    fn of(address: *mut c_void, bytes: usize) -> io::Result<Self> {
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
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
        let room = Self::map_anonymous(room_bytes, ProtFlags::empty())?;
        let before = room.as_ptr().addr().next_multiple_of(alignment) - room.as_ptr().addr();
        // SAFETY: the replaced range is inside `room`, whose addresses were never returned.
        let view = unsafe {
            mm::mmap(
                room.at(before, bytes).cast(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
                file,
                0,
            )
        };
        let view = Self::of(view?, bytes)?;
        // The parts before and after the view are unmapped; the view no longer belongs to this
        // mapping.
        let room = std::mem::ManuallyDrop::new(room);
        let after = before + bytes.next_multiple_of(PAGE_SIZE);
        for (offset, length) in [(0, before), (after, room_bytes.saturating_sub(after))] {
            if length > 0 {
                // SAFETY: the piece is ours, its address was never returned, and the view is
                // outside of it. If it stays mapped, only addresses are lost.
                let _ = unsafe { mm::munmap(room.at(offset, length).cast(), length) };
            }
        }
        Ok(view)
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
        // and any bytes are a valid `AtomicU64`. No reference of another type is made to them.
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

    /// Copies the bytes from `offset` on. Those that are written meanwhile are the old or the new
    /// ones.
    ///
    /// # Panics
    ///
    /// When they are not inside, as for all methods that take an offset.
    pub fn read(&self, offset: usize, target: &mut [u8]) {
        let source = self.at(offset, target.len());
        // SAFETY: the source is mapped, as `at` checked. The target is borrowed exclusively, so it
        // is no part of the mapping, to which no references exist.
        unsafe { copy_shared(source, target.as_mut_ptr(), target.len()) };
    }

    /// Appends `length` bytes from `offset` on to `target`, as [`Self::read`] does.
    pub fn append_to(&self, target: &mut Vec<u8>, offset: usize, length: usize) {
        let source = self.at(offset, length);
        target.reserve(length);
        let room = target.spare_capacity_mut();
        // SAFETY: as for `read`; the target has the capacity, and its bytes are initialized before
        // its length grows.
        unsafe {
            copy_shared(source, room.as_mut_ptr().cast(), length);
            target.set_len(target.len() + length);
        }
    }

    /// Stores bytes from `offset` on. A concurrent [`Self::read`] finds old and new bytes.
    pub fn write(&self, offset: usize, source: &[u8]) {
        let target = self.at(offset, source.len());
        // SAFETY: the target is mapped writable, as `at` checked, and no references to it exist, so
        // the borrowed source is no part of it.
        unsafe { copy_shared(source.as_ptr(), target, source.len()) };
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

    /// Makes the kernel map a part anew, by making it read-only and then writable again.
    pub fn renew_protection(&self, offset: usize, length: usize) -> io::Result<()> {
        let start = self.at(offset, length);
        for protection in [
            MprotectFlags::READ,
            MprotectFlags::READ | MprotectFlags::WRITE,
        ] {
            // SAFETY: the range is inside this mapping, and stays mapped with its bytes.
            unsafe { mm::mprotect(start.cast(), length, protection) }?;
        }
        Ok(())
    }

    /// Makes a part inaccessible: a thread that touches it is ended by SIGSEGV, and a system call
    /// that does fails with EFAULT.
    pub fn forbid(&self, offset: usize, length: usize) -> io::Result<()> {
        let start = self.at(offset, length);
        // SAFETY: the range is inside this mapping, and stays reserved. It is only accessed by
        // atomics and opaque copies, of which the compiler adds none.
        unsafe { mm::mprotect(start.cast(), length, MprotectFlags::empty()) }.map_err(Into::into)
    }

    /// Applies `madvise` to a part.
    pub fn advise(&self, offset: usize, length: usize, advice: Advice) -> io::Result<()> {
        let start = self.at(offset, length);
        // SAFETY: the range is inside this mapping, and stays mapped. `DontNeed` may change its
        // bytes, which others may do at any time.
        unsafe { mm::madvise(start.cast(), length, advice.to_kernel()) }.map_err(Into::into)
    }

    /// Applies [`Advice::DontNeed`] to up to [`UNMAP_RANGES_MAX`] ranges of offset and length, by
    /// one `process_madvise` of `process`, which is this process. Returns the number of bytes
    /// unmapped.
    pub fn unmap_ranges(
        &self,
        process: BorrowedFd<'_>,
        ranges: impl Iterator<Item = (usize, usize)>,
    ) -> io::Result<usize> {
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let mut vectors = [nothing; UNMAP_RANGES_MAX];
        let mut count = 0;
        for (vector, (offset, length)) in vectors.iter_mut().zip(ranges) {
            vector.iov_base = self.at(offset, length).cast();
            vector.iov_len = length;
            count += 1;
        }
        // SAFETY: the array has `count` ranges, all inside this mapping; for the advice see
        // `advise`. In another process the kernel refuses the advice.
        let unmapped = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                process.as_raw_fd(),
                vectors.as_ptr(),
                count,
                libc::MADV_DONTNEED,
                0,
            )
        };
        usize::try_from(unmapped).map_err(|_| io::Error::last_os_error())
    }
}

/// Copies bytes of which one side may be accessed by others at the same time.
///
/// # Safety
///
/// Both sides must be mapped for `bytes` bytes, the target writable, and not overlap.
unsafe fn copy_shared(from: *const u8, to: *mut u8, bytes: usize) {
    // A copy by the compiler would assume that there is no other writer. To the compiler these
    // instructions are opaque, as a system call is; string moves are also the fastest way to copy
    // a page (Intel 64 and IA-32 Architectures Optimization Reference Manual, section 3.7.6).
    // SAFETY: the caller guarantees both ranges; the direction flag is clear (System V ABI, 3.2.1).
    unsafe {
        asm!(
            "rep movsq",
            "mov rcx, {rest}",
            "rep movsb",
            rest = in(reg) bytes % 8,
            inout("rcx") bytes / 8 => _, inout("rsi") from => _, inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for (offset, length) in parts(self.bytes) {
            // SAFETY: the mapping is ours, and no borrow of it is left. What is behind the part is
            // unmapped, and is not touched.
            let unmapped = unsafe { mm::munmap(self.at(offset, length).cast(), length) };
            if unmapped.is_err() && offset > 0 {
                // Its pages are too large for the part: all that is left goes at once.
                // SAFETY: as above.
                let _ = unsafe { mm::munmap(self.as_ptr().cast(), offset + length) };
                return;
            }
        }
    }
}

/// A slice of zeroed elements in a mapping of its own: the kernel allocates its pages on first
/// access. Elements are not dropped.
#[derive(Debug)]
pub struct ZeroedSlice<T> {
    memory: Mapping,
    length: usize,
    elements: PhantomData<T>,
}

impl<T: FromZeros> ZeroedSlice<T> {
    /// Maps a slice of this many elements.
    pub fn new(length: usize) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= PAGE_SIZE && !std::mem::needs_drop::<T>()) };
        let bytes = length
            .checked_mul(size_of::<T>())
            .ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            memory: Mapping::anonymous(bytes.max(1))?,
            length,
            elements: PhantomData,
        })
    }
}

impl<T: FromZeros> Deref for ZeroedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let first = self.memory.as_ptr().cast::<T>();
        // SAFETY: the mapping holds `length` elements, is aligned to a page, lives as long as self,
        // and is accessed by this alone. It starts zeroed, which is a valid element.
        unsafe { std::slice::from_raw_parts(first, self.length) }
    }
}

#[cfg(test)]
#[path = "mapping_tests.rs"]
mod tests;
