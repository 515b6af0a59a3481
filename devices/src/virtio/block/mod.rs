//! Disks (virtio 1.2, section 5.2).
//!
//! What a request reads or writes is copied through a buffer of the device: pages of the guest
//! must not be pinned by I/O of the host, and the host's kernel must not wait for a remote page
//! while it holds a lock of a file. Several threads do that at once, so that a request whose page is
//! remote, or whose sectors are slow, holds up no other.

mod disk;
mod request;

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vm_memory::GuestMemoryMmap;

pub use disk::{Disk, DiskError, SECTOR_BYTES};

use super::{CarriesOut, Chain, VirtioDevice, read_bytes_of};
use crate::lock;

/// Places in the ring: so many requests at once.
const QUEUE_SIZE: u16 = 128;

/// Threads that carry out requests of one disk, each with one at a time (docs/design.md, section 12).
pub(crate) const DISK_THREADS: usize = 4;

/// Longest part of a request in one piece of guest memory.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 64 << 10;
/// Most parts of a request: with header and status they fill the ring.
pub(crate) const SEGMENTS_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Most sectors that one part of a discard gives back: 1 GiB. The host finds out in its own time
/// what it has there.
const DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// Most sectors that one part of a request makes zero: 16 MiB, since it may have to write them.
const ZEROES_SECTORS_MAX: u32 = 1 << 15;
/// Most parts of such a request.
const RANGES_MAX: u32 = 16;
/// What the host stores at once: pages. Offered to the guest as the unit in which to write and
/// to discard.
const PHYSICAL_BLOCK_BYTES: u64 = 4096;

/// Bytes of configuration up to what is not offered (section 5.2.4).
const CONFIG_BYTES: usize = 60;

/// A disk of the guest.
pub struct Block {
    disk: Disk,
    name: String,
    config: [u8; CONFIG_BYTES],
    /// The driver flushes when it wants to know that something is stored. One that cannot is told
    /// of a write when that is stored. Relaxed: it changes while no request is served.
    driver_flushes: AtomicBool,
    /// That the host failed was told. Relaxed: nothing depends on it.
    warned: AtomicBool,
    /// What requests are copied through: as many as were carried out at once so far.
    buffers: Mutex<Vec<Vec<u8>>>,
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
    /// The disk with this number, from 0 on. The guest sees its name, `disk0`, as the serial number.
    pub fn new(number: usize, disk: Disk) -> Self {
        Self {
            name: format!("disk{number}"),
            config: config(&disk),
            disk,
            driver_flushes: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            buffers: Mutex::default(),
        }
    }

    /// Tells, once, that the host failed.
    fn warn(&self, action: &str, error: &std::io::Error) {
        let path = self.disk.path().display();
        if self.warned.swap(true, Ordering::Relaxed) {
            tracing::debug!(%error, name = self.name, action, "a disk failed again");
        } else {
            tracing::warn!(
                "{} ({path}) cannot {action}: {error}; the guest gets an I/O error, and more of this disk \
                 are not told",
                self.name
            );
        }
    }
}

/// What the driver reads of a disk (section 5.2.4).
fn config(disk: &Disk) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    let sector = u32::try_from(SECTOR_BYTES).unwrap_or(0);
    let blocks = PHYSICAL_BLOCK_BYTES / SECTOR_BYTES;
    put(0, &(disk.bytes() / SECTOR_BYTES).to_le_bytes());
    put(8, &SEGMENT_BYTES_MAX.to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &sector.to_le_bytes());
    // Topology: sectors of a physical block as a power of two, no offset, least good size.
    put(24, &[u8::try_from(blocks.ilog2()).unwrap_or(0), 0]);
    put(26, &u16::try_from(blocks).unwrap_or(1).to_le_bytes());
    put(36, &DISCARD_SECTORS_MAX.to_le_bytes());
    put(40, &RANGES_MAX.to_le_bytes());
    put(44, &u32::try_from(blocks).unwrap_or(1).to_le_bytes());
    put(48, &ZEROES_SECTORS_MAX.to_le_bytes());
    put(52, &RANGES_MAX.to_le_bytes());
    // What is made zero may be given back to the host.
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
}

impl CarriesOut for Block {
    fn threads(&self) -> usize {
        DISK_THREADS
    }

    /// A flush stores all that is written by then, which is all whose chain was given back.
    fn carry_out(&self, chain: &Chain<'_>, memory: &GuestMemoryMmap) -> u32 {
        let mut buffer = lock(&self.buffers).pop().unwrap_or_default();
        let written = self.answer(chain, memory, &mut buffer);
        lock(&self.buffers).push(buffer);
        written
    }
}

#[cfg(test)]
mod at_once_tests;
#[cfg(test)]
#[path = "tests.rs"]
mod tests;
