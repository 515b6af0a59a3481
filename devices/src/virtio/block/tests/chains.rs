//! Requests in unusual or invalid descriptor chains.

use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_WRITE};

use super::*;
use crate::virtio::test_driver::PART_BYTES;

#[test]
fn header_data_and_status_may_share_descriptors() {
    let bed = Bed::new(false);
    let mut bytes = Vec::from(OUT.to_le_bytes());
    bytes.extend([0; 12]);
    bytes.extend([7; 512]);
    bed.put(HEADER, &bytes);
    bed.driver
        .offer(0, 0, &[(HEADER, 528, false), (STATUS, 1, true)]);
    bed.driver.serve(0);
    // The status behind the data in one descriptor; the header in three.
    bed.put(HEADER, &[0; 16]);
    bed.driver.offer(
        0,
        0,
        &[
            (HEADER, 3, false),
            (HEADER + 3, 0, false),
            (HEADER + 3, 13, false),
            (DATA, 513, true),
        ],
    );
    bed.driver.serve(0);
    assert_eq!(bed.get(DATA, 512), vec![7; 512]);
    assert_eq!(bed.get(DATA + 512, 1), [OK]);
}

#[test]
fn an_unknown_request_is_unsupported_and_a_cut_one_is_not_carried_out() {
    let bed = Bed::new(false);
    for kind in [2, 3, 5, 14, 15, u32::MAX] {
        assert_eq!(bed.request(kind, 0, &[]), UNSUPPORTED);
    }
    // No header; half a header; no status.
    bed.driver.offer(0, 0, &[(STATUS, 1, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.get(STATUS, 1), [IO_ERROR]);
    bed.put(STATUS, &[NONE]);
    bed.driver
        .offer(0, 0, &[(HEADER, 15, false), (STATUS, 1, true)]);
    bed.driver.serve(0);
    assert_eq!(bed.get(STATUS, 1), [IO_ERROR]);
    bed.driver.offer(0, 0, &[(HEADER, 16, false)]);
    bed.driver.serve(0);
    assert_eq!(bed.driver.last_used(0), (0, 0));
}

#[test]
fn data_outside_memory_or_in_the_hole_is_an_error_and_the_status_says_so() {
    let bed = Bed::new(false);
    for address in [
        PART_BYTES,
        PART_BYTES - 256,
        SECOND_PART - 256,
        u64::MAX - 511,
        u64::MAX - 100,
    ] {
        for (kind, writes) in [(IN, true), (OUT, false)] {
            let status = bed.request(kind, 0, &[(address, 512, writes)]);
            assert_eq!(status, IO_ERROR, "{kind} {address:#x}");
        }
    }
}

#[test]
fn a_chain_that_is_a_loop_or_nests_tables_comes_back() {
    let bed = Bed::new(false);
    let driver = &bed.driver;
    driver.descriptor(0, 0, HEADER, 16, 1, 1);
    driver.descriptor(0, 1, DATA, 512, 1 | VRING_DESC_F_WRITE, 0);
    driver.make_available(0, 0);
    driver.serve(0);
    assert_eq!(driver.used(0), 1);
    let mut table = Vec::new();
    for flags in [VRING_DESC_F_INDIRECT, VRING_DESC_F_WRITE] {
        table.extend(DATA.to_le_bytes());
        table.extend(32_u32.to_le_bytes());
        table.extend(u16::try_from(flags).unwrap().to_le_bytes());
        table.extend(1_u16.to_le_bytes());
    }
    bed.put(DATA, &table);
    driver.descriptor(0, 0, DATA, 32, VRING_DESC_F_INDIRECT, 0);
    driver.make_available(0, 0);
    driver.serve(0);
    assert_eq!(driver.used(0), 2);
}

#[test]
fn an_indirect_table_is_a_request_like_another() {
    let bed = Bed::new(false);
    bed.put(HEADER, &[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    bed.put(DATA, &[9; 512]);
    let mut table = Vec::new();
    for (address, bytes, flags, next) in [
        (HEADER, 16_u32, 1_u16, 1_u16),
        (DATA, 512, 1, 2),
        (STATUS, 1, 2, 0),
    ] {
        table.extend(address.to_le_bytes());
        table.extend(bytes.to_le_bytes());
        table.extend(flags.to_le_bytes());
        table.extend(next.to_le_bytes());
    }
    bed.put(0x5_0000, &table);
    bed.driver
        .descriptor(0, 9, 0x5_0000, 48, VRING_DESC_F_INDIRECT, 0);
    bed.driver.make_available(0, 9);
    bed.driver.serve(0);
    assert_eq!(bed.driver.last_used(0), (9, 1));
    assert_eq!(bed.get(STATUS, 1), [OK]);
    let image = std::fs::read(bed.file.path()).unwrap();
    assert_eq!(image[1024..1536], [9; 512]);
}
