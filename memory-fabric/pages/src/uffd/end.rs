//! The end of the guest view, when no fault is served any more.

use super::Uffd;
use crate::guest_memory::GuestMemory;
use std::io;
use std::sync::{MutexGuard, PoisonError};

impl Uffd {
    /// The registered ranges: address and bytes of each.
    pub(super) fn ranges(&self) -> MutexGuard<'_, Vec<(usize, usize)>> {
        self.registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all access to the registered ranges of `memory`'s guest view, and lets the threads
    /// continue that still wait for a page. They fail instead of seeing a page without its bytes:
    /// a system call with EFAULT, so that no wrong byte gets into a file, and any other access with
    /// SIGSEGV. KVM's kernel threads give up, for which the end of its virtual machine waits.
    ///
    /// # Errors
    ///
    /// Fails when the kernel refuses it. Then waiting threads may still wait.
    pub fn end(&self, memory: &GuestMemory) -> io::Result<()> {
        let mut ranges = self.ranges();
        while let Some(&(address, bytes)) = ranges.last() {
            let first = memory.page_at(address).ok_or(io::ErrorKind::InvalidInput)?;
            // Before the waiters are woken: they repeat the access.
            memory.forbid(first, bytes)?;
            let start = memory.guest_page(first);
            let ended = self.inner.unregister(start.cast(), bytes);
            ended.map_err(super::into_io)?;
            ranges.pop();
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "end_tests.rs"]
mod tests;
