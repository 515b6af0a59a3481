//! Tests of disks as a driver sees them.

use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::test_driver::{Driver, PART_BYTES, SECOND_PART, STARTED, VERSION_1};

const DISK_BYTES: u64 = 1 << 20;
const SECTORS: u64 = DISK_BYTES / SECTOR_BYTES;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const ZEROES: u32 = 13;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
/// The status byte before the device writes it.
const NONE: u8 = 0xee;

/// Where the driver has its request.
const HEADER: u64 = 0x4_0000;
const STATUS: u64 = 0x4_1000;
const DATA: u64 = 0x10_0000;

struct Bed {
    driver: Driver<Block>,
    file: tempfile::NamedTempFile,
}

impl Bed {
    fn new(read_only: bool) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(DISK_BYTES).unwrap();
        let disk = Disk::open(file.path(), read_only).unwrap();
        let driver = Driver::of(Block::new(3, disk));
        driver.start(driver.offered());
        assert_eq!(driver.get(0x70), STARTED);
        Self { driver, file }
    }

    /// A disk on a file that is always full.
    fn full() -> Driver<Block> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/full")
            .unwrap();
        let driver = Driver::of(Block::new(0, Disk::of(file, DISK_BYTES)));
        driver.start(driver.offered());
        driver
    }

    fn request(&self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> u8 {
        request(&self.driver, kind, sector, data)
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        let place = GuestAddress(address);
        self.driver.memory.write_slice(bytes, place).unwrap();
    }

    fn get(&self, address: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let place = GuestAddress(address);
        self.driver.memory.read_slice(&mut bytes, place).unwrap();
        bytes
    }

    /// Encodes the parts of a discard or write-zeroes request.
    fn put_ranges(&self, ranges: &[(u64, u32, u32)]) -> (u64, u32, bool) {
        let mut bytes = Vec::new();
        for (sector, sectors, flags) in ranges {
            bytes.extend(sector.to_le_bytes());
            bytes.extend(sectors.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
        }
        self.put(DATA, &bytes);
        (DATA, u32::try_from(bytes.len()).unwrap(), false)
    }
}

/// As many bytes as the disk has, none of them zero.
fn ones() -> Vec<u8> {
    vec![1; usize::try_from(DISK_BYTES).unwrap()]
}

/// Submits a request and returns its status.
fn request(driver: &Driver<Block>, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> u8 {
    let mut header = Vec::from(kind.to_le_bytes());
    header.extend([0; 4]);
    header.extend(sector.to_le_bytes());
    let memory = &driver.memory;
    memory.write_slice(&header, GuestAddress(HEADER)).unwrap();
    memory.write_obj(NONE, GuestAddress(STATUS)).unwrap();
    let mut chain = vec![(HEADER, 16, false)];
    chain.extend(data);
    chain.push((STATUS, 1, true));
    let before = driver.used(0);
    driver.offer(0, 0, &chain);
    driver.serve(0);
    assert_eq!(driver.used(0), before.wrapping_add(1), "it completed");
    memory.read_obj(GuestAddress(STATUS)).unwrap()
}

#[test]
fn the_configuration_has_size_and_limits() {
    for read_only in [false, true] {
        let bed = Bed::new(read_only);
        let driver = &bed.driver;
        assert_eq!(driver.get(8), 2, "a block device");
        assert_eq!(u64::from(driver.get(0x100)), SECTORS);
        assert_eq!((driver.get(0x104), driver.get(0x108)), (0, 64 << 10));
        assert_eq!((driver.get(0x10c), driver.get(0x114)), (126, 512));
        assert_eq!(driver.get(0x118), 3 | (8 << 16), "blocks of 8 sectors");
        assert_eq!(driver.get(0x124), 1 << 21);
        let features = driver.offered();
        let has = |bit: u32| features & (1 << bit) != 0;
        assert_eq!(has(5), read_only);
        assert_eq!([has(9), has(13), has(14)], [!read_only; 3]);
        // The configuration has no writable field.
        driver.set(0x100, 1);
        assert_eq!(u64::from(driver.get(0x100)), SECTORS);
    }
}

#[test]
fn what_is_written_is_in_the_file_and_read_back() {
    let bed = Bed::new(false);
    let pattern: Vec<u8> = (0..3 * 512_u32).map(|at| (at % 251) as u8).collect();
    bed.put(DATA, &pattern);
    // Split into pieces that are not sectors.
    let pieces = [(DATA, 100, false), (DATA + 100, 1436, false)];
    assert_eq!(bed.request(OUT, SECTORS - 3, &pieces), OK);
    assert_eq!(bed.driver.last_used(0), (0, 1));
    assert_eq!(bed.request(FLUSH, 0, &[]), OK);
    let image = std::fs::read(bed.file.path()).unwrap();
    assert_eq!(image[image.len() - 3 * 512..], pattern);
    let at = SECOND_PART + 4096;
    let pieces = [(at, 1, true), (at + 1, 1534, true), (at + 1535, 1, true)];
    assert_eq!(bed.request(IN, SECTORS - 3, &pieces), OK);
    assert_eq!(bed.driver.last_used(0), (0, 3 * 512 + 1));
    assert_eq!(bed.get(at, pattern.len()), pattern);
    assert_eq!(bed.driver.get(0x60), 1, "the driver was notified");
}

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
fn a_read_only_disk_is_read_and_not_written() {
    let bed = Bed::new(true);
    bed.put(DATA, &[1; 512]);
    assert_eq!(bed.request(IN, 0, &[(DATA, 512, true)]), OK);
    assert_eq!(bed.get(DATA, 512), vec![0; 512]);
    bed.put(DATA, &[1; 512]);
    assert_eq!(bed.request(OUT, 0, &[(DATA, 512, false)]), IO_ERROR);
    for kind in [DISCARD, ZEROES] {
        let ranges = bed.put_ranges(&[(0, 1, 0)]);
        assert_eq!(bed.request(kind, 0, &[ranges]), IO_ERROR);
    }
    assert_eq!(bed.request(FLUSH, 0, &[]), OK);
    assert!(
        std::fs::read(bed.file.path())
            .unwrap()
            .iter()
            .all(|b| *b == 0)
    );
}

#[test]
fn requests_beyond_the_disk_or_not_of_sectors_are_refused() {
    let bed = Bed::new(false);
    bed.put(DATA, &[1; 4096]);
    for (sector, bytes) in [
        (SECTORS, 512),
        (SECTORS - 1, 1024),
        (u64::MAX, 512),
        (u64::MAX / 512, 512),
        (u64::MAX / 512 + 1, 512),
        (0, 511),
        (0, 513),
    ] {
        for (kind, writes) in [(IN, true), (OUT, false)] {
            let status = bed.request(kind, sector, &[(DATA, bytes, writes)]);
            assert_eq!(status, IO_ERROR, "{kind} {sector} {bytes}");
        }
    }
    // More than the configuration allows, although each part is valid, and beyond the disk.
    let parts = [(DATA, 64 << 10, false); 100];
    assert_eq!(bed.request(OUT, 0, &parts), IO_ERROR);
    assert!(
        std::fs::read(bed.file.path())
            .unwrap()
            .iter()
            .all(|b| *b == 0)
    );
    assert_eq!(bed.request(IN, SECTORS, &[]), OK, "nothing, at the end");
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

#[test]
fn the_disk_has_a_serial_number() {
    let bed = Bed::new(false);
    bed.put(DATA, &[0xff; 20]);
    assert_eq!(bed.request(GET_ID, 0, &[(DATA, 20, true)]), OK);
    assert_eq!(bed.get(DATA, 20), *b"disk3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(bed.request(GET_ID, 0, &[(DATA, 3, true)]), OK);
    assert_eq!(bed.get(DATA, 3), *b"dis");
}

#[test]
fn ranges_are_discarded_and_made_zero() {
    use std::os::unix::fs::MetadataExt;
    let bed = Bed::new(false);
    std::fs::write(bed.file.path(), ones()).unwrap();
    bed.file.as_file().sync_all().unwrap();
    let blocks = || bed.file.as_file().metadata().unwrap().blocks();
    let before = blocks();
    let half = u32::try_from(SECTORS / 2).unwrap();
    let ranges = bed.put_ranges(&[(0, half / 2, 0), (u64::from(half / 2), half / 2, 0)]);
    assert_eq!(bed.request(DISCARD, 0, &[ranges]), OK);
    assert!(blocks() <= before / 2 + 8, "{} of {before}", blocks());
    for flags in [0, 1] {
        let first = SECTORS / 2 + 1 + u64::from(flags);
        let ranges = bed.put_ranges(&[(first, 1, flags)]);
        assert_eq!(bed.request(ZEROES, 0, &[ranges]), OK);
    }
    let image = std::fs::read(bed.file.path()).unwrap();
    let zero_sectors = image
        .chunks(512)
        .filter(|sector| sector.iter().all(|byte| *byte == 0));
    assert_eq!(zero_sectors.count() as u64, SECTORS / 2 + 2);
    assert_eq!(image[image.len() / 2], 1);
}

#[test]
fn ranges_that_may_not_be_change_nothing() {
    let bed = Bed::new(false);
    std::fs::write(bed.file.path(), ones()).unwrap();
    let sectors = u32::try_from(SECTORS).unwrap();
    for (ranges, wanted) in [
        (vec![], IO_ERROR),
        (vec![(0, 0, 0)], IO_ERROR),
        (vec![(SECTORS, 1, 0)], IO_ERROR),
        (vec![(1, sectors, 0)], IO_ERROR),
        (vec![(0, u32::MAX, 0)], IO_ERROR),
        (vec![(u64::MAX, 1, 0)], IO_ERROR),
        (vec![(0, 1, 0), (SECTORS, 1, 0)], IO_ERROR),
        (vec![(0, 1, 0); 17], IO_ERROR),
        (vec![(0, 1, 2)], UNSUPPORTED),
        (vec![(0, 1, u32::MAX)], UNSUPPORTED),
    ] {
        for kind in [DISCARD, ZEROES] {
            let data = bed.put_ranges(&ranges);
            let status = bed.request(kind, 0, &[data]);
            assert_eq!(status, wanted, "{kind} {ranges:?}");
        }
    }
    let data = bed.put_ranges(&[(0, 1, 1)]);
    assert_eq!(bed.request(DISCARD, 0, &[data]), UNSUPPORTED, "unmap");
    let (address, ..) = bed.put_ranges(&[(0, 1, 0)]);
    assert_eq!(bed.request(DISCARD, 0, &[(address, 15, false)]), IO_ERROR);
    let image = std::fs::read(bed.file.path()).unwrap();
    assert!(image.iter().all(|byte| *byte == 1));
}

#[test]
fn a_full_host_is_an_error_of_the_guest_and_told_once() {
    let driver = Bed::full();
    for _ in 0..2 {
        let status = request(&driver, OUT, 0, &[(DATA, 512, false)]);
        assert_eq!(status, IO_ERROR);
        assert!(driver.device.warned.load(Ordering::Relaxed));
    }
    assert_eq!(request(&driver, IN, 0, &[(DATA, 512, true)]), OK);
    assert_eq!(driver.get(0x70), STARTED, "the device still runs");
}

#[test]
fn a_file_that_was_cut_is_an_error_and_stays_cut() {
    let bed = Bed::new(false);
    bed.file.as_file().set_len(DISK_BYTES / 2).unwrap();
    // Reads of the remaining part fail too, since its contents are uncertain.
    for sector in [0, SECTORS - 1] {
        for (kind, writes) in [(IN, true), (OUT, false)] {
            let status = bed.request(kind, sector, &[(DATA, 512, writes)]);
            assert_eq!(status, IO_ERROR);
        }
    }
    let now = bed.file.as_file().metadata().unwrap().len();
    assert_eq!(now, DISK_BYTES / 2);
}

#[test]
fn a_driver_that_cannot_flush_needs_not_to() {
    let driver = Bed::full();
    assert!(driver.device.driver_flushes.load(Ordering::Relaxed));
    driver.start(VERSION_1);
    assert!(!driver.device.driver_flushes.load(Ordering::Relaxed));
    // Nothing is written, and storing even that fails: a character device cannot be synced.
    let status = request(&driver, OUT, 0, &[]);
    assert_eq!(status, IO_ERROR);
    driver.start(driver.offered());
    assert_eq!(request(&driver, OUT, 0, &[]), OK);
}

/// Splits `bytes` bytes at `address` into pieces.
fn cut(address: u64, bytes: u32, cuts: &[u32], writes: bool) -> Vec<(u64, u32, bool)> {
    let mut places: Vec<u32> = cuts.iter().map(|cut| cut % (bytes + 1)).collect();
    places.extend([0, bytes]);
    places.sort_unstable();
    let piece = |pair: &[u32]| (address + u64::from(pair[0]), pair[1] - pair[0], writes);
    places.windows(2).map(piece).collect()
}

proptest! {
    #[test]
    fn the_disk_is_what_was_written_last(
        requests in proptest::collection::vec(
            (0_u32..4, 0..SECTORS, 1_u32..40, any::<u8>(), proptest::collection::vec(any::<u32>(), 0..4)),
            1..30,
        ),
    ) {
        let bed = Bed::new(false);
        let mut model = vec![0_u8; usize::try_from(DISK_BYTES).unwrap()];
        for (what, sector, sectors, byte, cuts) in requests {
            let sectors = sectors.min(u32::try_from(SECTORS - sector).unwrap());
            let bytes = sectors * 512;
            let start = usize::try_from(sector * 512).unwrap();
            let there = start..start + usize::try_from(bytes).unwrap();
            let status = match what {
                0 => {
                    let pattern: Vec<u8> = (0..bytes).map(|at| byte ^ (at % 253) as u8).collect();
                    bed.put(DATA, &pattern);
                    model[there].copy_from_slice(&pattern);
                    bed.request(OUT, sector, &cut(DATA, bytes, &cuts, false))
                }
                1 => {
                    bed.put(DATA, &vec![byte; there.len()]);
                    let status = bed.request(IN, sector, &cut(DATA, bytes, &cuts, true));
                    prop_assert_eq!(&bed.get(DATA, there.len()), &model[there]);
                    status
                }
                _ => {
                    model[there].fill(0);
                    let range = bed.put_ranges(&[(sector, sectors, what - 2)]);
                    bed.request(ZEROES, 0, &[range])
                }
            };
            prop_assert_eq!(status, OK);
        }
        prop_assert_eq!(std::fs::read(bed.file.path()).unwrap(), model);
    }

    #[test]
    fn no_chain_makes_the_device_panic_or_write_a_disk_that_is_read_only(
        descriptors in proptest::collection::vec(
            (
                prop_oneof![
                    Just(HEADER),
                    0..2 * SECOND_PART,
                    any::<u64>(),
                ],
                prop_oneof![Just(16_u32), Just(1), (0_u32..20).prop_map(|n| n * 512), any::<u32>()],
                0_u32..16,
                prop_oneof![0_u16..16, any::<u16>()],
            ),
            16,
        ),
        headers in proptest::collection::vec(
            (prop_oneof![0_u32..16, any::<u32>()], prop_oneof![0..2 * SECTORS, any::<u64>()]),
            8,
        ),
        heads in proptest::collection::vec(prop_oneof![0_u16..16, any::<u16>()], 1..8),
        read_only: bool,
    ) {
        let bed = Bed::new(read_only);
        for (at, (address, bytes, flags, next)) in (0..).zip(descriptors) {
            bed.driver.descriptor(0, at, address, bytes, flags, next);
        }
        for (head, (kind, sector)) in heads.iter().zip(headers) {
            bed.put(HEADER, &kind.to_le_bytes());
            bed.put(HEADER + 8, &sector.to_le_bytes());
            bed.driver.make_available(0, *head);
            bed.driver.serve(0);
        }
        if read_only {
            let image = std::fs::read(bed.file.path()).unwrap();
            prop_assert!(image.iter().all(|byte| *byte == 0));
        }
        let length = bed.file.as_file().metadata().unwrap().len();
        prop_assert_eq!(length, DISK_BYTES, "the file keeps its size");
        let status = bed.driver.get(0x70);
        prop_assert!(status == STARTED || status == STARTED | 0x40, "{:#x}", status);
    }
}
