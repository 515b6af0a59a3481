//! A VM's memory on this node: one memfd with two views.
//!
//! The *guest view* goes to KVM and the device models; where a page is at home elsewhere it
//! is registered with userfaultfd. The *fabric view* never faults to userfaultfd: the pager
//! reads through it. The pager must never touch the guest view: it would wait for itself.

use crate::mapping::Mapping;
use crate::page::{PAGE_SIZE, PageBytes, PageIndex};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};

/// The memfd and its views. A page's offset in the file is its guest-physical address; what
/// is never touched, the hole below 4 GiB included, takes no memory.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    guest: Mapping,
    fabric: Mapping,
}

impl GuestMemory {
    /// Memory for guest-physical addresses below `bytes`, all zero.
    ///
    /// # Errors
    ///
    /// When the host refuses the file or a mapping of that size.
    pub fn new(bytes: usize) -> io::Result<Self> {
        // SAFETY: the name is a C string; the descriptor that comes back is new and ours.
        let file = unsafe {
            let fd = libc::memfd_create(c"ssi-hv-guest".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(fd)
        };
        file.set_len(bytes as u64)?;
        let guest = Mapping::shared(file.as_fd(), bytes)?;
        let fabric = Mapping::shared(file.as_fd(), bytes)?;
        for view in [&guest, &fabric] {
            // A child must not share a registered view, and a core dump must not fault it in.
            view.advise(0, bytes, libc::MADV_DONTFORK)?;
            view.advise(0, bytes, libc::MADV_DONTDUMP)?;
            // A huge page would reach into neighbours that are at home elsewhere. EINVAL: a
            // kernel without huge pages.
            match view.advise(0, bytes, libc::MADV_NOHUGEPAGE) {
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
                _ => {}
            }
        }
        Ok(Self {
            file,
            guest,
            fabric,
        })
    }

    /// Bytes of guest-physical address space.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.guest.bytes()
    }

    /// Host address of guest-physical address 0 in the guest view. Touching it may wait for
    /// the network.
    #[must_use]
    pub fn guest_view(&self) -> *mut u8 {
        self.guest.as_ptr()
    }

    /// The page at a host address of the guest view.
    pub(crate) fn page_at(&self, address: usize) -> Option<PageIndex> {
        let offset = address.checked_sub(self.guest.as_ptr().addr())?;
        if offset >= self.bytes() {
            return None;
        }
        PageIndex::containing(offset as u64)
    }

    /// Host address of a page in the guest view.
    pub(crate) fn guest_page(&self, page: PageIndex) -> *mut u8 {
        self.guest.at(page.index() * PAGE_SIZE, PAGE_SIZE)
    }

    /// A page in the fabric view. The page must have bytes here: reading one that has none
    /// would create it.
    pub(crate) fn fabric_page(&self, page: PageIndex) -> *const PageBytes {
        self.fabric
            .at(page.index() * PAGE_SIZE, PAGE_SIZE)
            .cast_const()
            .cast()
    }

    /// Writes the bytes of pages from `first` on into the file, without mapping them anywhere:
    /// the kernel makes the pages from the bytes, and zeroes none before. Whoever calls this
    /// must hold the pages, and they must not be mapped.
    pub(crate) fn write(&self, first: PageIndex, bytes: &[u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        debug_assert!(bytes.len().is_multiple_of(PAGE_SIZE));
        self.file.write_all_at(bytes, first.address())
    }

    /// Drops the mappings of `count` pages in the guest view; their bytes stay in the file.
    pub(crate) fn zap(&self, first: PageIndex, count: usize) -> io::Result<()> {
        self.guest.advise(
            first.index() * PAGE_SIZE,
            count * PAGE_SIZE,
            libc::MADV_DONTNEED,
        )
    }

    /// Frees the bytes of `count` pages.
    pub(crate) fn punch(&self, first: PageIndex, count: usize) -> io::Result<()> {
        let offset = i64::try_from(first.address()).expect("an address of at most 2^44");
        let length = i64::try_from(count * PAGE_SIZE).expect("a length inside the file");
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the call changes only the file, whose bytes nobody holds a reference to.
        if unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, length) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Bytes of the file that take memory now.
    ///
    /// # Errors
    ///
    /// When `fstat` fails.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(self.file.metadata()?.blocks() * 512)
    }
}
