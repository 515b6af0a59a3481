//! A VM's memory on this node: one memfd with two views.
//!
//! The *guest view* goes to KVM and the device models; where a page is at home elsewhere it
//! is registered with userfaultfd. The *fabric view* never faults to userfaultfd: the pager
//! reads through it, and on some hosts writes. The pager must never touch the guest view: it
//! would wait for itself.

use crate::page::{PAGE_SIZE, PageBytes, PageIndex, PageRange};
use fabric_host::Mapping;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a huge page: what one entry of a page directory maps on x86-64.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Whether the kernel makes huge pages of shared memory (`Documentation/admin-guide/mm/transhuge.rst`).
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

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
        // SAFETY: the name is a C string; the descriptor that comes back is new and ours.
        let file = unsafe {
            let fd = libc::memfd_create(c"ssi-hv-guest".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(fd)
        };
        file.set_len(bytes as u64)?;
        let guest = Mapping::shared(file.as_fd(), bytes, HUGE_PAGE_BYTES)?;
        let fabric = Mapping::shared(file.as_fd(), bytes, HUGE_PAGE_BYTES)?;
        for view in [&guest, &fabric] {
            // A child must not share a registered view, and a core dump must not fault it in.
            view.advise(0, bytes, libc::MADV_DONTFORK)?;
            view.advise(0, bytes, libc::MADV_DONTDUMP)?;
            // A huge page would reach into neighbours that are at home elsewhere.
            advise_if_known(view, 0, bytes, libc::MADV_NOHUGEPAGE)?;
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
            advise_if_known(&self.guest, start, bytes, libc::MADV_HUGEPAGE)?;
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
        // SAFETY: the page is mapped in the guest view, and a byte of it has no type to break.
        unsafe { self.guest_page(page).write_volatile(0) };
    }

    /// Makes the kernel map a page of the guest view anew, with the protection of the view.
    pub(crate) fn map_anew(&self, page: PageIndex) -> io::Result<()> {
        for protection in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
            let start = page.index() * PAGE_SIZE;
            self.guest.protect(start, PAGE_SIZE, protection)?;
        }
        Ok(())
    }

    /// Makes `bytes` of the guest view from `first` on inaccessible: a thread that touches them is
    /// ended by SIGSEGV, and a system call that does fails with EFAULT.
    pub(crate) fn forbid(&self, first: PageIndex, bytes: usize) -> io::Result<()> {
        let start = first.index() * PAGE_SIZE;
        self.guest.protect(start, bytes, libc::PROT_NONE)
    }

    /// A page in the fabric view. The page must have bytes here: reading one that has none
    /// would create it.
    pub fn fabric_page(&self, page: PageIndex) -> *const PageBytes {
        self.fabric
            .at(page.index() * PAGE_SIZE, PAGE_SIZE)
            .cast_const()
            .cast()
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
        let target = self.fabric.at(offset, bytes.len());
        // SAFETY: the target is inside the fabric view. Nobody else uses these pages, which the
        // caller holds, so the bytes, which are borrowed, are not among them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        // Or freeing them would interrupt other processors.
        self.fabric.advise(offset, bytes.len(), libc::MADV_DONTNEED)
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
            libc::MADV_DONTNEED,
        )
    }

    /// Frees the bytes of `count` pages.
    pub fn punch(&self, first: PageIndex, count: usize) -> io::Result<()> {
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

    /// How many of `count` pages have bytes in the file.
    pub fn pages_with_bytes(&self, first: PageIndex, count: usize) -> io::Result<u64> {
        let start = self.fabric.at(first.index() * PAGE_SIZE, count * PAGE_SIZE);
        let mut present = vec![0_u8; count];
        // SAFETY: the range is inside the fabric view, and there is a byte for each page of it.
        if unsafe { libc::mincore(start.cast(), count * PAGE_SIZE, present.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
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
fn advise_if_known(
    view: &Mapping,
    offset: usize,
    bytes: usize,
    advice: libc::c_int,
) -> io::Result<()> {
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
    mapped_huge(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?)
}

/// The views are the only shared memory of the process that can be huge.
fn mapped_huge(rollup: &str) -> Option<u64> {
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Returns whether the page at an address is mapped there in this process, by the kernel's page map.
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
mod tests {
    use super::*;

    #[test]
    fn views_are_aligned_to_huge_pages() {
        for bytes in [PAGE_SIZE, HUGE_PAGE_BYTES - PAGE_SIZE, 5 * HUGE_PAGE_BYTES] {
            let memory = GuestMemory::new(bytes).expect("a small memory");
            assert!(memory.guest_view().addr().is_multiple_of(HUGE_PAGE_BYTES));
            // SAFETY: the last byte of the view, which nobody else has.
            unsafe { memory.guest_view().add(bytes - 1).write_volatile(7) };
            assert_eq!(memory.resident_bytes().expect("fstat"), PAGE_SIZE as u64);
        }
    }

    #[test]
    fn only_whole_huge_pages_inside_the_range_may_be_huge() {
        let memory = GuestMemory::new(8 * HUGE_PAGE_BYTES).expect("a small memory");
        let allowed = |first, count| {
            let range = PageRange::new(PageIndex::new(first), count);
            memory.allow_huge_pages(range).expect("allowed") / HUGE_PAGE_BYTES
        };
        assert_eq!(allowed(0, 512), 1);
        assert_eq!(allowed(0, 511), 0);
        assert_eq!(allowed(1, 1023), 1);
        assert_eq!(allowed(1, 1022), 0);
        assert_eq!(allowed(512, 0), 0);
        assert_eq!(allowed(100, 3000), 5);
    }

    fn faults_of_this_thread() -> i64 {
        // SAFETY: plain numbers, for which all zero is valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is of the kind that the call fills.
        let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
        assert_eq!(result, 0);
        usage.ru_minflt
    }

    #[test]
    fn a_write_makes_the_pages_it_is_for_and_maps_none() {
        for by_view in [false, true] {
            let memory = GuestMemory::new(2 * HUGE_PAGE_BYTES).expect("a small memory");
            if by_view {
                memory.write_by_view();
            } else if memory.writes_by_view() {
                println!("SKIPPED: shmem_enabled makes huge pages unasked here");
                continue;
            }
            let first = PageIndex::new(7);
            let bytes: Vec<u8> = (0..5 * PAGE_SIZE)
                .map(|at| (at / 64).to_le_bytes()[0])
                .collect();
            // Once where there is nothing, and once over what is there.
            for _ in 0..2 {
                memory
                    .write(first, &vec![0xee; bytes.len()])
                    .expect("written");
            }
            let faults = faults_of_this_thread();
            memory.write(first, &bytes).expect("written");
            let faults = faults_of_this_thread() - faults;
            assert!(!by_view || faults >= 5, "{faults} faults of the view");
            let resident = memory.resident_bytes().expect("fstat");
            assert_eq!(resident, bytes.len() as u64, "by view: {by_view}");
            for page in (0..16).map(PageIndex::new) {
                assert!(!is_mapped(memory.fabric_page(page).cast()), "{page}");
                assert!(!is_mapped(memory.guest_page(page)), "{page}");
            }
            let mut found = [0; 16];
            memory
                .in_memory(PageIndex::new(0), &mut found)
                .expect("mincore");
            let here = |page: usize| (7..12).contains(&page);
            assert!((0..16).all(|page| (found[page] & 1 == 1) == here(page)));
            for (page, wanted) in (7..).zip(bytes.chunks(PAGE_SIZE)) {
                // SAFETY: inside the view, and nobody writes there.
                let bytes = unsafe { &*memory.fabric_page(PageIndex::new(page)) };
                assert!(bytes == wanted, "page {page}, by view: {by_view}");
            }
        }
    }

    #[test]
    fn who_makes_huge_pages_unasked_is_known() {
        for setting in ["always", "within_size", "force", "what comes one day"] {
            let setting = format!("advise never [{setting}] deny\n");
            assert!(writes_make_huge_pages(&setting), "{setting}");
        }
        for setting in [
            "[advise] always",
            "always [never]\n",
            "[deny]",
            "",
            "always",
        ] {
            assert!(!writes_make_huge_pages(setting), "{setting}");
        }
    }

    #[test]
    fn what_the_kernel_tells_of_huge_pages_is_read() {
        let rollup = "Rss:  8 kB\nShmemPmdMapped:     4096 kB\nFilePmdMapped: 0 kB\n";
        assert_eq!(mapped_huge(rollup), Some(4 << 20));
        assert_eq!(mapped_huge("Rss: 8 kB\n"), None);
        assert!(huge_bytes().is_some());
    }
}
