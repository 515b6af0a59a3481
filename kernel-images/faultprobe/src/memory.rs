//! The memory under test: an anonymous mapping of small pages.

use std::fmt;
use std::ptr::NonNull;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// As [`PAGE_BYTES`], for sizes of memory.
pub const PAGE_BYTES_U64: u64 = 4096;
/// 64-bit words of a page.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// Memory left to the rest of the guest; without it, the kernel would kill this process midway.
const RESERVE_BYTES: u64 = 48 << 20;

/// Why memory cannot be allocated.
#[derive(Debug, PartialEq, Eq)]
pub enum MemoryError {
    /// Less is free than requested.
    TooLittle {
        /// The requested bytes.
        asked: u64,
        /// Bytes that are free or can be swapped out.
        limit: u64,
    },
    /// `mmap` failed.
    Map {
        /// The requested bytes.
        asked: u64,
        /// The reason.
        reason: String,
    },
    /// `mbind` failed.
    Bind {
        /// The NUMA node.
        node: u32,
        /// The reason.
        reason: String,
    },
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLittle { asked, limit } => write!(
                f,
                "not enough memory: {asked} bytes asked, {limit} is the limit ({} MiB stay free); use a smaller --bytes",
                RESERVE_BYTES >> 20
            ),
            Self::Bind { node, reason } => write!(
                f,
                "cannot take memory of node {node} alone: {reason}; see /sys/devices/system/node/has_memory"
            ),
            Self::Map { asked, reason } => write!(
                f,
                "cannot map {asked} bytes: {reason}; use a smaller --bytes"
            ),
        }
    }
}

/// The highest NUMA node number that Linux supports.
pub const NODE_MAX: i64 = 1023;

/// A mapping of whole pages, unmapped on drop.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u64>,
    pages: usize,
}

impl Memory {
    /// Maps this many bytes, a multiple of the page size, without huge pages.
    ///
    /// # Errors
    /// Fails when less is free, or the kernel refuses.
    pub fn new(bytes: u64) -> Result<Self, MemoryError> {
        if let Some(available) = available_bytes() {
            check_room(bytes, available)?;
        }
        let fail = |reason: String| MemoryError::Map {
            asked: bytes,
            reason,
        };
        let length = usize::try_from(bytes).map_err(|e| fail(e.to_string()))?;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses affects no existing
        // memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(fail(std::io::Error::last_os_error().to_string()));
        }
        // SAFETY: the range is the mapping just made. A kernel without huge pages answers EINVAL,
        // and then there are none to prevent.
        unsafe { libc::madvise(address, length, libc::MADV_NOHUGEPAGE) };
        let base = NonNull::new(address.cast::<u64>()).ok_or_else(|| fail("mapped at 0".into()))?;
        Ok(Self {
            base,
            pages: length / PAGE_BYTES,
        })
    }

    /// Allocates pages of one NUMA node only from now on, up to [`NODE_MAX`]; existing pages stay.
    ///
    /// # Errors
    /// Fails when the kernel has no such node with memory, or no NUMA at all.
    pub fn bind(&mut self, node: u32) -> Result<(), MemoryError> {
        let mut nodes = [0_u64; 16];
        if let Some(word) = nodes.get_mut(node as usize / 64) {
            *word |= 1 << (node % 64);
        }
        self.set_policy(libc::MPOL_BIND, &nodes)
            .map_err(|error| MemoryError::Bind {
                node,
                reason: error.to_string(),
            })
    }

    /// Lets the kernel choose the nodes of pages again.
    ///
    /// # Errors
    /// Fails when the kernel refuses.
    pub fn unbind(&mut self) -> std::io::Result<()> {
        self.set_policy(libc::MPOL_DEFAULT, &[])
    }

    fn set_policy(&mut self, policy: libc::c_int, nodes: &[u64]) -> std::io::Result<()> {
        // The kernel reads one bit less than `maxnode`.
        let bits = if nodes.is_empty() {
            0
        } else {
            nodes.len() * 64 + 1
        };
        // SAFETY: the range is a mapping that lives as long as self, and the kernel reads no more
        // than `bits - 1` bits of `nodes`, and none of an empty slice. Contents do not change.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.pages * PAGE_BYTES,
                policy,
                if nodes.is_empty() {
                    std::ptr::null()
                } else {
                    nodes.as_ptr()
                },
                bits,
                0,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    }

    /// Returns the number of pages of the mapping.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the words of a page.
    ///
    /// # Panics
    /// Panics when there is no such page.
    pub fn page(&self, page: usize) -> &[u64] {
        assert!(page < self.pages);
        // SAFETY: the page is inside the mapping, which is readable, aligned to 4096, lives as
        // long as self, and holds integers, for which any bytes are valid. Nobody else has
        // its address, and &self excludes page_mut.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(page * PAGE_WORDS), PAGE_WORDS) }
    }

    /// Returns the words of a page for writing.
    ///
    /// # Panics
    /// Panics when there is no such page.
    pub fn page_mut(&mut self, page: usize) -> &mut [u64] {
        assert!(page < self.pages);
        // SAFETY: as in `page`; &mut self excludes every other reference.
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr().add(page * PAGE_WORDS), PAGE_WORDS)
        }
    }

    /// Reads the first word of a page, exactly once.
    #[inline]
    pub fn touch_read(&self, page: usize) -> u64 {
        // SAFETY: a reference to the word is valid for a read.
        unsafe { std::ptr::read_volatile(&raw const self.page(page)[0]) }
    }

    /// Writes the first word of a page, exactly once.
    #[inline]
    pub fn touch_write(&mut self, page: usize, word: u64) {
        // SAFETY: a unique reference to the word is valid for a write.
        unsafe { std::ptr::write_volatile(&raw mut self.page_mut(page)[0], word) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it outlives self.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * PAGE_BYTES) };
    }
}

fn check_room(asked: u64, available: u64) -> Result<(), MemoryError> {
    let limit = available.saturating_sub(RESERVE_BYTES);
    if asked > limit {
        Err(MemoryError::TooLittle { asked, limit })
    } else {
        Ok(())
    }
}

/// Returns the available memory according to `/proc/meminfo`, in memory and on swap, if readable.
fn available_bytes() -> Option<u64> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<u64> {
    let bytes = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    // A kernel without swap has no such line.
    Some(bytes("MemAvailable:")? + bytes("SwapFree:").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_separate_and_start_as_zeroes() {
        let mut memory = Memory::new(3 * PAGE_BYTES_U64).unwrap();
        assert_eq!(memory.pages(), 3);
        memory.touch_write(1, 7);
        assert_eq!(
            (
                memory.touch_read(0),
                memory.touch_read(1),
                memory.page(2)[0]
            ),
            (0, 7, 0)
        );
    }

    #[test]
    fn a_node_that_is_not_there_is_named() {
        let mut memory = Memory::new(PAGE_BYTES_U64).unwrap();
        let error = memory.bind(1023).unwrap_err().to_string();
        assert!(error.contains("node 1023"), "{error}");
        memory.touch_write(0, 5);
        assert_eq!(memory.touch_read(0), 5);
    }

    #[test]
    fn what_can_be_swapped_out_is_available_too() {
        let text = "MemTotal: 100 kB\nMemAvailable:      30 kB\nSwapFree:   70 kB\n";
        assert_eq!(parse_meminfo(text), Some(100 << 10));
        assert_eq!(parse_meminfo("MemAvailable: 30 kB\n"), Some(30 << 10));
        assert_eq!(parse_meminfo("SwapFree: 30 kB\n"), None);
    }

    #[test]
    fn more_than_is_free_is_refused_with_the_limit() {
        let available = 900 << 20;
        assert_eq!(check_room(800 << 20, available), Ok(()));
        let text = check_room(880 << 20, available).unwrap_err().to_string();
        assert!(text.contains(&(880_u64 << 20).to_string()), "{text}");
        assert!(text.contains(&(852_u64 << 20).to_string()), "{text}");
    }
}
