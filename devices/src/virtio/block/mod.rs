//! Disks (virtio 1.2, section 5.2).
//!
//! Data is copied through a buffer of the device: guest pages must not be pinned by host I/O, and
//! the host's kernel must not wait for a remote page while it holds a lock of a file. Several
//! threads serve requests at once, so that one whose page is remote, or whose sectors are slow,
//! delays no other.

mod disk;
mod request;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vm_memory::GuestMemoryMmap;

pub use disk::{Disk, DiskError, SECTOR_BYTES};

use super::{CarriesOut, Chain, RateLimiter, VirtioDevice, read_bytes_of};
use crate::lock;

/// Ring size: the limit of pending requests.
const QUEUE_SIZE: u16 = 128;

/// Threads that serve one disk, each with one request at a time (docs/devices.md).
pub(crate) const DISK_THREADS: usize = 4;

/// Longest part of a request in one piece of guest memory.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 64 << 10;
/// Limit of parts per request: with header and status they fill the ring.
pub(crate) const SEGMENTS_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Limit of sectors in one part of a discard: 1 GiB. The host needs time to look up its extents.
const DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// Limit of sectors in one part of a write-zeroes request: 16 MiB, since they may have to be
/// written.
const ZEROES_SECTORS_MAX: u32 = 1 << 15;
/// Limit of parts of such a request.
const RANGES_MAX: u32 = 16;
/// The host's unit of storage: pages. Advertised to the guest as its unit for writes and discards.
const PHYSICAL_BLOCK_BYTES: u64 = 4096;

/// The one direction of its limits.
const LANE: usize = 0;

/// Bytes of configuration, up to the fields that are not offered (section 5.2.4).
const CONFIG_BYTES: usize = 60;

/// A disk of the guest.
pub struct Block {
    disk: Disk,
    name: String,
    config: [u8; CONFIG_BYTES],
    /// The driver flushes explicitly (VIRTIO_BLK_F_FLUSH). Otherwise a write completes when it is
    /// stored. Relaxed: it changes only while no request is served.
    driver_flushes: AtomicBool,
    /// Whether a failure of the host was reported. Relaxed: nothing depends on it.
    warned: AtomicBool,
    /// Buffers that requests are copied through: as many as were in use at once so far.
    buffers: Mutex<Vec<Vec<u8>>>,
    limiter: Option<Arc<RateLimiter>>,
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("name", &self.name)
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

impl Block {
    /// Creates the disk with this number, from 0. The guest sees its name, `disk0`, as the serial
    /// number.
    pub fn new(number: usize, disk: Disk) -> Self {
        Self {
            name: format!("disk{number}"),
            config: config(&disk),
            disk,
            driver_flushes: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            buffers: Mutex::default(),
            limiter: None,
        }
    }

    /// Limits its rate; reads and writes count together.
    #[must_use]
    pub fn limited(self, limiter: Arc<RateLimiter>) -> Self {
        Self {
            limiter: Some(limiter),
            ..self
        }
    }

    /// Counts a request, or bytes of one, against its limits.
    fn count(&self, operations: u64, bytes: u64) {
        if let Some(limiter) = &self.limiter {
            limiter.take(LANE, operations, bytes);
        }
    }

    /// Reports the first failure of the host as a warning, further ones at debug level.
    fn warn(&self, action: &str, error: &std::io::Error) {
        let path = self.disk.path().display();
        if self.warned.swap(true, Ordering::Relaxed) {
            tracing::debug!(%error, name = self.name, action, "a disk failed again");
        } else {
            tracing::warn!(
                "{} ({path}) cannot {action}: {error}; the guest gets an I/O error; further errors \
                 on this disk are logged at debug",
                self.name
            );
        }
    }
}

/// The configuration that the driver reads (section 5.2.4).
fn config(disk: &Disk) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    let sector = u32::try_from(SECTOR_BYTES).unwrap_or(0);
    let blocks = PHYSICAL_BLOCK_BYTES / SECTOR_BYTES;
    put(0, &(disk.bytes() / SECTOR_BYTES).to_le_bytes());
    put(8, &SEGMENT_BYTES_MAX.to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &sector.to_le_bytes());
    // Topology: sectors per physical block as a power of two, no offset, smallest efficient size.
    put(24, &[u8::try_from(blocks.ilog2()).unwrap_or(0), 0]);
    put(26, &u16::try_from(blocks).unwrap_or(1).to_le_bytes());
    put(36, &DISCARD_SECTORS_MAX.to_le_bytes());
    put(40, &RANGES_MAX.to_le_bytes());
    put(44, &u32::try_from(blocks).unwrap_or(1).to_le_bytes());
    put(48, &ZEROES_SECTORS_MAX.to_le_bytes());
    put(52, &RANGES_MAX.to_le_bytes());
    // Zeroed ranges may be deallocated.
    put(56, &[1]);
    config
}

impl VirtioDevice for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let always = (1 << VIRTIO_BLK_F_SIZE_MAX)
            | (1 << VIRTIO_BLK_F_SEG_MAX)
            | (1 << VIRTIO_BLK_F_BLK_SIZE)
            | (1 << VIRTIO_BLK_F_TOPOLOGY);
        let kind = if self.disk.is_read_only() {
            1 << VIRTIO_BLK_F_RO
        } else {
            (1 << VIRTIO_BLK_F_FLUSH)
                | (1 << VIRTIO_BLK_F_DISCARD)
                | (1 << VIRTIO_BLK_F_WRITE_ZEROES)
        };
        always | kind
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_bytes_of(&self.config, offset, data);
    }

    fn start(&self, features: u64) {
        let flushes = features & (1 << VIRTIO_BLK_F_FLUSH) != 0;
        self.driver_flushes.store(flushes, Ordering::Relaxed);
    }

    fn on_threads(&self) -> Option<&dyn CarriesOut> {
        Some(self)
    }

    fn waits_for_host(&self) -> bool {
        self.disk.is_at_work()
    }

    fn timer(&self) -> Option<BorrowedFd<'_>> {
        self.limiter.as_ref().map(|limiter| limiter.timer())
    }

    fn timer_expired(&self) {
        if let Some(limiter) = &self.limiter {
            limiter.has_expired();
        }
    }
}

impl CarriesOut for Block {
    fn threads(&self) -> usize {
        DISK_THREADS
    }

    fn may_begin(&self) -> bool {
        let limiter = self.limiter.as_ref();
        limiter.is_none_or(|limiter| limiter.may_begin(LANE))
    }

    /// A flush covers every write whose chain was returned before.
    fn carry_out(&self, chain: &Chain<'_>, memory: &GuestMemoryMmap) -> u32 {
        self.count(1, 0);
        let mut buffer = lock(&self.buffers).pop().unwrap_or_default();
        let written = self.answer(chain, memory, &mut buffer);
        lock(&self.buffers).push(buffer);
        written
    }
}

#[cfg(test)]
mod at_once_tests;
#[cfg(test)]
mod tests;
