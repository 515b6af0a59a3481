//! The memory balloon (virtio 1.2, section 5.5), used for free page reporting: the guest reports
//! unused memory, and the monitor drops its bytes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::{BrokenRing, Chain, Ring, VirtioDevice, lost, read_bytes_of};

/// Bytes of a balloon page, independent of the guest's page size (section 5.5.6).
const PAGE_BYTES: u64 = 4096;

/// Feature: the guest may take pages back without asking when it is short of memory (section
/// 5.5.3).
const DEFLATE_ON_OOM: u64 = 1 << 2;
/// Feature: the guest reports free memory.
const PAGE_REPORTING: u64 = 1 << 5;

/// Limit of bytes that one chain can free. Linux reports 32 ranges of 4 MiB at once.
pub const BALLOON_CHAIN_BYTES_MAX: u64 = 1 << 30;
/// Limit of ranges, or single pages, that one chain can free. Linux inflates by 256 pages at once.
pub const BALLOON_CHAIN_RANGES_MAX: usize = 1024;

const INFLATE_QUEUE: usize = 0;
const DEFLATE_QUEUE: usize = 1;
/// Queues: inflate, deflate, reports. The specification numbers the reporting queue 4, after two
/// that exist only with features that are not offered here; Linux skips the numbers of absent
/// queues and uses 2. Both exist.
const QUEUE_SIZES: [u16; 5] = [128, 128, 128, 0, 128];

/// Offsets in the configuration (section 5.5.4).
const TARGET_OFFSET: usize = 0;
const ACTUAL_OFFSET: usize = 4;

/// A range of free guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeRange {
    /// The first address, a multiple of the page size 4096.
    pub start: GuestAddress,
    /// The length in bytes: whole pages, at least one.
    pub bytes: u64,
}

/// Accepts memory that the guest does not use.
pub trait FreePages: Send + Sync + fmt::Debug {
    /// Drops the bytes of these ranges, which are in guest memory. When it returns, the guest may
    /// use them again, and everything it writes from then on must persist. It may leave ranges
    /// unchanged.
    fn discard(&self, ranges: &[FreeRange]);
}

/// A balloon that is empty until a size is requested.
#[derive(Debug)]
pub struct Balloon {
    free_pages: Arc<dyn FreePages>,
    /// Pages that the guest is asked to put into the balloon.
    target_pages: AtomicU32,
    /// Pages that the guest has reported to be in the balloon.
    actual_pages: AtomicU32,
}

impl Balloon {
    /// Creates a balloon that passes its pages, and reported free pages, to `free_pages`.
    pub fn new(free_pages: Arc<dyn FreePages>) -> Self {
        Self {
            free_pages,
            target_pages: AtomicU32::new(0),
            actual_pages: AtomicU32::new(0),
        }
    }

    /// Requests a size of so many pages of 4096 bytes. The caller notifies the driver through
    /// [`MmioTransport::change_config`](super::MmioTransport::change_config).
    pub fn set_target_pages(&self, pages: u32) {
        // Relaxed here and below: independent numbers.
        self.target_pages.store(pages, Ordering::Relaxed);
    }

    /// How many pages were requested from the guest.
    pub fn target_pages(&self) -> u32 {
        self.target_pages.load(Ordering::Relaxed)
    }

    /// How many pages the guest has reported to be in the balloon.
    pub fn actual_pages(&self) -> u32 {
        self.actual_pages.load(Ordering::Relaxed)
    }

    /// The ranges that a reporting chain frees: its descriptors are the free memory itself.
    fn reported(chain: Chain<'_>) -> Vec<FreeRange> {
        let memory = chain.memory();
        let free = Free::new(memory);
        let range = |descriptor: Descriptor| (descriptor.addr().0, u64::from(descriptor.len()));
        let ranges = chain.clone().filter(|d| d.is_write_only()).map(range);
        free.take(ranges)
    }

    /// The ranges that an inflate chain frees: its descriptors hold page numbers.
    fn inflated(chain: Chain<'_>) -> Vec<FreeRange> {
        let memory = chain.memory();
        let mut pages = Vec::new();
        for descriptor in chain.clone().filter(|d| !d.is_write_only()) {
            let count = usize::try_from(descriptor.len() / 4).unwrap_or(usize::MAX);
            let left = BALLOON_CHAIN_RANGES_MAX - pages.len();
            let mut numbers = vec![0_u8; count.min(left) * 4];
            let bytes = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
            if !lost::can_use(memory, descriptor.addr(), bytes) {
                continue;
            }
            if memory.read_slice(&mut numbers, descriptor.addr()).is_err() {
                continue;
            }
            let (numbers, _) = numbers.as_chunks::<4>();
            pages.extend(numbers.iter().map(|number| u32::from_le_bytes(*number)));
        }
        // Sorted, so that neighbours become one range, and without duplicates.
        pages.sort_unstable();
        pages.dedup();
        let page = |number| (u64::from(number) * PAGE_BYTES, PAGE_BYTES);
        Free::new(memory).take(pages.into_iter().map(page))
    }
}

/// Collects ranges that may be freed.
struct Free<'a> {
    memory: &'a GuestMemoryMmap,
    ranges: Vec<FreeRange>,
    bytes: u64,
}

impl<'a> Free<'a> {
    fn new(memory: &'a GuestMemoryMmap) -> Self {
        Self {
            memory,
            ranges: Vec::new(),
            bytes: 0,
        }
    }

    /// The ranges that are whole pages inside the guest's memory, up to the limits.
    fn take(mut self, ranges: impl Iterator<Item = (u64, u64)>) -> Vec<FreeRange> {
        for (start, bytes) in ranges.take(BALLOON_CHAIN_RANGES_MAX) {
            self.add(start, bytes);
        }
        self.ranges
    }

    fn add(&mut self, start: u64, bytes: u64) {
        let inside = usize::try_from(bytes)
            .is_ok_and(|length| self.memory.check_range(GuestAddress(start), length));
        if bytes == 0
            || !start.is_multiple_of(PAGE_BYTES)
            || !bytes.is_multiple_of(PAGE_BYTES)
            || !inside
            || bytes > BALLOON_CHAIN_BYTES_MAX - self.bytes
        {
            tracing::debug!(start, bytes, "a free range of the guest is ignored");
            return;
        }
        self.bytes += bytes;
        match self.ranges.last_mut() {
            Some(last) if last.start.0 + last.bytes == start => last.bytes += bytes,
            _ => self.ranges.push(FreeRange {
                start: GuestAddress(start),
                bytes,
            }),
        }
    }
}

impl VirtioDevice for Balloon {
    fn name(&self) -> &str {
        "balloon"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        DEFLATE_ON_OOM | PAGE_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 8];
        let target = self.target_pages();
        config[TARGET_OFFSET..ACTUAL_OFFSET].copy_from_slice(&target.to_le_bytes());
        config[ACTUAL_OFFSET..].copy_from_slice(&self.actual_pages().to_le_bytes());
        read_bytes_of(&config, offset, data);
    }

    fn write_config(&self, offset: u64, data: &[u8]) {
        // The only field that drivers write, always as a whole.
        if offset == ACTUAL_OFFSET as u64
            && let Ok(value) = data.try_into()
        {
            self.actual_pages
                .store(u32::from_le_bytes(value), Ordering::Relaxed);
        }
    }

    fn serve(&self, queue: usize, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        ring.serve_next(|chain| {
            let ranges = match queue {
                INFLATE_QUEUE => Self::inflated(chain),
                // Nothing to do: a deflated page is zero until it is written.
                DEFLATE_QUEUE => Vec::new(),
                _ => Self::reported(chain),
            };
            if !ranges.is_empty() {
                self.free_pages.discard(&ranges);
            }
            0
        })
    }

    fn reset(&self) {
        self.actual_pages.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "balloon_tests.rs"]
mod tests;
