//! Unmaps scattered pages of the guest view in few calls.
//!
//! Linux 6.13 and later accept many ranges in one `process_madvise` of the calling process; before that
//! each range takes a call. It is one call, but not one flush of TLBs: the kernel interrupts the other
//! CPUs that run threads of this process for each range with a dirty entry, and every entry that
//! userfaultfd makes is dirty (docs/bench.md, "Interrupts of an eviction").

use crate::guest_memory::GuestMemory;
use crate::page::{PAGE_SIZE, PageIndex, PageRange};
use fabric_host::{Mapping, UNMAP_RANGES_MAX};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

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
            process: pidfd_open(getpid(), PidfdFlags::empty())
                .ok()
                .filter(takes_many),
            ranges: Vec::with_capacity(UNMAP_RANGES_MAX),
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
        if self.ranges.len() == UNMAP_RANGES_MAX {
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

/// Returns whether the kernel lets a process unmap its own memory by this call.
fn takes_many(process: &OwnedFd) -> bool {
    let no_ranges = std::iter::empty();
    Mapping::anonymous(PAGE_SIZE)
        .and_then(|memory| memory.unmap_ranges(process.as_fd(), no_ranges))
        .is_ok()
}

/// Returns false unless the kernel unmapped everything.
fn unmap_together(process: &OwnedFd, memory: &GuestMemory, ranges: &[PageRange]) -> bool {
    let bytes: u64 = ranges.iter().map(|range| range.bytes()).sum();
    let unmapped = memory.zap_together(process.as_fd(), ranges);
    unmapped.is_ok_and(|unmapped| unmapped as u64 == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_memory::is_mapped;
    use std::sync::atomic::{AtomicU64, Ordering};

    const PAGES: u32 = 400;

    /// The first word of a page.
    fn word(memory: &GuestMemory, number: u32) -> &AtomicU64 {
        &memory.guest_words()[number as usize * (PAGE_SIZE / size_of::<AtomicU64>())]
    }

    fn unmaps_what_was_added_and_nothing_else(mut zapper: Zapper) {
        let memory = GuestMemory::new(PAGES as usize * PAGE_SIZE).expect("a small memory");
        for number in 0..PAGES {
            word(&memory, number).store(7, Ordering::Relaxed);
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
        for number in 0..PAGES {
            let found = word(&memory, number).load(Ordering::Relaxed);
            assert_eq!(found, 7, "page {number} lost its bytes");
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
