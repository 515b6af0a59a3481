//! The memory device under a guest that does anything and a user who changes the requested size,
//! with memory that is not always available.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use arbitrary::{Arbitrary, Result, Unstructured};
use vm_memory::{Bytes, GuestAddress};

use super::virtio::{Peer, session};
use crate::lock;
use crate::virtio::test_driver::Driver;
use crate::virtio::{FreeRange, MEM_BLOCK_BYTES, Mem, MemRegion, NotNow, Pluggable};

/// More than one word of blocks, and not a multiple of it.
const BLOCKS: u64 = 100;
const REGION: MemRegion = MemRegion {
    start: 1 << 32,
    bytes: BLOCKS * MEM_BLOCK_BYTES,
    node: Some(1),
};

/// Where the configuration has the sizes (virtio 1.2, section 5.15.4).
const PLUGGED_BYTES: u64 = 40;
const REQUESTED_BYTES: u64 = 48;

/// Types of requests, and of the response to a successful one (section 5.15.6).
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;
const ACK: u16 = 0;
const BUSY: u16 = 2;
const PLUGGED: u16 = 0;
const UNPLUGGED: u16 = 1;
const MIXED: u16 = 2;

/// The blocks that have memory: the device's state must match.
#[derive(Debug, Default)]
struct Blocks {
    plugged: Mutex<BTreeSet<u64>>,
    /// Which of the next 8 plugs and unplugs fail: a bit for each.
    fails: AtomicU8,
}

impl Blocks {
    /// The numbers of blocks, all of which are in the region.
    fn numbers(blocks: FreeRange) -> std::ops::Range<u64> {
        let offset = blocks.start.0.checked_sub(REGION.start);
        let offset = offset.expect("it begins in the region");
        assert!(
            offset.is_multiple_of(MEM_BLOCK_BYTES) && blocks.bytes.is_multiple_of(MEM_BLOCK_BYTES),
            "{blocks:?} is not whole blocks"
        );
        let (first, count) = (offset / MEM_BLOCK_BYTES, blocks.bytes / MEM_BLOCK_BYTES);
        assert!(count > 0 && count <= BLOCKS - first, "{blocks:?}");
        first..first + count
    }

    fn try_now(&self) -> std::result::Result<(), NotNow> {
        // Only the thread of the test is here.
        let fails = self.fails.load(Ordering::Relaxed);
        self.fails.store(fails >> 1, Ordering::Relaxed);
        if fails & 1 == 0 { Ok(()) } else { Err(NotNow) }
    }
}

impl Pluggable for Blocks {
    fn plug(&self, blocks: FreeRange) -> std::result::Result<(), NotNow> {
        let numbers = Self::numbers(blocks);
        self.try_now()?;
        for block in numbers {
            assert!(lock(&self.plugged).insert(block), "{block} was plugged");
        }
        Ok(())
    }

    fn unplug(&self, blocks: FreeRange) -> std::result::Result<(), NotNow> {
        let numbers = Self::numbers(blocks);
        self.try_now()?;
        for block in numbers {
            let was = lock(&self.plugged).remove(&block);
            assert!(was, "{block} was not plugged");
        }
        Ok(())
    }
}

/// The user, who requests sizes, and the memory, which is not always available.
struct User(Arc<Blocks>);

impl Peer<Mem> for User {
    fn header(&mut self, data: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        let [kind, wrong, count] = <[u8; 3]>::arbitrary(data)?;
        let first = u8::arbitrary(data)?;
        let kind = match kind {
            240.. => u16::arbitrary(data)?,
            _ => u16::from(kind % 4),
        };
        let address = match wrong {
            255 => u64::arbitrary(data)?,
            // Not at the start of a block.
            250..255 => REGION.start + u64::from(first) * 4096,
            // Up to some blocks beyond the region.
            _ => REGION.start + u64::from(first % 104) * MEM_BLOCK_BYTES,
        };
        let count = match count {
            250.. => u16::arbitrary(data)?,
            _ => u16::from(count % 16),
        };
        Ok(request(kind, address, count))
    }

    fn host(&mut self, driver: &Driver<Mem>, what: u8, value: u32) {
        if what.is_multiple_of(4) {
            self.0.fails.store(what / 4, Ordering::Relaxed);
            return;
        }
        // Mostly up to a little more than there is.
        let bytes = match what {
            255 => u64::from(value) << 20,
            _ => u64::from(value % 110) * MEM_BLOCK_BYTES + u64::from(what),
        };
        let change = || driver.device.set_requested_bytes(bytes);
        driver.transport.change_config(change);
        check(driver, &self.0);
    }
}

fn request(kind: u16, address: u64, count: u16) -> Vec<u8> {
    let mut request = vec![0; 24];
    request[..2].copy_from_slice(&kind.to_le_bytes());
    request[8..16].copy_from_slice(&address.to_le_bytes());
    request[16..18].copy_from_slice(&count.to_le_bytes());
    request
}

/// The sizes that the driver reads are right and within bounds.
fn check(driver: &Driver<Mem>, blocks: &Blocks) {
    let config = |at: u64| {
        let half = |at| u64::from(driver.get(0x100 + at));
        half(at) | half(at + 4) << 32
    };
    let plugged = lock(&blocks.plugged).len() as u64 * MEM_BLOCK_BYTES;
    assert_eq!(config(PLUGGED_BYTES), plugged);
    assert_eq!(driver.device.plugged_bytes(), plugged);
    let requested = config(REQUESTED_BYTES);
    assert!(requested <= REGION.bytes && requested.is_multiple_of(MEM_BLOCK_BYTES));
}

/// Sends a request as Linux does; returns the response and its state.
fn ask(driver: &Driver<Mem>, kind: u16, first: u64, count: u16) -> (u16, u16) {
    let (from, to) = (GuestAddress(0x40_0000), GuestAddress(0x50_0000));
    let bytes = request(kind, REGION.start + first * MEM_BLOCK_BYTES, count);
    driver.memory.write_slice(&bytes, from).expect("memory");
    let before = driver.used(0);
    driver.offer(0, 0, &[(from.0, 24, false), (to.0, 10, true)]);
    driver.serve(0);
    assert_eq!(driver.used(0), before.wrapping_add(1), "it is answered");
    let read = |place| driver.memory.read_obj(place).expect("memory");
    (read(to), read(GuestAddress(to.0 + 8)))
}

pub(super) fn mem(input: &[u8]) {
    let blocks = Arc::new(Blocks::default());
    let driver = Driver::of(Mem::new(REGION, Arc::clone(&blocks) as _));
    driver.device.set_requested_bytes(REGION.bytes / 2);
    let mut user = User(Arc::clone(&blocks));
    session(&driver, &mut Unstructured::new(input), &mut user);
    check(&driver, &blocks);
    // A correct driver finds out what is plugged, and unplugs it.
    for (first, count) in [(0, 1), (62, 4), (0, 100)] {
        let there = |block: &u64| lock(&blocks.plugged).contains(block);
        let due = match (first..first + u64::from(count)).filter(there).count() {
            0 => UNPLUGGED,
            plugged if plugged == usize::from(count) => PLUGGED,
            _ => MIXED,
        };
        assert_eq!(ask(&driver, STATE, first, count), (ACK, due));
    }
    let mut tries = 0;
    while ask(&driver, UNPLUG_ALL, 0, 0).0 == BUSY {
        tries += 1;
        assert!(tries <= u8::BITS, "it stays busy");
    }
    assert!(lock(&blocks.plugged).is_empty());
    check(&driver, &blocks);
}
