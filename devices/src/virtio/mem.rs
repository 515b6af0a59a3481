//! Memory that is plugged and unplugged while the guest runs (virtio 1.2, section 5.15): a region
//! of guest addresses, divided into blocks that are plugged or unplugged. The monitor requests a
//! size; the guest's driver plugs and unplugs blocks until it has that size.
//!
//! The memory of blocks comes from a [`Pluggable`], which also decides what happens when a guest
//! touches an unplugged block.

use std::fmt;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ids::VIRTIO_ID_MEM;

use super::{BrokenRing, Buffers, Chain, FreeRange, Ring, VirtioDevice, read_bytes_of};
use crate::lock;
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Bytes of a block: what one page-directory entry maps, and therefore the least that Linux plugs.
pub const MEM_BLOCK_BYTES: u64 = 2 << 20;

/// Limit of blocks in one request: 2 GiB, the largest memory block of Linux on x86, which is what
/// its driver plugs at once. The specification has no limit and no response for exceeding one; an
/// error is the response after which a driver does not retry forever.
const REQUEST_BLOCKS_MAX: u16 = 1024;

/// How many blocks are unplugged at once by a request to unplug all.
const UNPLUG_ALL_BLOCKS: u64 = 32;

/// How long such a request may unplug before other requests are served; it continues afterwards.
const UNPLUG_ALL_TIME: Duration = Duration::from_millis(100);

/// Feature: the configuration has the NUMA node of the region.
const ACPI_PXM: u64 = 1 << 0;
/// Feature: the driver must not even read unplugged blocks.
const UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;

/// Types of requests (section 5.15.6).
const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

/// Types of responses.
const ACK: u16 = 0;
const NACK: u16 = 1;
const BUSY: u16 = 2;
const ERROR: u16 = 3;

/// States of blocks, in the response to [`STATE`].
const PLUGGED: u16 = 0;
const UNPLUGGED: u16 = 1;
const MIXED: u16 = 2;

/// Bytes of a request: its type, and the address and number of the blocks.
const REQUEST_BYTES: usize = 24;
/// Bytes of a response: its type and a state.
const RESPONSE_BYTES: usize = 10;
/// Bytes of the configuration (section 5.15.4).
const CONFIG_BYTES: usize = 56;

/// Why blocks keep their state for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotNow;

/// Provides the memory of blocks. Both calls are limited in time, below the limits of a pause and
/// of the end of a run, since the device runs them in one turn.
pub trait Pluggable: Send + Sync + fmt::Debug {
    /// Gives memory to blocks that have none. It is zero until written, or has what the guest wrote
    /// there before they were unplugged: a driver must not expect either (section 5.15.6).
    ///
    /// # Errors
    ///
    /// Fails when there is no memory now; all blocks then keep their state.
    fn plug(&self, blocks: FreeRange) -> Result<(), NotNow>;

    /// Takes the memory of blocks back; their contents may be lost.
    ///
    /// # Errors
    ///
    /// Fails when that is not possible now; all blocks then keep their memory, and may have lost
    /// their contents.
    fn unplug(&self, blocks: FreeRange) -> Result<(), NotNow>;
}

/// The region's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemRegion {
    /// The first address, a multiple of the block size.
    pub start: u64,
    /// The length in bytes: whole blocks, at least one.
    pub bytes: u64,
    /// Its NUMA node, if the guest sees nodes.
    pub node: Option<u16>,
}

/// A memory device, with all blocks unplugged at first.
#[derive(Debug)]
pub struct Mem {
    region: MemRegion,
    memory: Arc<dyn Pluggable>,
    /// One bit per block: whether it is plugged. Locked while a request is served.
    plugged: Mutex<Vec<u64>>,
    // Relaxed, both: independent numbers, written only under the lock or before the driver is
    // notified.
    plugged_bytes: AtomicU64,
    requested_bytes: AtomicU64,
}

impl Mem {
    /// Creates a device for this region, with the memory of `memory`.
    ///
    /// # Panics
    ///
    /// Panics when the region is not whole blocks.
    pub fn new(region: MemRegion, memory: Arc<dyn Pluggable>) -> Self {
        let MemRegion { start, bytes, .. } = region;
        assert!(
            bytes > 0
                && start.is_multiple_of(MEM_BLOCK_BYTES)
                && bytes.is_multiple_of(MEM_BLOCK_BYTES)
                && start.checked_add(bytes).is_some(),
            "a region of {bytes} bytes at {start:#x}"
        );
        let words = usize::try_from((bytes / MEM_BLOCK_BYTES).div_ceil(64)).unwrap_or(0);
        Self {
            region,
            memory,
            plugged: Mutex::new(vec![0; words]),
            plugged_bytes: AtomicU64::new(0),
            requested_bytes: AtomicU64::new(0),
        }
    }

    /// Requests that the guest has this much plugged, rounded to whole blocks and limited to the
    /// region. The caller notifies the driver through
    /// [`MmioTransport::change_config`](super::MmioTransport::change_config).
    pub fn set_requested_bytes(&self, bytes: u64) {
        let bytes = bytes.min(self.region.bytes);
        let whole = bytes - bytes % MEM_BLOCK_BYTES;
        self.requested_bytes.store(whole, Ordering::Relaxed);
    }

    /// How much the guest was asked to have plugged.
    pub fn requested_bytes(&self) -> u64 {
        self.requested_bytes.load(Ordering::Relaxed)
    }

    /// How much is plugged.
    pub fn plugged_bytes(&self) -> u64 {
        self.plugged_bytes.load(Ordering::Relaxed)
    }

    /// The region's place.
    pub fn region(&self) -> MemRegion {
        self.region
    }

    /// Serves a request and returns the type of the response and its state. `None` when the request
    /// continues in the next turn.
    fn carry_out(&self, request: &[u8; REQUEST_BYTES]) -> Option<(u16, u16)> {
        let u16_at = |at: usize| u16::from_le_bytes([request[at], request[at + 1]]);
        let mut address = [0; 8];
        address.copy_from_slice(&request[8..16]);
        let kind = u16_at(0);
        let mut plugged = lock(&self.plugged);
        if kind == UNPLUG_ALL {
            return Some((self.unplug_all(&mut plugged)?, 0));
        }
        let count = u16_at(16);
        let Some(blocks) = self.blocks(u64::from_le_bytes(address), count) else {
            return Some((ERROR, 0));
        };
        let state = state_of(&plugged, &blocks);
        Some(match (kind, state) {
            (STATE, state) => (ACK, state),
            (PLUG | UNPLUG, _) if count > REQUEST_BLOCKS_MAX => (ERROR, 0),
            (PLUG, UNPLUGGED) => (self.plug(&mut plugged, &blocks), 0),
            (UNPLUG, PLUGGED) => (self.unplug(&mut plugged, &blocks), 0),
            // Another type, or blocks in a state that the request does not apply to.
            _ => (ERROR, 0),
        })
    }

    /// The block numbers of a request; `None` when they are empty or outside the region.
    fn blocks(&self, address: u64, count: u16) -> Option<std::ops::Range<u64>> {
        let offset = address.checked_sub(self.region.start)?;
        let first = offset / MEM_BLOCK_BYTES;
        let end = first.checked_add(u64::from(count))?;
        let inside = offset.is_multiple_of(MEM_BLOCK_BYTES)
            && count > 0
            && end <= self.region.bytes / MEM_BLOCK_BYTES;
        inside.then_some(first..end)
    }

    fn range(&self, blocks: &std::ops::Range<u64>) -> FreeRange {
        FreeRange {
            start: GuestAddress(self.region.start + blocks.start * MEM_BLOCK_BYTES),
            bytes: (blocks.end - blocks.start) * MEM_BLOCK_BYTES,
        }
    }

    fn plug(&self, plugged: &mut [u64], blocks: &std::ops::Range<u64>) -> u16 {
        let range = self.range(blocks);
        if self.plugged_bytes() + range.bytes > self.requested_bytes() {
            // The driver then reads the configuration again.
            return NACK;
        }
        if self.memory.plug(range).is_err() {
            return BUSY;
        }
        blocks.clone().for_each(|block| set(plugged, block, true));
        self.plugged_bytes.fetch_add(range.bytes, Ordering::Relaxed);
        ACK
    }

    fn unplug(&self, plugged: &mut [u64], blocks: &std::ops::Range<u64>) -> u16 {
        let range = self.range(blocks);
        if self.memory.unplug(range).is_err() {
            return BUSY;
        }
        blocks.clone().for_each(|block| set(plugged, block, false));
        self.plugged_bytes.fetch_sub(range.bytes, Ordering::Relaxed);
        ACK
    }

    /// Unplugs plugged blocks, a few at once, for at most one turn; `None` when some remain.
    /// Unplugged blocks stay unplugged. When blocks cannot be unplugged, the response is busy, and
    /// the driver retries.
    fn unplug_all(&self, plugged: &mut [u64]) -> Option<u16> {
        let begun = Instant::now();
        let end = self.region.bytes / MEM_BLOCK_BYTES;
        let mut block = 0;
        while let Some(first) = (block..end).find(|block| get(plugged, *block)) {
            if block > 0 && begun.elapsed() >= UNPLUG_ALL_TIME {
                return None;
            }
            let most = end.min(first + UNPLUG_ALL_BLOCKS);
            let after = (first..most).find(|block| !get(plugged, *block));
            block = after.unwrap_or(most);
            if self.unplug(plugged, &(first..block)) != ACK {
                return Some(BUSY);
            }
        }
        Some(ACK)
    }

    /// Serves the request of a chain and returns how many bytes were written to it, or `None` when
    /// the request continues in the next turn.
    fn answer(&self, chain: &Chain<'_>, memory: &GuestMemoryMmap) -> Option<u32> {
        let Some(mut buffers) = Buffers::of(chain, memory) else {
            return Some(0);
        };
        if buffers.to_driver.available_bytes() < RESPONSE_BYTES {
            // There is no room for the response, so the request must have no effect.
            return Some(0);
        }
        let mut request = [0; REQUEST_BYTES];
        let (kind, state) = match buffers.from_driver.read_exact(&mut request) {
            Ok(()) => self.carry_out(&request)?,
            Err(_) => (ERROR, 0),
        };
        let mut response = [0; RESPONSE_BYTES];
        response[..2].copy_from_slice(&kind.to_le_bytes());
        response[8..].copy_from_slice(&state.to_le_bytes());
        Some(match buffers.to_driver.write_all(&response) {
            Ok(()) => u32::try_from(RESPONSE_BYTES).unwrap_or(0),
            Err(_) => 0,
        })
    }
}

fn get(plugged: &[u64], block: u64) -> bool {
    let word = usize::try_from(block / 64)
        .ok()
        .and_then(|at| plugged.get(at));
    word.is_some_and(|word| word >> (block % 64) & 1 == 1)
}

fn set(plugged: &mut [u64], block: u64, on: bool) {
    let at = usize::try_from(block / 64).unwrap_or(usize::MAX);
    if let Some(word) = plugged.get_mut(at) {
        *word = *word & !(1 << (block % 64)) | u64::from(on) << (block % 64);
    }
}

fn state_of(plugged: &[u64], blocks: &std::ops::Range<u64>) -> u16 {
    let count = blocks.clone().filter(|block| get(plugged, *block)).count() as u64;
    match count {
        0 => UNPLUGGED,
        count if count == blocks.end - blocks.start => PLUGGED,
        _ => MIXED,
    }
}

impl VirtioDevice for Mem {
    fn name(&self) -> &str {
        "mem"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_MEM
    }

    fn features(&self) -> u64 {
        UNPLUGGED_INACCESSIBLE | self.region.node.map_or(0, |_| ACPI_PXM)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[128]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; CONFIG_BYTES];
        let node = self.region.node.unwrap_or(0);
        let mut put = |at: usize, value: u64| {
            config[at..at + 8].copy_from_slice(&value.to_le_bytes());
        };
        put(0, MEM_BLOCK_BYTES);
        put(8, node.into());
        put(16, self.region.start);
        put(24, self.region.bytes);
        // The whole region is usable at any time.
        put(32, self.region.bytes);
        put(40, self.plugged_bytes());
        put(48, self.requested_bytes());
        read_bytes_of(&config, offset, data);
    }

    fn serve(&self, _queue: usize, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = ring.memory();
        let Some(chain) = ring.next_chain()? else {
            return Ok(false);
        };
        match self.answer(&chain, memory) {
            Some(written) => ring.used(chain.head_index(), written)?,
            // The chain is read again in the next turn and finds fewer plugged blocks. Until then
            // the device can be paused, reset and stopped.
            None => ring.put_back(1),
        }
        Ok(true)
    }

    // A reset keeps the state of blocks (section 5.15.6.2): a driver that starts again unplugs the
    // blocks that it does not know.
}

#[cfg(test)]
#[path = "mem_tests.rs"]
mod tests;
