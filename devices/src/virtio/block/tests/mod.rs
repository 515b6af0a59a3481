//! Tests of disks as a driver sees them.

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::lost;
use crate::virtio::test_driver::{Driver, SECOND_PART, STARTED, VERSION_1};

mod chains;
mod limits;
mod properties;
mod ranges;

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
        Self::of(DISK_BYTES, read_only)
    }

    fn of(bytes: u64, read_only: bool) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
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
fn a_request_with_a_lost_page_fails_and_changes_nothing() {
    let bed = Bed::new(false);
    bed.put(DATA, &[7; 0x2000]);
    let _lost = lost::testing::Lost::at(&bed.driver.memory, DATA + 0x1000);
    let whole = [(DATA, 0x2000, false)];
    assert_eq!(bed.request(OUT, 0, &whole), IO_ERROR);
    let disk = std::fs::read(bed.file.path()).unwrap();
    assert!(disk.iter().all(|&byte| byte == 0), "something was written");
    assert_eq!(bed.request(IN, 0, &[(DATA, 0x2000, true)]), IO_ERROR);
    assert_eq!(bed.get(DATA, 1), [7], "something was read");
    assert_eq!(bed.request(OUT, 0, &[(DATA, 0x1000, false)]), OK);
    assert_eq!(bed.request(IN, 8, &[(DATA + 0x2000, 0x1000, true)]), OK);
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
    // Beyond the disk, although each part is valid.
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
fn a_request_has_no_more_bytes_than_all_its_parts_may_have() {
    const MOST: u32 = 126 * (64 << 10);
    let bed = Bed::of(2 * u64::from(MOST), false);
    bed.put(DATA, &vec![1; MOST as usize + 512]);
    let refused = bed.request(OUT, 0, &[(DATA, MOST + 512, false)]);
    assert_eq!(refused, IO_ERROR);
    let image = || std::fs::read(bed.file.path()).unwrap();
    assert!(image().iter().all(|byte| *byte == 0));
    assert_eq!(bed.request(OUT, 0, &[(DATA, MOST, false)]), OK);
    assert!(image()[..MOST as usize].iter().all(|byte| *byte == 1));
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
