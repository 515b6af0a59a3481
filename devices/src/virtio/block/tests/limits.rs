//! Tests of disks with limits, on a clock of their own.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::virtio::rate::tests::{TestClock, rate};
use crate::virtio::{RateLimiter, RateLimits};

struct Limited {
    bed: Bed,
    clock: TestClock,
    limiter: Arc<RateLimiter>,
}

impl Limited {
    fn new(limits: RateLimits) -> Self {
        let clock = TestClock::new();
        let limiter = Arc::new(clock.limiter(limits, 1));
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(DISK_BYTES).unwrap();
        let disk = Disk::open(file.path(), false).unwrap();
        let driver = Driver::of(Block::new(3, disk).limited(Arc::clone(&limiter)));
        driver.start(driver.offered());
        let bed = Bed { driver, file };
        Self {
            bed,
            clock,
            limiter,
        }
    }

    /// Offers a write of one sector, whose request is at a place of its own.
    fn offer(&self, number: u16) {
        let at = HEADER + u64::from(number) * 64;
        self.bed.put(at, &OUT.to_le_bytes());
        self.bed.put(at + 8, &u64::from(number).to_le_bytes());
        self.bed.put(at + 16, &[NONE]);
        let byte = u8::try_from(number).unwrap() + 1;
        let data = DATA + u64::from(number) * 512;
        self.bed.put(data, &[byte; 512]);
        let chain = [(at, 16, false), (data, 512, false), (at + 16, 1, true)];
        self.bed.driver.offer(0, number * 3, &chain);
    }

    fn status(&self, number: u16) -> u8 {
        self.bed.get(HEADER + u64::from(number) * 64 + 16, 1)[0]
    }

    fn sector(&self, number: u16) -> Vec<u8> {
        let image = std::fs::read(self.bed.file.path()).unwrap();
        let start = usize::from(number) * 512;
        image[start..start + 512].to_vec()
    }
}

#[test]
fn a_request_beyond_the_limit_stays_in_its_ring_until_it_may_begin() {
    for limits in [
        RateLimits {
            operations: rate(2),
            bytes: None,
        },
        RateLimits {
            operations: None,
            bytes: rate(1024),
        },
    ] {
        let disk = Limited::new(limits);
        (0..4).for_each(|number| disk.offer(number));
        disk.bed.driver.serve(0);
        assert_eq!(disk.bed.driver.used(0), 2, "{limits:?}");
        assert_eq!(disk.limiter.throttled(), 1);
        assert_eq!([disk.status(1), disk.status(2)], [OK, NONE]);
        assert_eq!(disk.sector(2), [0; 512]);
        disk.bed.driver.serve(0);
        assert_eq!(disk.bed.driver.used(0), 2, "no time has passed");
        disk.clock.advance(Duration::from_millis(500));
        disk.bed.driver.serve(0);
        assert_eq!(disk.bed.driver.used(0), 3);
        assert_eq!([disk.status(2), disk.status(3)], [OK, NONE]);
        disk.clock.advance(Duration::from_millis(500));
        disk.bed.driver.serve(0);
        assert_eq!(disk.status(3), OK);
        for number in 0..4 {
            assert_eq!(
                disk.sector(number),
                [u8::try_from(number).unwrap() + 1; 512]
            );
        }
        let throttled = disk.limiter.throttled();
        disk.bed.driver.serve(0);
        assert_eq!(disk.limiter.throttled(), throttled, "nothing waits");
    }
}

#[test]
fn a_reset_returns_what_was_throttled_and_fills_no_bucket() {
    let limits = RateLimits {
        operations: rate(1),
        bytes: None,
    };
    let disk = Limited::new(limits);
    (0..2).for_each(|number| disk.offer(number));
    disk.bed.driver.serve(0);
    assert_eq!(disk.bed.driver.used(0), 1);
    disk.bed.driver.clear_rings();
    disk.bed.driver.start(disk.bed.driver.offered());
    disk.offer(5);
    disk.bed.driver.serve(0);
    assert_eq!(disk.status(5), NONE);
    disk.clock.advance(Duration::from_millis(1001));
    disk.bed.driver.serve(0);
    assert_eq!((disk.status(5), disk.status(1)), (OK, NONE));
}

#[test]
fn ranges_that_are_given_back_are_one_operation_and_no_bytes() {
    let limits = RateLimits {
        operations: rate(1000),
        bytes: rate(4096),
    };
    let disk = Limited::new(limits);
    for kind in [DISCARD, ZEROES] {
        for _ in 0..3 {
            let ranges = disk.bed.put_ranges(&[(0, 512, u32::from(kind == ZEROES))]);
            assert_eq!(disk.bed.request(kind, 0, &[ranges]), OK);
        }
    }
    assert_eq!(disk.limiter.throttled(), 0);
}
