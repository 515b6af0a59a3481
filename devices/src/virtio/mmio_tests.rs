//! Tests of the registers.

use std::io::Seek as _;

use proptest::prelude::*;

use super::*;
use crate::virtio::test_driver::{
    BalloonDriver, PART_BYTES, RING_SIZE, SECOND_PART, STARTED, accesses, ring,
};

const FEATURES: u64 = (1 << 32) | (1 << 5) | (1 << 2);
/// Event indices and indirect descriptors, which every device offers.
const RING_FEATURES: u64 = (1 << 29) | (1 << 28);

#[test]
fn the_device_says_what_it_is() {
    let driver = BalloonDriver::new();
    assert_eq!(driver.get(0), 0x7472_6976);
    assert_eq!(driver.get(4), 2);
    assert_eq!(driver.get(8), 5, "a balloon");
    driver.set(0x14, 1);
    let high = driver.get(0x10);
    driver.set(0x14, 0);
    let low = driver.get(0x10);
    assert_eq!(
        (u64::from(high) << 32) | u64::from(low),
        FEATURES | RING_FEATURES
    );
    driver.set(0x14, 2);
    assert_eq!(driver.get(0x10), 0);
    driver.set(0x30, 0);
    assert_eq!(driver.get(0x34), u32::from(RING_SIZE));
    driver.set(0x30, u32::MAX);
    assert_eq!(driver.get(0x34), 0);
    assert_eq!(driver.get(0xb0), u32::MAX, "no shared memory");
}

#[test]
fn features_that_were_not_offered_are_not_accepted() {
    for features in [FEATURES | 1, FEATURES | (1 << 34), FEATURES & !(1 << 32), 0] {
        let driver = BalloonDriver::new();
        driver.start(features);
        assert_eq!(driver.get(0x70), 1 | 2, "{features:#x}");
    }
    let driver = BalloonDriver::new();
    driver.start(1 << 32);
    assert_eq!(
        driver.get(0x70),
        STARTED,
        "those of the device are optional"
    );
}

#[test]
fn the_status_goes_up_in_order_only() {
    let driver = BalloonDriver::new();
    driver.set(0x70, 2);
    assert_eq!(driver.get(0x70), 0, "not seen yet");
    driver.set(0x70, 4);
    assert_eq!(driver.get(0x70), 0, "no features agreed on");
    driver.set(0x70, 1 | 2 | 8 | 4);
    assert_eq!(driver.get(0x70), 1 | 2, "version 1 was not accepted");
    driver.set(0x70, 1);
    assert_eq!(driver.get(0x70), 1 | 2, "bits are not cleared one by one");
    driver.set(0x70, 128 | 3);
    assert_eq!(driver.get(0x70), 128 | 3);
    driver.set(0x70, 0);
    assert_eq!(driver.get(0x70), 0);
}

#[test]
fn features_are_fixed_once_they_are_agreed_on() {
    let driver = BalloonDriver::started();
    driver.set(0x24, 0);
    driver.set(0x20, 1);
    driver.set(0x70, 0);
    driver.start(FEATURES);
    assert_eq!(driver.get(0x70), STARTED, "nothing is left of it");
}

#[test]
fn a_queue_that_cannot_be_does_not_become_ready() {
    let good = ring(0);
    let [descriptors, available, used] = good;
    let bad = [
        (0, good),
        (3, good),
        (u32::from(RING_SIZE) * 2, good),
        (u32::MAX, good),
        (0x1_0080, good),
        (128, [descriptors + 8, available, used]),
        (128, [descriptors, available + 1, used]),
        (128, [descriptors, available, used + 2]),
        (128, [PART_BYTES, available, used]),
        (128, [PART_BYTES - 16, available, used]),
        (128, [descriptors, SECOND_PART - 2, used]),
        (128, [descriptors, available, u64::MAX - 3]),
        (128, [u64::MAX - 15, u64::MAX - 1, u64::MAX - 3]),
    ];
    for (size, ring) in bad {
        let driver = BalloonDriver::new();
        for status in [1, 3] {
            driver.set(0x70, status);
        }
        driver.set(0x24, 1);
        driver.set(0x20, 1);
        driver.set(0x70, 11);
        driver.describe(0, size, ring);
        assert_eq!(driver.get(0x44), 0, "{size} {ring:x?}");
        driver.describe(0, 128, good);
        assert_eq!(driver.get(0x44), 1);
        // A ready queue keeps its description.
        driver.set(0x38, 3);
        driver.set(0x80, 0x123);
        driver.set(0x70, STARTED);
        driver.descriptor(0, 0, 0x3_0000, 4, 0, 0);
        driver.make_available(0, 0);
        driver.serve(0);
        assert_eq!(driver.used(0), 1);
    }
}

#[test]
fn queues_are_not_described_before_features_or_after_the_start() {
    let driver = BalloonDriver::new();
    driver.describe(0, 128, ring(0));
    assert_eq!(driver.get(0x44), 0);
    let driver = BalloonDriver::started();
    driver.set(0x30, 0);
    driver.set(0x44, 0);
    assert_eq!(driver.get(0x44), 0, "it can be stopped");
    driver.describe(0, 128, ring(0));
    assert_eq!(driver.get(0x44), 0, "and not be started again");
    driver.make_available(0, 0);
    driver.serve(0);
    assert_eq!(driver.used(0), 0, "a queue that was stopped is not served");
}

#[test]
fn a_reset_ends_all_use_of_the_rings() {
    let driver = BalloonDriver::started();
    driver.report(&[(0x40_0000, 0x1000)]);
    driver.set(0x70, 0);
    driver.serve(2);
    assert_eq!((driver.used(2), driver.discarded().len()), (0, 0));
    driver.set(0x30, 2);
    assert_eq!(driver.get(0x44), 0);
    // And it can be started again; the rings are read from their beginning.
    driver.start(FEATURES);
    driver.serve(2);
    assert_eq!((driver.used(2), driver.discarded().len()), (1, 1));
}

#[test]
fn a_ring_that_makes_no_sense_stops_the_device_until_its_reset() {
    let driver = BalloonDriver::started();
    let index = GuestAddress(ring(2)[1] + 2);
    // More chains than the ring has entries.
    vm_memory::Bytes::write_obj(&driver.memory, RING_SIZE + 1, index).unwrap();
    driver.serve(2);
    assert_eq!(driver.get(0x70), STARTED | 0x40);
    assert_eq!(driver.get(0x60), 2, "configuration change");
    vm_memory::Bytes::write_obj(&driver.memory, 1_u16, index).unwrap();
    driver.serve(2);
    assert_eq!(driver.used(2), 0);
    driver.start(FEATURES);
    assert_eq!(driver.get(0x70), STARTED);
}

#[test]
fn a_driver_that_breaks_its_ring_again_and_again_fills_no_log() {
    const BROKEN: u64 = 50;
    let driver = BalloonDriver::started();
    let index = GuestAddress(ring(2)[1] + 2);
    vm_memory::Bytes::write_obj(&driver.memory, RING_SIZE + 1, index).unwrap();
    let mut log = tempfile::tempfile().unwrap();
    let writer = Arc::new(log.try_clone().unwrap());
    let logger = tracing_subscriber::fmt().with_writer(writer).finish();
    let began = Instant::now();
    tracing::subscriber::with_default(logger, || {
        for _ in 0..BROKEN {
            driver.set(0x70, 0);
            driver.start(FEATURES);
            driver.serve(2);
            assert_eq!(driver.get(0x70), STARTED | 0x40);
        }
    });
    let most = 1 + usize::try_from(began.elapsed().as_secs() / 10).unwrap();
    log.rewind().unwrap();
    let log = io::read_to_string(log).unwrap();
    let lines = log.matches("an inconsistent ring").count();
    assert!((1..=most).contains(&lines), "{lines} lines: {log}");
}

#[test]
fn interrupts_are_acknowledged_bit_by_bit() {
    let driver = BalloonDriver::started();
    driver.report(&[(0x40_0000, 0x1000)]);
    driver.serve(2);
    driver.transport.change_config(|| {});
    assert_eq!(driver.get(0x60), 3);
    driver.set(0x64, 1);
    assert_eq!(driver.get(0x60), 2);
    driver.set(0x64, u32::MAX);
    assert_eq!(driver.get(0x60), 0);
}

#[test]
fn registers_are_accessed_as_a_whole() {
    let driver = BalloonDriver::started();
    for (offset, width) in [
        (0, 1),
        (0, 2),
        (0, 8),
        (2, 4),
        (0x70, 1),
        (0x71, 4),
        (0xfe, 4),
    ] {
        let mut data = vec![0; width];
        driver.transport.read(offset, &mut data);
        assert!(data.iter().all(|byte| *byte == 0xff), "{offset:#x} {width}");
        driver.transport.write(offset, &vec![0; width]);
    }
    assert_eq!(driver.get(0x70), STARTED, "not reset by any of these");
    // The configuration is accessed by bytes.
    driver.device.set_target_pages(0x0403_0201);
    for (offset, wanted) in [(0x100, 1), (0x101, 2), (0x103, 4), (0x200, 0), (0xfff, 0)] {
        let mut data = [0xff];
        driver.transport.read(offset, &mut data);
        assert_eq!(data, [wanted]);
    }
}

proptest! {
    #[test]
    fn any_accesses_in_any_state_are_survived(
        started: bool,
        accesses in proptest::collection::vec(accesses(), 0..200),
    ) {
        let driver = if started { BalloonDriver::started() } else { BalloonDriver::new() };
        for access in accesses {
            driver.access(access);
        }
        // In any state, a correct driver can use the device afterwards.
        driver.set(0x70, 0);
        driver.clear_rings();
        driver.start(FEATURES);
        let before = driver.discarded().len();
        driver.report(&[(0x40_0000, 0x1000)]);
        driver.serve(2);
        prop_assert_eq!(driver.discarded().len(), before + 1);
    }
}
