//! Poisoned pages: every access to one fails as an access to broken memory does.

use super::{RangeMode, Uffd, UffdError, request};
use std::io;

const UFFDIO_POISON: u32 = request(3, 0x08, size_of::<RangeMode>());

impl Uffd {
    /// Poisons a page of the guest view that is not mapped, and wakes its waiters: each access
    /// raises SIGBUS, and fails with EFAULT in system calls, until the page is zapped. Whether the
    /// file has the page does not matter. Returns false if the page was poisoned already.
    ///
    /// # Errors
    ///
    /// The kernel's errors.
    pub fn poison(&self, page: *mut u8) -> io::Result<bool> {
        if self.try_poison(page)? {
            return Ok(true);
        }
        // A page that was write-protected when it was unmapped has left a mark, which the kernel
        // does not overwrite. A poisoned one keeps its own.
        self.allow_writes(page)?;
        let poisoned = self.try_poison(page)?;
        if !poisoned {
            self.wake(page)?;
        }
        Ok(poisoned)
    }

    /// Returns false if there is something where the page would be mapped.
    fn try_poison(&self, page: *mut u8) -> io::Result<bool> {
        match self.while_busy(|uffd| uffd.call_on_page(UFFDIO_POISON, page, 0)) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Returns whether pages can be poisoned (6.6 or newer). It is tried on a range that is not
    /// registered: a kernel with the call looks for the range and returns ENOENT, an older one
    /// rejects the call with EINVAL.
    #[must_use]
    pub fn can_poison(&self) -> bool {
        self.finds_no_range(UFFDIO_POISON, 0)
    }

    /// Checks that pages can be poisoned.
    ///
    /// # Errors
    ///
    /// [`UffdError::NoPoison`] on kernels before 6.6.
    pub fn check_poison(&self) -> Result<(), UffdError> {
        if self.can_poison() {
            return Ok(());
        }
        let release = rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned();
        Err(UffdError::NoPoison { release })
    }
}

#[cfg(test)]
mod tests {
    use crate::guest_memory::GuestMemory;
    use crate::page::{PAGE_SIZE, PageIndex};
    use crate::uffd::{Protection, Uffd};
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::FileExt;

    const PAGES: usize = 4;

    /// Reads a page of the guest view by a system call, which returns an error where an access
    /// would raise a signal.
    fn read(memory: &GuestMemory, page: u32) -> io::Result<[u8; PAGE_SIZE]> {
        let mut bytes = [0; PAGE_SIZE];
        let address = memory.guest_page(PageIndex::new(page)).addr() as u64;
        File::open("/proc/self/mem")?.read_exact_at(&mut bytes, address)?;
        Ok(bytes)
    }

    #[test]
    fn exactly_the_poisoned_pages_fail_until_they_are_zapped() {
        let memory = GuestMemory::new(PAGES * PAGE_SIZE).expect("a small memory");
        let uffd = Uffd::new().expect("a userfaultfd");
        assert!(uffd.can_poison(), "tests need Linux 6.6");
        let page = |number| memory.guest_page(PageIndex::new(number));
        uffd.register(page(0), PAGES * PAGE_SIZE)
            .expect("registered");
        for number in [0, 2, 3] {
            uffd.copy(page(number), &[7; PAGE_SIZE], Protection::Writable)
                .expect("copied");
        }
        // Not in the file, and in the file but not mapped.
        memory.zap(PageIndex::new(2), 1).expect("zapped");
        for (number, is_first) in [(1, true), (2, true), (1, false)] {
            assert_eq!(uffd.poison(page(number)).expect("poisoned"), is_first);
        }
        for (number, fails) in [(0, false), (1, true), (2, true), (3, false)] {
            match read(&memory, number) {
                Ok(bytes) => assert!(!fails && bytes == [7; PAGE_SIZE], "page {number}"),
                Err(error) => assert!(fails, "page {number}: {error}"),
            }
        }
        memory.zap(PageIndex::new(1), 1).expect("zapped");
        assert_eq!(uffd.zero(page(1), 1).expect("usable again"), 1);
        assert_eq!(read(&memory, 1).expect("readable"), [0; PAGE_SIZE]);
    }

    #[test]
    fn a_page_that_was_write_protected_before_it_left_is_poisoned() {
        let memory = GuestMemory::new(PAGES * PAGE_SIZE).expect("a small memory");
        let uffd = Uffd::new().expect("a userfaultfd");
        let page = memory.guest_page(PageIndex::new(1));
        uffd.register(page, PAGE_SIZE).expect("registered");
        uffd.copy(page, &[7; PAGE_SIZE], Protection::WriteProtected)
            .expect("copied");
        // As a page that was read and is evicted.
        memory.zap(PageIndex::new(1), 1).expect("zapped");
        memory.punch(PageIndex::new(1), 1).expect("punched");
        assert!(uffd.poison(page).expect("poisoned"));
        assert!(read(&memory, 1).is_err());
        assert!(!uffd.poison(page).expect("poisoned before"));
        assert!(read(&memory, 1).is_err());
    }
}
