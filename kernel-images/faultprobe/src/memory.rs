//! The memory under test: an anonymous mapping of small pages.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// As [`PAGE_BYTES`], for sizes of memory.
pub const PAGE_BYTES_U64: u64 = 4096;
/// 64-bit words of a page.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// Memory left to the rest of the guest; without it, the kernel would kill this process midway.
const RESERVE_BYTES: u64 = 48 << 20;
/// How often, and at what interval, the kernel is asked for the free memory until there is enough.
/// Pages that a guest is reporting to its balloon as free count as used for the time of the report,
/// and no event tells when that is over.
const ROOM_TRIES: u32 = 100;
const ROOM_INTERVAL: Duration = Duration::from_millis(100);

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
    /// Maps this many bytes, a multiple of the page size, without huge pages. Waits some seconds
    /// while less is free.
    ///
    /// # Errors
    /// Fails when less is free, or the kernel refuses.
    pub fn new(bytes: u64) -> Result<Self, MemoryError> {
        await_room(bytes, available, || std::thread::sleep(ROOM_INTERVAL))?;
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

    /// Writes the first word of a page, exactly once, and returns what was there: one instruction, whose
    /// fault is one of a write.
    #[inline]
    pub fn touch_write(&mut self, page: usize, word: u64) -> u64 {
        // SAFETY: a unique reference to the word is valid for atomic accesses.
        let first = unsafe { AtomicU64::from_ptr(&raw mut self.page_mut(page)[0]) };
        first.swap(word, Ordering::Relaxed)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it outlives self.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * PAGE_BYTES) };
    }
}

/// Waits until so much is available, unless it never can be; `pause` passes the time. Where
/// `available` does not know, `mmap` decides.
fn await_room(
    asked: u64,
    available: impl Fn() -> Option<Available>,
    pause: impl Fn(),
) -> Result<(), MemoryError> {
    let mut tries = 0;
    while let Some(room) = available() {
        let checked = check_room(asked, room.now);
        tries += 1;
        if checked.is_ok() || tries == ROOM_TRIES || check_room(asked, room.ever).is_err() {
            return checked;
        }
        pause();
    }
    Ok(())
}

fn check_room(asked: u64, available: u64) -> Result<(), MemoryError> {
    let limit = available.saturating_sub(RESERVE_BYTES);
    if asked > limit {
        Err(MemoryError::TooLittle { asked, limit })
    } else {
        Ok(())
    }
}

/// Bytes in memory and on swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Available {
    /// What a program can have now.
    now: u64,
    /// What it could have if no other needed any.
    ever: u64,
}

/// Returns what is available according to `/proc/meminfo`, if readable.
fn available() -> Option<Available> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<Available> {
    let bytes = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    // A kernel without swap has no such lines.
    Some(Available {
        now: bytes("MemAvailable:")? + bytes("SwapFree:").unwrap_or(0),
        ever: bytes("MemTotal:")? + bytes("SwapTotal:").unwrap_or(0),
    })
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
        let text =
            "MemTotal: 100 kB\nMemAvailable:      30 kB\nSwapTotal: 80 kB\nSwapFree:   70 kB\n";
        let room = |now, ever| Some(Available { now, ever });
        assert_eq!(parse_meminfo(text), room(100 << 10, 180 << 10));
        let text = "MemTotal: 90 kB\nMemAvailable: 30 kB\n";
        assert_eq!(parse_meminfo(text), room(30 << 10, 90 << 10));
        assert_eq!(parse_meminfo("MemTotal: 90 kB\nSwapFree: 30 kB\n"), None);
    }

    #[test]
    fn memory_that_is_in_use_for_a_while_is_awaited() {
        let (asked, pauses) = (64 << 20, std::cell::Cell::new(0));
        let pause = || pauses.set(pauses.get() + 1);
        let free_after = |count| {
            let now = if pauses.get() < count { 0 } else { 128 << 20 };
            let ever = 256 << 20;
            Some(Available { now, ever })
        };
        assert_eq!(await_room(asked, || free_after(3), pause), Ok(()));
        assert_eq!(pauses.replace(0), 3);
        assert!(await_room(asked, || free_after(u32::MAX), pause).is_err());
        assert_eq!(pauses.replace(0), ROOM_TRIES - 1);
        // What the machine does not have does not come.
        assert!(await_room(1 << 30, || free_after(u32::MAX), pause).is_err());
        assert_eq!(pauses.get(), 0);
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
