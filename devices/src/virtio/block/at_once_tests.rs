//! Tests of disks with many requests in flight.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::rate::tests::rate;
use crate::virtio::server_threads::{ServerThreads, wait_until};
use crate::virtio::test_driver::{Driver, RING_SIZE, STARTED, ring};
use crate::virtio::{RateLimiter, RateLimits};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const ZEROES: u32 = 13;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
/// The status byte before the device writes it.
const NONE: u8 = 0xee;

/// Requests at once: each takes three ring entries.
const LANES: u16 = 40;
/// Each lane has sectors and memory of its own.
const LANE_BYTES: u32 = 64 << 10;
const DISK_BYTES: u64 = LANE_BYTES as u64 * LANES as u64;

fn data(lane: u16) -> u64 {
    0x10_0000 + u64::from(lane) * u64::from(LANE_BYTES)
}

fn status(lane: u16) -> GuestAddress {
    GuestAddress(0x9_0000 + u64::from(lane))
}

/// A driver with a request of each lane in flight.
struct Bed {
    driver: Driver<Block>,
    file: File,
    /// How many completions were seen. Some requests complete before the notification.
    seen: Cell<u16>,
}

impl Bed {
    fn new() -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(DISK_BYTES).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Self::of(Disk::open(path.as_ref(), false).unwrap(), file)
    }

    /// A disk with limits, by the clock of the host.
    fn limited(limits: RateLimits) -> (Self, Arc<RateLimiter>) {
        let limiter = Arc::new(RateLimiter::new("disk0", limits, 1).unwrap());
        let file = tempfile::tempfile().unwrap();
        file.set_len(DISK_BYTES).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let disk = Disk::open(path.as_ref(), false).unwrap();
        let disk = Block::new(0, disk).limited(Arc::clone(&limiter));
        (Self::with(disk, file), limiter)
    }

    fn of(disk: Disk, file: File) -> Self {
        Self::with(Block::new(0, disk), file)
    }

    fn with(disk: Block, file: File) -> Self {
        let driver = Driver::of(disk);
        driver.start(driver.offered());
        let seen = Cell::new(0);
        Self { driver, file, seen }
    }

    fn threads(&self) -> ServerThreads {
        ServerThreads::start(&self.driver.transport, DISK_THREADS)
    }

    /// Makes a request of `lane` available; its chain begins at three times its number.
    fn offer(&self, lane: u16, kind: u32, sector: u64, bytes: u32) {
        let header = GuestAddress(0x8_0000 + u64::from(lane) * 16);
        let memory = &self.driver.memory;
        memory.write_obj(kind, header).unwrap();
        memory.write_obj(0_u32, GuestAddress(header.0 + 4)).unwrap();
        let place = GuestAddress(header.0 + 8);
        memory.write_obj(sector, place).unwrap();
        memory.write_obj(NONE, status(lane)).unwrap();
        let status = (status(lane).0, 1, true);
        let header = (header.0, 16, false);
        let data = (data(lane), bytes, kind == IN);
        let chain = [header, data, status];
        let dataless = [header, status];
        let chain = if bytes == 0 { &dataless[..] } else { &chain };
        self.driver.offer(0, lane * 3, chain);
    }

    fn fill(&self, lane: u16, bytes: &[u8]) {
        let place = GuestAddress(data(lane));
        self.driver.memory.write_slice(bytes, place).unwrap();
    }

    fn contents(&self, lane: u16, bytes: usize) -> Vec<u8> {
        let mut contents = vec![0; bytes];
        let place = GuestAddress(data(lane));
        self.driver.memory.read_slice(&mut contents, place).unwrap();
        contents
    }

    fn status(&self, lane: u16) -> u8 {
        self.driver.memory.read_obj(status(lane)).unwrap()
    }

    /// Serves what was offered, and returns the lanes in order of completion.
    fn carry_out(&self, count: u16) -> Vec<u32> {
        let before = self.seen.get();
        self.driver.notify(0);
        let due = before.wrapping_add(count);
        wait_until("requests", || self.driver.used(0) == due);
        self.seen.set(due);
        let places = (0..count).map(|at| u64::from(before.wrapping_add(at) % RING_SIZE));
        places
            .map(|at| GuestAddress(ring(0)[2] + 4 + at * 8))
            .map(|place| self.driver.memory.read_obj::<u32>(place).unwrap() / 3)
            .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn many_requests_at_once_each_do_what_they_ask_for(
        rounds in proptest::collection::vec(
            proptest::collection::vec((0_u32..5, 0_u32..LANES.into(), any::<u8>()), LANES as usize),
            1..5,
        ),
    ) {
        let bed = Bed::new();
        let threads = bed.threads();
        let mut model = vec![0_u8; usize::try_from(DISK_BYTES).unwrap()];
        let lane_bytes = usize::try_from(LANE_BYTES).unwrap();
        for round in rounds {
            // Each lane works on sectors that no other uses in this round.
            let mut parts: Vec<u32> = (0..LANES.into()).collect();
            let mut wanted = Vec::new();
            for (lane, (what, swap, byte)) in (0..LANES).zip(round) {
                parts.swap(lane.into(), usize::try_from(swap).unwrap());
                let pattern: Vec<u8> = (0..LANE_BYTES).map(|at| byte ^ (at % 253) as u8).collect();
                bed.fill(lane, &pattern);
                wanted.push((lane, what, pattern));
            }
            for ((lane, what, pattern), part) in wanted.iter().zip(&parts) {
                let start = usize::try_from(part * LANE_BYTES).unwrap();
                let there = start..start + lane_bytes;
                let sector = u64::from(part * (LANE_BYTES / 512));
                match what {
                    0 => bed.offer(*lane, IN, sector, LANE_BYTES),
                    1 => {
                        model[there].copy_from_slice(pattern);
                        bed.offer(*lane, OUT, sector, LANE_BYTES);
                    }
                    2 => {
                        model[there].fill(0);
                        let memory = &bed.driver.memory;
                        let place = data(*lane);
                        memory.write_obj(sector, GuestAddress(place)).unwrap();
                        memory.write_obj(LANE_BYTES / 512, GuestAddress(place + 8)).unwrap();
                        memory.write_obj(0_u32, GuestAddress(place + 12)).unwrap();
                        bed.offer(*lane, ZEROES, 0, 16);
                    }
                    3 => bed.offer(*lane, FLUSH, 0, 0),
                    // Beyond the disk.
                    _ => bed.offer(*lane, OUT, DISK_BYTES / 512, LANE_BYTES),
                }
            }
            let back = bed.carry_out(LANES);
            let lanes: BTreeSet<u32> = back.iter().copied().collect();
            prop_assert_eq!(lanes.len(), usize::from(LANES), "each completed once");
            for ((lane, what, _), part) in wanted.iter().zip(&parts) {
                let status = if *what == 4 { IO_ERROR } else { OK };
                prop_assert_eq!(bed.status(*lane), status, "{} of lane {}", what, lane);
                if *what == 0 {
                    let start = usize::try_from(part * LANE_BYTES).unwrap();
                    let read = bed.contents(*lane, lane_bytes);
                    prop_assert!(read == model[start..start + lane_bytes], "lane {}", lane);
                }
            }
        }
        drop(threads);
        let mut image = vec![1; model.len()];
        bed.file.read_exact_at(&mut image, 0).unwrap();
        prop_assert!(image == model, "the image");
        prop_assert_eq!(bed.driver.get(0x70), STARTED);
        prop_assert!(lock(&bed.driver.device.buffers).len() <= DISK_THREADS, "buffers are used again");
    }
}

#[test]
fn nothing_is_written_into_memory_after_a_reset() {
    let bed = Bed::new();
    let _threads = bed.threads();
    let sentinel = vec![0x5a; usize::try_from(LANE_BYTES).unwrap()];
    for round in 0..100 {
        for lane in 0..LANES {
            let sector = u64::from(lane) * u64::from(LANE_BYTES / 512);
            bed.offer(lane, IN, sector, LANE_BYTES);
        }
        bed.driver.notify(0);
        // Somewhere in the middle.
        wait_until("some of them", || bed.driver.used(0) >= round % LANES);
        bed.driver.set(0x70, 0);
        let used = bed.driver.used(0);
        for lane in 0..LANES {
            bed.fill(lane, &sentinel);
            bed.driver.memory.write_obj(NONE, status(lane)).unwrap();
        }
        for lane in 0..LANES {
            assert!(bed.contents(lane, sentinel.len()) == sentinel, "{lane}");
            assert_eq!(bed.status(lane), NONE);
        }
        assert_eq!(bed.driver.used(0), used);
        bed.driver.clear_rings();
        bed.driver.start(bed.driver.offered());
    }
    bed.seen.set(0);
    bed.offer(0, FLUSH, 0, 0);
    assert_eq!(bed.carry_out(1), [0]);
    assert_eq!(bed.status(0), OK);
}

#[test]
fn a_disk_that_fails_fails_each_request_and_warns_once() {
    let options = File::options().read(true).write(true).open("/dev/full");
    let full = options.unwrap();
    let disk = Disk::of(full.try_clone().unwrap(), DISK_BYTES);
    let bed = Bed::of(disk, full);
    let _threads = bed.threads();
    for _ in 0..20 {
        for lane in 0..LANES {
            let kind = if lane % 2 == 0 { OUT } else { IN };
            bed.offer(lane, kind, u64::from(lane), 512);
        }
        bed.carry_out(LANES);
        for lane in 0..LANES {
            let wanted = if lane % 2 == 0 { IO_ERROR } else { OK };
            assert_eq!(bed.status(lane), wanted);
        }
    }
    assert!(bed.driver.device.warned.load(Ordering::Relaxed));
    assert_eq!(bed.driver.get(0x70), STARTED, "the device still runs");
}

#[test]
fn a_file_that_is_cut_while_requests_are_in_flight_stays_cut() {
    let bed = Bed::new();
    let _threads = bed.threads();
    let offer_all = |kind| {
        for lane in 0..LANES {
            let sector = u64::from(lane) * u64::from(LANE_BYTES / 512);
            bed.offer(lane, kind, sector, LANE_BYTES);
        }
    };
    offer_all(IN);
    bed.driver.notify(0);
    bed.file.set_len(DISK_BYTES / 2).unwrap();
    wait_until("all of them", || bed.driver.used(0) == LANES);
    for lane in 0..LANES {
        assert!([OK, IO_ERROR].contains(&bed.status(lane)));
    }
    bed.seen.set(LANES);
    for kind in [IN, OUT] {
        offer_all(kind);
        bed.carry_out(LANES);
        for lane in 0..LANES {
            assert_eq!(bed.status(lane), IO_ERROR);
        }
    }
    assert_eq!(bed.file.metadata().unwrap().len(), DISK_BYTES / 2);
}

#[test]
fn a_throttled_disk_is_as_slow_as_its_limit_and_its_threads_sleep() {
    let limits = RateLimits {
        bytes: rate(1 << 20),
        operations: None,
    };
    let (bed, limiter) = Bed::limited(limits);
    let threads = bed.threads();
    let pattern = |lane: u16| vec![u8::try_from(lane).unwrap() + 1; LANE_BYTES as usize];
    let sector = |lane: u16| u64::from(lane) * u64::from(LANE_BYTES / 512);
    let started = Instant::now();
    for lane in 0..LANES {
        bed.fill(lane, &pattern(lane));
        bed.offer(lane, OUT, sector(lane), LANE_BYTES);
    }
    bed.carry_out(LANES);
    // The bucket held 1 MiB of the 2.5 MiB, and each thread may begin one request too early.
    let least = Duration::from_millis(1000);
    assert!(started.elapsed() >= least, "{:?}", started.elapsed());
    for lane in 0..LANES {
        assert_eq!(bed.status(lane), OK);
        let mut stored = vec![0; LANE_BYTES as usize];
        let place = u64::from(lane) * u64::from(LANE_BYTES);
        bed.file.read_exact_at(&mut stored, place).unwrap();
        assert!(stored == pattern(lane), "lane {lane}");
    }
    // Each wake-up finds a request that may begin; a loop would count millions.
    let throttled = limiter.throttled();
    assert!((10..1000).contains(&throttled), "{throttled}");
    drop(threads);
}
