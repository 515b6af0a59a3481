//! Tests of requests to the memory device.

use std::collections::BTreeSet;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestMemoryBackend};

use super::*;
use crate::virtio::test_driver::{Driver, STARTED};

const REGION: MemRegion = MemRegion {
    start: 1 << 32,
    bytes: 100 * MEM_BLOCK_BYTES,
    node: Some(3),
};

/// Memory that tracks plugged blocks, and panics on requests that do not match.
#[derive(Debug, Default)]
struct Blocks {
    plugged: Mutex<BTreeSet<u64>>,
    busy: std::sync::atomic::AtomicBool,
    /// Whether unplugging takes the time of a whole turn.
    slow: std::sync::atomic::AtomicBool,
}

impl Blocks {
    fn numbers(blocks: FreeRange) -> std::ops::Range<u64> {
        let first = (blocks.start.0 - REGION.start) / MEM_BLOCK_BYTES;
        assert_eq!(blocks.bytes % MEM_BLOCK_BYTES, 0);
        first..first + blocks.bytes / MEM_BLOCK_BYTES
    }

    fn is_busy(&self) -> Result<(), NotNow> {
        match self.busy.load(Ordering::Relaxed) {
            true => Err(NotNow),
            false => Ok(()),
        }
    }
}

impl Pluggable for Blocks {
    fn plug(&self, blocks: FreeRange) -> Result<(), NotNow> {
        self.is_busy()?;
        for block in Self::numbers(blocks) {
            assert!(lock(&self.plugged).insert(block), "{block} was plugged");
        }
        Ok(())
    }

    fn unplug(&self, blocks: FreeRange) -> Result<(), NotNow> {
        self.is_busy()?;
        let begun = Instant::now();
        while self.slow.load(Ordering::Relaxed) && begun.elapsed() < UNPLUG_ALL_TIME {
            std::thread::yield_now();
        }
        for block in Self::numbers(blocks) {
            assert!(
                lock(&self.plugged).remove(&block),
                "{block} was not plugged"
            );
        }
        Ok(())
    }
}

struct Guest {
    driver: Driver<Mem>,
    blocks: Arc<Blocks>,
}

impl Guest {
    fn started() -> Self {
        Self::with(REGION)
    }

    fn with(region: MemRegion) -> Self {
        let blocks = Arc::new(Blocks::default());
        let driver = Driver::of(Mem::new(region, Arc::clone(&blocks) as _));
        driver.start(driver.offered());
        assert_eq!((driver.get(8), driver.get(0x70)), (24, STARTED));
        Self { driver, blocks }
    }

    /// Sends a request as Linux does; returns the response and its state.
    fn request(&self, kind: u16, address: u64, count: u16) -> (u16, u16) {
        self.offer(kind, address, count);
        self.driver.serve(0);
        self.response()
    }

    fn offer(&self, kind: u16, address: u64, count: u16) {
        let mut request = vec![0; REQUEST_BYTES];
        request[..2].copy_from_slice(&kind.to_le_bytes());
        request[8..16].copy_from_slice(&address.to_le_bytes());
        request[16..18].copy_from_slice(&count.to_le_bytes());
        let memory = &self.driver.memory;
        memory
            .write_slice(&request, GuestAddress(0x40_0000))
            .unwrap();
        self.driver
            .offer(0, 0, &[(0x40_0000, 24, false), (0x50_0000, 10, true)]);
    }

    fn response(&self) -> (u16, u16) {
        assert_eq!(self.driver.last_used(0), (0, 10));
        let read = |at: u64| {
            self.driver
                .memory
                .read_obj::<u16>(GuestAddress(0x50_0000 + at))
                .unwrap()
        };
        (read(0), read(8))
    }

    fn blocks(&self, kind: u16, first: u64, count: u16) -> u16 {
        self.request(kind, REGION.start + first * MEM_BLOCK_BYTES, count)
            .0
    }

    fn config(&self, at: u64) -> u64 {
        u64::from(self.driver.get(0x100 + at)) | u64::from(self.driver.get(0x104 + at)) << 32
    }
}

#[test]
fn the_configuration_has_what_the_driver_looks_for() {
    let guest = Guest::started();
    assert_eq!(guest.driver.offered() & 0b11, 0b11);
    let fields = [0, 8, 16, 24, 32, 40, 48].map(|at| guest.config(at));
    let size = REGION.bytes;
    assert_eq!(fields, [2 << 20, 3, 1 << 32, size, size, 0, 0]);
    let device = &guest.driver.device;
    let change = || device.set_requested_bytes(5 * MEM_BLOCK_BYTES + 1);
    guest.driver.transport.change_config(change);
    assert_eq!(guest.driver.get(0x60), 2, "configuration change");
    assert_eq!(guest.config(48), 5 * MEM_BLOCK_BYTES);
    guest.driver.device.set_requested_bytes(u64::MAX);
    assert_eq!(guest.config(48), REGION.bytes);
    let flat = Mem::new(
        MemRegion {
            node: None,
            ..REGION
        },
        guest.blocks.clone(),
    );
    assert_eq!(flat.features(), UNPLUGGED_INACCESSIBLE);
}

#[test]
fn blocks_are_plugged_up_to_what_is_requested_and_unplugged() {
    let guest = Guest::started();
    assert_eq!(guest.blocks(PLUG, 0, 1), NACK, "nothing is requested");
    guest
        .driver
        .device
        .set_requested_bytes(10 * MEM_BLOCK_BYTES);
    assert_eq!(guest.blocks(PLUG, 60, 8), ACK);
    assert_eq!(guest.blocks(PLUG, 0, 3), NACK, "too many");
    assert_eq!(guest.blocks(PLUG, 67, 2), ERROR, "one is plugged");
    assert_eq!(guest.blocks(PLUG, 98, 2), ACK, "the last ones");
    assert_eq!(guest.driver.device.plugged_bytes(), 10 * MEM_BLOCK_BYTES);
    assert_eq!(guest.config(40), 10 * MEM_BLOCK_BYTES);
    let state =
        |first: u64, count| guest.request(STATE, REGION.start + first * MEM_BLOCK_BYTES, count);
    assert_eq!(state(60, 8), (ACK, PLUGGED));
    assert_eq!(state(0, 60), (ACK, UNPLUGGED));
    assert_eq!(state(59, 2), (ACK, MIXED));
    assert_eq!(guest.blocks(UNPLUG, 59, 2), ERROR, "one is not plugged");
    assert_eq!(guest.blocks(UNPLUG, 62, 2), ACK);
    assert_eq!(
        *lock(&guest.blocks.plugged),
        [60, 61, 64, 65, 66, 67, 98, 99].into()
    );
    // A driver that starts again finds them, and unplugs them.
    guest.driver.clear_rings();
    guest.driver.start(guest.driver.offered());
    assert_eq!(guest.config(40), 8 * MEM_BLOCK_BYTES);
    assert_eq!(guest.request(UNPLUG_ALL, 0, 0), (ACK, 0));
    assert_eq!(guest.driver.device.plugged_bytes(), 0);
    assert!(lock(&guest.blocks.plugged).is_empty());
    assert_eq!(guest.request(UNPLUG_ALL, 7, 7), (ACK, 0), "nothing is left");
}

#[test]
fn unplugging_everything_is_many_turns_of_the_device_and_one_answer() {
    let guest = Guest::started();
    let device = &guest.driver.device;
    device.set_requested_bytes(REGION.bytes);
    assert_eq!(guest.blocks(PLUG, 0, 100), ACK);
    assert_eq!(guest.blocks(UNPLUG, 40, 2), ACK);
    let answers = guest.driver.used(0);
    guest.blocks.slow.store(true, Ordering::Relaxed);
    guest.offer(UNPLUG_ALL, 0, 0);
    let turn = || guest.driver.transport.serve_while(0, &|| false);
    // 0 to 31, then 32 to 39, and so on.
    for left in [66, 58, 26] {
        turn();
        assert_eq!(device.plugged_bytes(), left * MEM_BLOCK_BYTES);
        assert_eq!(guest.config(40), left * MEM_BLOCK_BYTES);
        assert_eq!(guest.driver.used(0), answers, "it is not answered yet");
    }
    // What exceeds one turn is done in the next.
    turn();
    assert_eq!(
        (guest.response(), guest.driver.used(0)),
        ((ACK, 0), answers + 1)
    );
    assert_eq!(device.plugged_bytes(), 0);
}

#[test]
fn a_reset_ends_the_unplugging_of_everything_and_leaves_the_rest_plugged() {
    let guest = Guest::started();
    guest.driver.device.set_requested_bytes(REGION.bytes);
    assert_eq!(guest.blocks(PLUG, 0, 100), ACK);
    guest.blocks.slow.store(true, Ordering::Relaxed);
    guest.offer(UNPLUG_ALL, 0, 0);
    guest.driver.transport.serve_while(0, &|| false);
    guest.driver.set(0x70, 0);
    guest.driver.clear_rings();
    guest.driver.start(guest.driver.offered());
    guest.driver.serve(0);
    assert_eq!(guest.config(40), 68 * MEM_BLOCK_BYTES);
    guest.blocks.slow.store(false, Ordering::Relaxed);
    assert_eq!(guest.request(UNPLUG_ALL, 0, 0), (ACK, 0));
    assert_eq!(guest.config(40), 0);
}

#[test]
fn a_request_has_no_more_blocks_than_linux_plugs_at_once() {
    const REGION: MemRegion = MemRegion {
        bytes: 1100 * MEM_BLOCK_BYTES,
        ..super::tests::REGION
    };
    let guest = Guest::with(REGION);
    guest.driver.device.set_requested_bytes(REGION.bytes);
    assert_eq!(guest.blocks(PLUG, 0, 1025), ERROR);
    assert_eq!(guest.blocks(PLUG, 0, 1024), ACK);
    assert_eq!(guest.blocks(PLUG, 1024, 76), ACK);
    assert_eq!(guest.blocks(UNPLUG, 0, 1025), ERROR);
    assert_eq!(guest.request(STATE, REGION.start, 1100), (ACK, PLUGGED));
    assert_eq!(guest.blocks(UNPLUG, 50, 1024), ACK);
}

#[test]
fn what_is_no_block_of_the_region_is_an_error() {
    let guest = Guest::started();
    guest.driver.device.set_requested_bytes(REGION.bytes);
    let start = REGION.start;
    for (kind, address, count) in [
        (PLUG, start, 0),
        (PLUG, start + 4096, 1),
        (PLUG, start - MEM_BLOCK_BYTES, 1),
        (PLUG, start + REGION.bytes, 1),
        (PLUG, start, 101),
        (PLUG, 0, 1),
        (PLUG, u64::MAX - 0xf_ffff, u16::MAX),
        (UNPLUG, start, 1),
        (STATE, start + 1, 1),
        (4, start, 1),
        (u16::MAX, start, 1),
    ] {
        assert_eq!(
            guest.request(kind, address, count),
            (ERROR, 0),
            "{kind} {address:#x} {count}"
        );
    }
    assert!(lock(&guest.blocks.plugged).is_empty());
}

#[test]
fn memory_that_is_busy_leaves_blocks_as_they_are() {
    let guest = Guest::started();
    guest.driver.device.set_requested_bytes(REGION.bytes);
    assert_eq!(guest.blocks(PLUG, 0, 2), ACK);
    guest.blocks.busy.store(true, Ordering::Relaxed);
    assert_eq!(guest.blocks(PLUG, 2, 1), BUSY);
    assert_eq!(guest.blocks(UNPLUG, 0, 1), BUSY);
    assert_eq!(guest.request(UNPLUG_ALL, 0, 0).0, BUSY);
    assert_eq!(guest.driver.device.plugged_bytes(), 2 * MEM_BLOCK_BYTES);
    assert_eq!(guest.request(STATE, REGION.start, 3), (ACK, MIXED));
}

#[test]
fn a_request_whose_response_has_no_room_is_not_carried_out() {
    let guest = Guest::started();
    let driver = &guest.driver;
    driver.device.set_requested_bytes(REGION.bytes);
    let mut request = [0; REQUEST_BYTES];
    request[8..16].copy_from_slice(&REGION.start.to_le_bytes());
    request[16] = 1;
    driver
        .memory
        .write_slice(&request, GuestAddress(0x40_0000))
        .unwrap();
    for buffers in [
        vec![(0x40_0000, 24, false)],
        vec![(0x40_0000, 24, false), (0x50_0000, 9, true)],
        vec![(0x40_0000, 24, false), (0xfee0_0000, 10, true)],
    ] {
        driver.offer(0, 0, &buffers);
        driver.serve(0);
        assert_eq!(driver.last_used(0), (0, 0));
    }
    // A truncated request is invalid, in any number of pieces.
    driver.offer(0, 0, &[(0x40_0000, 23, false), (0x50_0000, 10, true)]);
    driver.serve(0);
    assert_eq!(driver.last_used(0), (0, 10));
    let kind: u16 = driver.memory.read_obj(GuestAddress(0x50_0000)).unwrap();
    assert_eq!((kind, driver.device.plugged_bytes()), (ERROR, 0));
    driver.offer(
        0,
        0,
        &[
            (0x40_0000, 3, false),
            (0x40_0003, 21, false),
            (0x50_0000, 1, true),
            (0x50_0001, 9, true),
        ],
    );
    driver.serve(0);
    assert_eq!(driver.device.plugged_bytes(), MEM_BLOCK_BYTES);
}

proptest! {
    #[test]
    fn the_device_and_its_memory_agree_whatever_is_asked(
        requests in proptest::collection::vec(
            (
                prop_oneof![4 => 0_u16..4, 1 => any::<u16>()],
                prop_oneof![
                    8 => (0_u64..100).prop_map(|block| REGION.start + block * MEM_BLOCK_BYTES),
                    1 => any::<u64>(),
                    1 => (0_u64..REGION.bytes).prop_map(|offset| REGION.start + offset),
                ],
                prop_oneof![8 => 0_u16..12, 1 => any::<u16>()],
                prop::option::weighted(0.2, 0_u64..120),
                prop::bool::weighted(0.1),
            ),
            0..100,
        ),
    ) {
        let guest = Guest::started();
        let device = &guest.driver.device;
        device.set_requested_bytes(50 * MEM_BLOCK_BYTES);
        for (kind, address, count, requested, busy) in requests {
            if let Some(blocks) = requested {
                device.set_requested_bytes(blocks * MEM_BLOCK_BYTES);
            }
            guest.blocks.busy.store(busy, Ordering::Relaxed);
            let before = lock(&guest.blocks.plugged).clone();
            let (response, _) = guest.request(kind, address, count);
            prop_assert!(response <= ERROR);
            let plugged = lock(&guest.blocks.plugged);
            prop_assert_eq!(device.plugged_bytes(), plugged.len() as u64 * MEM_BLOCK_BYTES);
            if (response != ACK && kind != UNPLUG_ALL) || kind == STATE {
                prop_assert_eq!(&*plugged, &before);
            }
            if plugged.len() > before.len() {
                prop_assert!(device.plugged_bytes() <= device.requested_bytes());
            }
        }
        prop_assert!(guest.driver.memory.num_regions() > 0);
        prop_assert_eq!(guest.driver.get(0x70), STARTED);
    }
}
