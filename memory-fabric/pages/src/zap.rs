//! Unmaps scattered pages of the guest view in few calls.
//!
//! Each call that unmaps interrupts the other CPUs to flush their TLBs. Linux 6.13 and later accept
//! many ranges in one `process_madvise` of the calling process, and interrupt once for all of them;
//! before that each range takes a call.

use crate::guest_memory::GuestMemory;
use crate::page::{PAGE_SIZE, PageIndex, PageRange};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Ranges unmapped in one call.
const RANGES_MAX: usize = 64;

/// Ranges of pages to unmap.
#[derive(Debug)]
pub struct Zapper {
    /// This process, if the kernel accepts many ranges at once.
    process: Option<OwnedFd>,
    ranges: Vec<PageRange>,
}

/// An error of unmapping a page.
#[derive(Debug)]
pub struct ZapError {
    /// The page.
    pub page: PageIndex,
    /// The error of the system call.
    pub source: io::Error,
}

impl Default for Zapper {
    fn default() -> Self {
        Self::new()
    }
}

impl Zapper {
    /// Creates an empty zapper, which unmaps many ranges at once if the kernel can.
    #[must_use]
    pub fn new() -> Self {
        Self {
            process: this_process().filter(takes_many),
            ranges: Vec::with_capacity(RANGES_MAX),
        }
    }

    /// Adds a page. It stays mapped until [`Self::flush`], or until the limit of ranges is reached.
    pub fn add(&mut self, memory: &GuestMemory, page: PageIndex) -> Result<(), ZapError> {
        if let Some(last) = self.ranges.last_mut()
            && last.end() == u64::from(page.number())
        {
            last.count += 1;
            return Ok(());
        }
        if self.ranges.len() == RANGES_MAX {
            self.flush(memory)?;
        }
        self.ranges.push(PageRange::new(page, 1));
        Ok(())
    }

    /// Unmaps the added pages; their bytes stay in the file.
    pub fn flush(&mut self, memory: &GuestMemory) -> Result<(), ZapError> {
        let result = self.unmap(memory);
        self.ranges.clear();
        result
    }

    fn unmap(&self, memory: &GuestMemory) -> Result<(), ZapError> {
        if let (Some(process), 2..) = (&self.process, self.ranges.len())
            && unmap_together(process, memory, &self.ranges)
        {
            return Ok(());
        }
        // Unmapping a page again is harmless.
        for range in &self.ranges {
            let zapped = memory.zap(range.first, range.count as usize);
            zapped.map_err(|source| ZapError {
                page: range.first,
                source,
            })?;
        }
        Ok(())
    }
}

fn this_process() -> Option<OwnedFd> {
    // SAFETY: the call takes a process id and flags, and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0)?;
    // SAFETY: the descriptor is new and ours.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns whether the kernel lets a process unmap its own memory by this call.
fn takes_many(process: &OwnedFd) -> bool {
    advise(process, &[]) == 0
}

/// Returns false unless the kernel unmapped everything.
fn unmap_together(process: &OwnedFd, memory: &GuestMemory, ranges: &[PageRange]) -> bool {
    let nothing = libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    };
    let mut vectors = [nothing; RANGES_MAX];
    let mut bytes = 0;
    for (vector, range) in vectors.iter_mut().zip(ranges) {
        *vector = libc::iovec {
            iov_base: memory.guest_page(range.first).cast(),
            iov_len: range.count as usize * PAGE_SIZE,
        };
        bytes += vector.iov_len;
    }
    usize::try_from(advise(process, &vectors[..ranges.len()])) == Ok(bytes)
}

/// Calls `process_madvise` with `MADV_DONTNEED`: returns the number of unmapped bytes, or -1.
fn advise(process: &OwnedFd, vectors: &[libc::iovec]) -> libc::c_long {
    // SAFETY: the ranges are in the guest view, which is a shared mapping of a file: unmapping
    // its pages loses no bytes.
    unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            vectors.as_ptr(),
            vectors.len(),
            libc::MADV_DONTNEED,
            0,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_memory::is_mapped;

    const PAGES: u32 = 400;

    fn unmaps_what_was_added_and_nothing_else(mut zapper: Zapper) {
        let memory = GuestMemory::new(PAGES as usize * PAGE_SIZE).expect("a small memory");
        for number in 0..PAGES {
            // SAFETY: inside the view, which nothing else accesses.
            unsafe { memory.guest_page(PageIndex::new(number)).write_volatile(7) };
        }
        // More ranges than one call accepts, of one page and of two.
        let is_added = |number: u32| number.is_multiple_of(5) || number % 10 == 1;
        for number in (0..PAGES).filter(|&number| is_added(number)) {
            zapper.add(&memory, PageIndex::new(number)).expect("added");
        }
        zapper.flush(&memory).expect("unmapped");
        // All of them before any is touched: a touch maps neighbours as well.
        for page in (0..PAGES).map(PageIndex::new) {
            let left = !is_added(page.number());
            assert_eq!(is_mapped(memory.guest_page(page)), left, "{page}");
        }
        for page in (0..PAGES).map(PageIndex::new) {
            // SAFETY: as above.
            let byte = unsafe { memory.guest_page(page).read_volatile() };
            assert_eq!(byte, 7, "{page} lost its bytes");
        }
    }

    #[test]
    fn many_ranges_are_unmapped_together() {
        unmaps_what_was_added_and_nothing_else(Zapper::new());
    }

    #[test]
    fn many_ranges_are_unmapped_one_by_one() {
        unmaps_what_was_added_and_nothing_else(Zapper {
            process: None,
            ..Zapper::new()
        });
    }

    #[test]
    fn what_the_kernel_refuses_is_unmapped_one_by_one() {
        // A descriptor that is not a process.
        let refusing = std::fs::File::open("/dev/null").expect("a device");
        unmaps_what_was_added_and_nothing_else(Zapper {
            process: Some(refusing.into()),
            ..Zapper::new()
        });
    }
}
