//! Tests of the ranges that the balloon takes from chains.

use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use super::*;
use crate::virtio::test_driver::{
    BalloonDriver, PART_BYTES, RING_SIZE, SECOND_PART, STARTED, ring,
};

const PAGE: u32 = 4096;

#[test]
fn reported_memory_is_discarded_and_given_back() {
    let driver = BalloonDriver::started();
    driver.report(&[
        (0x40_0000, 0x20_0000),
        (0x60_0000, 0x20_0000),
        (SECOND_PART, PAGE),
    ]);
    driver.serve(2);
    assert_eq!(
        driver.discarded(),
        [(0x40_0000, 0x40_0000), (SECOND_PART, u64::from(PAGE))]
    );
    assert_eq!(driver.used(2), 1);
    assert_eq!(driver.get(0x60), 1, "used buffer notification");
    assert_eq!(driver.interrupt.event_fd().read().unwrap(), 1);
}

#[test]
fn the_queue_of_reports_has_both_of_its_numbers() {
    let driver = BalloonDriver::started();
    driver.descriptor(4, 0, 0x40_0000, PAGE, VRING_DESC_F_WRITE, 0);
    driver.make_available(4, 0);
    driver.serve(4);
    assert_eq!(driver.discarded(), [(0x40_0000, u64::from(PAGE))]);
    driver.set(0x30, 3);
    assert_eq!(driver.get(0x34), 0, "the one between does not exist");
}

#[test]
fn memory_that_is_not_whole_pages_of_the_guest_is_not_taken() {
    let driver = BalloonDriver::started();
    let bad = [
        (0x40_0000, 0),
        (0x40_0001, PAGE),
        (0x40_0000, PAGE - 1),
        (0x40_0000, PAGE + 1),
        (PART_BYTES, PAGE),
        (PART_BYTES - u64::from(PAGE), 2 * PAGE),
        (SECOND_PART - u64::from(PAGE), 2 * PAGE),
        (0, !0xfff),
        (!0xfff, PAGE),
        (!0xfff, 2 * PAGE),
        (0xfee0_0000, PAGE),
    ];
    for range in bad {
        driver.report(&[range]);
        driver.serve(2);
    }
    assert_eq!(driver.discarded(), []);
    assert_eq!(usize::from(driver.used(2)), bad.len(), "all were returned");
    driver.report(&[(0x40_0001, PAGE), (0x41_0000, PAGE)]);
    driver.serve(2);
    assert_eq!(driver.discarded(), [(0x41_0000, u64::from(PAGE))]);
}

#[test]
fn memory_that_the_driver_may_not_give_for_writing_is_not_taken() {
    let driver = BalloonDriver::started();
    driver.descriptor(2, 0, 0x40_0000, PAGE, 0, 0);
    driver.make_available(2, 0);
    driver.serve(2);
    assert_eq!(driver.discarded(), []);
}

#[test]
fn pages_in_the_balloon_are_discarded_and_neighbours_are_one_range() {
    let driver = BalloonDriver::started();
    let numbers: [u32; 6] = [0x402, 0x400, 0x401, 0x500, 0x402, 0x7000_0000];
    for (at, number) in (0_u64..).zip(numbers) {
        let place = GuestAddress(0x3_0000 + at * 4);
        driver.memory.write_obj(number, place).unwrap();
    }
    // Over two descriptors, the second of which ends inside a number.
    driver.descriptor(0, 0, 0x3_0000, 12, VRING_DESC_F_NEXT, 1);
    driver.descriptor(0, 1, 0x3_000c, 14, 0, 0);
    driver.make_available(0, 0);
    driver.serve(0);
    let page = u64::from(PAGE);
    assert_eq!(
        driver.discarded(),
        [(0x40_0000, 3 * page), (0x50_0000, page)]
    );
    // Deflating needs nothing except returning the buffer.
    driver.descriptor(1, 0, 0x3_0000, 12, 0, 0);
    driver.make_available(1, 0);
    driver.serve(1);
    assert_eq!(driver.discarded().len(), 2);
    assert_eq!(driver.used(1), 1);
}

#[test]
fn one_chain_frees_no_more_than_the_limits_allow() {
    let driver = BalloonDriver::started();
    // The ring repeatedly, with the largest possible ranges.
    for at in 0..RING_SIZE {
        let flags = VRING_DESC_F_WRITE | VRING_DESC_F_NEXT;
        let bytes = u32::try_from(PART_BYTES).unwrap();
        driver.descriptor(2, at, 0, bytes, flags, (at + 1) % RING_SIZE);
    }
    driver.make_available(2, 5);
    driver.serve(2);
    let freed: u64 = driver.discarded().iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(freed, BALLOON_CHAIN_BYTES_MAX);
    // Page numbers beyond the limit.
    driver.descriptor(0, 0, 0, u32::MAX, VRING_DESC_F_NEXT, 0);
    driver.make_available(0, 0);
    driver.serve(0);
    assert_eq!(driver.used(0), 1);
}

#[test]
fn an_indirect_table_in_an_indirect_table_ends_the_chain() {
    let driver = BalloonDriver::started();
    driver.descriptor(2, 0, 0x2_0000, 32, VRING_DESC_F_INDIRECT, 0);
    let mut table = Vec::from(0x2_0000_u64.to_le_bytes());
    table.extend(32_u32.to_le_bytes());
    table.extend(u16::try_from(VRING_DESC_F_INDIRECT).unwrap().to_le_bytes());
    table.extend(0_u16.to_le_bytes());
    driver
        .memory
        .write_slice(&table, GuestAddress(0x2_0000))
        .unwrap();
    driver.make_available(2, 0);
    driver.serve(2);
    assert_eq!(driver.discarded(), []);
    assert_eq!(driver.used(2), 1);
}

#[test]
fn the_target_is_shown_and_the_actual_size_is_taken() {
    let driver = BalloonDriver::started();
    assert_eq!(driver.get(0x100), 0);
    let generation = driver.get(0xfc);
    driver.transport.change_config(|| {
        assert_ne!(driver.get(0xfc), generation, "read before it");
        let within = driver.get(0xfc);
        driver.device.set_target_pages(0x1234);
        assert_eq!(driver.get(0xfc), within);
    });
    assert_ne!(driver.get(0xfc), generation);
    assert_ne!(driver.get(0xfc), generation + 1, "read within it");
    assert_eq!(driver.get(0x60), 2, "configuration change");
    assert_eq!(driver.get(0x100), 0x1234);
    driver.set(0x104, 77);
    assert_eq!(driver.device.actual_pages(), 77);
    driver.set(0x100, 5);
    assert_eq!(driver.get(0x100), 0x1234, "the driver cannot write it");
    driver.set(0x70, 0);
    assert_eq!(driver.device.actual_pages(), 0);
}

proptest! {
    #[test]
    fn no_ring_makes_the_device_panic_or_take_what_is_not_the_guests(
        descriptors in proptest::collection::vec(
            (
                prop_oneof![
                    0..2 * SECOND_PART,
                    (0..2 * SECOND_PART).prop_map(|address| address & !0xfff),
                    any::<u64>(),
                ],
                prop_oneof![any::<u32>(), (0_u32..64).prop_map(|pages| pages * PAGE)],
                0_u32..16,
                prop_oneof![0_u16..16, any::<u16>()],
            ),
            16,
        ),
        heads in proptest::collection::vec(prop_oneof![0_u16..16, any::<u16>()], 0..8),
        jump in prop_oneof![Just(0_u16), any::<u16>()],
        queue in 0_u32..5,
    ) {
        let driver = BalloonDriver::started();
        for (at, (address, bytes, flags, next)) in (0..).zip(descriptors) {
            driver.descriptor(queue, at, address, bytes, flags, next);
        }
        for head in &heads {
            driver.make_available(queue, *head);
        }
        let place = GuestAddress(ring(queue)[1] + 2);
        let index: u16 = driver.memory.read_obj(place).unwrap();
        driver.memory.write_obj(index.wrapping_add(jump), place).unwrap();
        let queue = usize::try_from(queue).unwrap();
        for _ in 0..3 {
            driver.serve(queue);
        }
        let page = u64::from(PAGE);
        for (start, bytes) in driver.discarded() {
            prop_assert!(start % page == 0 && bytes % page == 0 && bytes > 0);
            let end = start + bytes;
            prop_assert!(
                end <= PART_BYTES || (start >= SECOND_PART && end <= SECOND_PART + PART_BYTES)
            );
        }
        let status = driver.get(0x70);
        prop_assert!(status == STARTED || status == STARTED | 0x40, "{:#x}", status);
    }
}
