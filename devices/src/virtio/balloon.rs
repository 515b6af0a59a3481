//! The memory balloon (virtio 1.2, section 5.5), which is here for free page reporting: the
//! guest tells which memory it does not use, and the monitor forgets the bytes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::{BrokenRing, Chain, Ring, VirtioDevice, read_bytes_of};

/// Bytes in a page of the balloon, whatever the guest's pages are (section 5.5.6).
const PAGE_BYTES: u64 = 4096;

/// Feature: when the guest is short of memory it may take pages back unasked (section 5.5.3).
const DEFLATE_ON_OOM: u64 = 1 << 2;
/// Feature: the guest reports free memory.
const PAGE_REPORTING: u64 = 1 << 5;

/// Most bytes that one chain can free. Linux reports 32 ranges of 4 MiB at once.
pub const BALLOON_CHAIN_BYTES_MAX: u64 = 1 << 30;
/// Most ranges, or single pages, that one chain can free. Linux puts 256 pages into the
/// balloon at once.
pub const BALLOON_CHAIN_RANGES_MAX: usize = 1024;

const INFLATE_QUEUE: usize = 0;
const DEFLATE_QUEUE: usize = 1;
/// Queues: into the balloon; out of it; reports. The specification numbers the queue of reports
/// 4, behind two that only exist with features that are not offered here; Linux leaves out the
/// numbers of those, and gives it 2. Both are there.
const QUEUE_SIZES: [u16; 5] = [128, 128, 128, 0, 128];

/// Offsets in the configuration (section 5.5.4).
const TARGET_OFFSET: usize = 0;
const ACTUAL_OFFSET: usize = 4;

/// Guest memory that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeRange {
    /// The first address, a multiple of the page size 4096.
    pub start: GuestAddress,
    /// The length, whole pages and at least one.
    pub bytes: u64,
}

/// Takes what the guest does not use.
pub trait FreePages: Send + Sync + fmt::Debug {
    /// Forgets the bytes of these ranges, all of them in guest memory. When it returns the
    /// guest may use them again, and whatever it writes from then on must stay. It may leave
    /// ranges as they are.
    fn discard(&self, ranges: &[FreeRange]);
}

/// A balloon that is empty unless it is told otherwise.
#[derive(Debug)]
pub struct Balloon {
    free_pages: Arc<dyn FreePages>,
    /// Pages that the guest shall put into the balloon.
    target_pages: AtomicU32,
    /// Pages that it says to have put there.
    actual_pages: AtomicU32,
}

impl Balloon {
    /// A balloon whose pages, and those that the guest reports to be free, go to `free_pages`.
    pub fn new(free_pages: Arc<dyn FreePages>) -> Self {
        Self {
            free_pages,
            target_pages: AtomicU32::new(0),
            actual_pages: AtomicU32::new(0),
        }
    }

    /// Asks the guest for so many pages of 4096 bytes. The caller tells the driver by
    /// [`MmioTransport::change_config`](super::MmioTransport::change_config).
    pub fn set_target_pages(&self, pages: u32) {
        // Relaxed here and below: numbers on their own.
        self.target_pages.store(pages, Ordering::Relaxed);
    }

    /// How many pages the guest was asked for.
    pub fn target_pages(&self) -> u32 {
        self.target_pages.load(Ordering::Relaxed)
    }

    /// How many pages the guest says to have put into the balloon.
    pub fn actual_pages(&self) -> u32 {
        self.actual_pages.load(Ordering::Relaxed)
    }

    /// The ranges that a chain of reports frees: its descriptors are the free memory itself.
    fn reported(chain: Chain<'_>) -> Vec<FreeRange> {
        let memory = chain.memory();
        let free = Free::new(memory);
        let range = |descriptor: Descriptor| (descriptor.addr().0, u64::from(descriptor.len()));
        let ranges = chain.clone().filter(|d| d.is_write_only()).map(range);
        free.take(ranges)
    }

    /// The ranges that a chain puts into the balloon: its descriptors hold page numbers.
    fn inflated(chain: Chain<'_>) -> Vec<FreeRange> {
        let memory = chain.memory();
        let mut pages = Vec::new();
        for descriptor in chain.clone().filter(|d| !d.is_write_only()) {
            let count = usize::try_from(descriptor.len() / 4).unwrap_or(usize::MAX);
            let left = BALLOON_CHAIN_RANGES_MAX - pages.len();
            let mut numbers = vec![0_u8; count.min(left) * 4];
            if memory.read_slice(&mut numbers, descriptor.addr()).is_err() {
                continue;
            }
            let (numbers, _) = numbers.as_chunks::<4>();
            pages.extend(numbers.iter().map(|number| u32::from_le_bytes(*number)));
        }
        // In order, so that neighbours become one range, and each once.
        pages.sort_unstable();
        pages.dedup();
        let page = |number| (u64::from(number) * PAGE_BYTES, PAGE_BYTES);
        Free::new(memory).take(pages.into_iter().map(page))
    }
}

/// Collects what may be freed.
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

    /// The ranges that are whole pages inside the guest's memory, as far as the limits go.
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
            tracing::debug!(start, bytes, "free memory of the guest is not taken");
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
        // The one field that drivers write, as a whole.
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
                // The page is memory like any other already: zero until it is written.
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
