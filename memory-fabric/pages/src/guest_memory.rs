//! A VM's memory on this node: one memfd with two views.
//!
//! The *guest view* goes to KVM and the device models; where a page is at home elsewhere it
//! is registered with userfaultfd. The *fabric view* never faults to userfaultfd: coherent memory
//! is read through it, and on some hosts the pager writes. The pager must never touch the guest
//! view: it would wait for itself.

use crate::page::{PAGE_SIZE, PageBytes, PageIndex, PageRange};
use fabric_host::root::ProcFile;
use fabric_host::{Advice, Mapping};
use rustix::fs::{FallocateFlags, MemfdFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a huge page: what one entry of a page directory maps on x86-64.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Whether the kernel makes huge pages of shared memory
/// (`Documentation/admin-guide/mm/transhuge.rst`).
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Sums over the mappings of this process.
static ROLLUP: ProcFile = ProcFile::new("/proc/self/smaps_rollup");

/// The memfd and its views. A page's offset in the file is its guest-physical address; what
/// is never touched, the hole below 4 GiB included, takes no memory.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    guest: Mapping,
    fabric: Mapping,
    /// Whether bytes are written through the fabric view, and not by `pwrite`.
    writes_by_view: AtomicBool,
}

impl GuestMemory {
    /// Memory for guest-physical addresses below `bytes`, all zero.
    ///
    /// # Errors
    ///
    /// When the host refuses the file or a mapping of that size.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create(
            c"ssi-hv-guest",
            MemfdFlags::CLOEXEC,
        )?);
        file.set_len(bytes as u64)?;
        let guest = Mapping::shared(file.as_fd(), bytes, HUGE_PAGE_BYTES)?;
        let fabric = Mapping::shared(file.as_fd(), bytes, HUGE_PAGE_BYTES)?;
        for view in [&guest, &fabric] {
            // A child must not share a registered view, and a core dump must not fault it in.
            view.advise(0, bytes, Advice::DontFork)?;
            view.advise(0, bytes, Advice::DontDump)?;
            // A huge page would reach into neighbours that are at home elsewhere.
            advise_if_known(view, 0, bytes, Advice::NoHugePages)?;
        }
        // What cannot be read says that there are no huge pages.
        let setting = std::fs::read_to_string(SHMEM_ENABLED).unwrap_or_default();
        Ok(Self {
            file,
            guest,
            fabric,
            writes_by_view: AtomicBool::new(writes_make_huge_pages(&setting)),
        })
    }

    /// Lets the kernel back the pages of `range` by huge pages, as far as whole ones fit in it;
    /// gives how many bytes that is. Only for pages that are at home here: freeing one page of a
    /// huge one would split it, or free nothing.
    ///
    /// A page of the file becomes huge by the advice on the view through which it is first
    /// touched. Pages at home here are never touched through the fabric view, whose advice stays.
    ///
    /// # Errors
    ///
    /// When the kernel refuses the advice.
    pub fn allow_huge_pages(&self, range: PageRange) -> io::Result<usize> {
        let start = (range.first.index() * PAGE_SIZE).next_multiple_of(HUGE_PAGE_BYTES);
        let end = usize::try_from(range.end()).expect("64-bit host") * PAGE_SIZE;
        let bytes = (end & !(HUGE_PAGE_BYTES - 1)).saturating_sub(start);
        if bytes > 0 {
            advise_if_known(&self.guest, start, bytes, Advice::HugePages)?;
        }
        Ok(bytes)
    }

    /// Which pages from `first` on, one for each place in `found`, are in memory: the lowest bit
    /// of each. Touches none of them.
    pub fn in_memory(&self, first: PageIndex, found: &mut [u8]) -> io::Result<()> {
        self.fabric.in_memory(first.index() * PAGE_SIZE, found)
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

    /// The guest view as words that are shared with the guest. Touching it may wait for the
    /// network.
    #[must_use]
    pub fn guest_words(&self) -> &[AtomicU64] {
        self.guest.words()
    }

    /// The words of a page in the fabric view, which the guest may change at any time. The page must
    /// have bytes here.
    #[must_use]
    pub fn words_of(&self, page: PageIndex) -> &[AtomicU64] {
        let words = PAGE_SIZE / size_of::<AtomicU64>();
        &self.fabric.words()[page.index() * words..][..words]
    }

    /// The page at a host address of the guest view.
    pub fn page_at(&self, address: usize) -> Option<PageIndex> {
        let offset = address.checked_sub(self.guest.as_ptr().addr())?;
        if offset >= self.bytes() {
            return None;
        }
        PageIndex::containing(offset as u64)
    }

    /// Host address of a page in the guest view.
    pub fn guest_page(&self, page: PageIndex) -> *mut u8 {
        self.guest.at(page.index() * PAGE_SIZE, PAGE_SIZE)
    }

    /// Writes a zero to a page through the guest view, as a guest does; may fault.
    pub(crate) fn write_as_guest(&self, page: PageIndex) {
        let word = &self.guest_words()[page.index() * (PAGE_SIZE / size_of::<AtomicU64>())];
        // Relaxed: only the fault matters.
        word.store(0, Ordering::Relaxed);
    }

    /// Makes the kernel map a page of the guest view anew, with the protection of the view.
    pub(crate) fn map_anew(&self, page: PageIndex) -> io::Result<()> {
        let start = page.index() * PAGE_SIZE;
        self.guest.renew_protection(start, PAGE_SIZE)
    }

    /// Makes `bytes` of the guest view from `first` on inaccessible: a thread that touches them is
    /// ended by SIGSEGV, and a system call that does fails with EFAULT.
    pub(crate) fn forbid(&self, first: PageIndex, bytes: usize) -> io::Result<()> {
        let start = first.index() * PAGE_SIZE;
        self.guest.forbid(start, bytes)
    }

    /// Copies a page through the fabric view. The page must have bytes here: reading one that has
    /// none would create it. If the guest writes to it meanwhile, the copy has old and new bytes.
    pub fn read(&self, page: PageIndex, target: &mut PageBytes) {
        self.fabric.read(page.index() * PAGE_SIZE, target);
    }

    /// Copies a page that is to be freed, as [`Self::read`] does, and maps it nowhere. The fabric view
    /// would also map its neighbours, and to free what it maps interrupts other processors. A page
    /// without bytes is zeroes, and stays without.
    ///
    /// # Errors
    ///
    /// When `pread` fails, as for a page whose memory is broken.
    pub fn read_unmapped(&self, page: PageIndex, target: &mut PageBytes) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.file.read_exact_at(target, page.address())
    }

    /// Writes the bytes of pages from `first` on into the file, and leaves them mapped nowhere.
    /// The caller must hold the pages, and they must not be mapped in the guest view.
    ///
    /// By `pwrite` the kernel makes the pages from the bytes, and zeroes none before. But it may
    /// make a huge page then, zeroes for neighbours with it, since a write into a file has no view
    /// whose advice forbids that. So that is for hosts that make none unasked.
    pub fn write(&self, first: PageIndex, bytes: &[u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        debug_assert!(bytes.len().is_multiple_of(PAGE_SIZE));
        // Relaxed: the bytes are right either way.
        if !self.writes_by_view.load(Ordering::Relaxed) {
            return self.file.write_all_at(bytes, first.address());
        }
        let offset = first.index() * PAGE_SIZE;
        self.fabric.write(offset, bytes);
        // Or freeing them would interrupt other processors.
        self.fabric.advise(offset, bytes.len(), Advice::DontNeed)
    }

    /// The host makes huge pages unasked: from now on bytes are written so that it cannot.
    pub fn write_by_view(&self) {
        self.writes_by_view.store(true, Ordering::Relaxed);
    }

    /// Whether bytes are written so that the host cannot make huge pages of them.
    #[must_use]
    pub fn writes_by_view(&self) -> bool {
        self.writes_by_view.load(Ordering::Relaxed)
    }

    /// Drops the mappings of `count` pages in the guest view; their bytes stay in the file.
    pub fn zap(&self, first: PageIndex, count: usize) -> io::Result<()> {
        self.guest.advise(
            first.index() * PAGE_SIZE,
            count * PAGE_SIZE,
            Advice::DontNeed,
        )
    }

    /// Drops the mappings of up to [`UNMAP_RANGES_MAX`](fabric_host::UNMAP_RANGES_MAX) ranges of
    /// pages in the guest view by one call for `process`, which is this process. Returns the number
    /// of bytes unmapped.
    pub(crate) fn zap_together(
        &self,
        process: BorrowedFd<'_>,
        ranges: &[PageRange],
    ) -> io::Result<usize> {
        let ranges = ranges.iter();
        let ranges = ranges.map(|range| {
            let bytes = range.count as usize * PAGE_SIZE;
            (range.first.index() * PAGE_SIZE, bytes)
        });
        self.guest.unmap_ranges(process, ranges)
    }

    /// Frees the bytes of `count` pages.
    pub fn punch(&self, first: PageIndex, count: usize) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let length = (count * PAGE_SIZE) as u64;
        rustix::fs::fallocate(&self.file, mode, first.address(), length).map_err(Into::into)
    }

    /// How many of `count` pages have bytes in the file.
    pub fn pages_with_bytes(&self, first: PageIndex, count: usize) -> io::Result<u64> {
        let mut present = vec![0_u8; count];
        self.in_memory(first, &mut present)?;
        Ok(present.iter().map(|flags| u64::from(flags & 1)).sum())
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

/// Whether a write into a memory file may make huge pages, by what [`SHMEM_ENABLED`] says.
fn writes_make_huge_pages(setting: &str) -> bool {
    let chosen = setting
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("never", |(chosen, _)| chosen);
    !["never", "advise", "deny"].contains(&chosen)
}

/// `madvise`; that the kernel does not know the advice is no error.
fn advise_if_known(view: &Mapping, offset: usize, bytes: usize, advice: Advice) -> io::Result<()> {
    match view.advise(offset, bytes, advice) {
        // A kernel without huge pages.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        result => result,
    }
}

/// Bytes of guest memory that are mapped by huge pages in this process now. Walks the page tables
/// of the whole process, which takes about a millisecond for each GiB of small pages; `None`
/// when the kernel does not report it.
#[must_use]
pub fn huge_bytes() -> Option<u64> {
    mapped_huge(&ROLLUP.read()?)
}

/// Opens what [`huge_bytes`] reads, for a process that will leave the root directory which has it.
pub fn keep_huge_bytes() {
    ROLLUP.keep_open();
}

/// The views are the only shared memory of the process that can be huge.
fn mapped_huge(rollup: &str) -> Option<u64> {
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Returns whether the page at an address is mapped there in this process, by the kernel's page
/// map.
#[cfg(test)]
pub fn is_mapped(address: *const u8) -> bool {
    use std::os::unix::fs::FileExt;
    let pagemap = File::open("/proc/self/pagemap").expect("procfs");
    let mut entry = [0; 8];
    let at = address.addr() / PAGE_SIZE * 8;
    let read = pagemap.read_exact_at(&mut entry, at as u64);
    read.expect("an entry for each page");
    u64::from_ne_bytes(entry) >> 63 == 1
}

#[cfg(test)]
#[path = "guest_memory_tests.rs"]
mod tests;
