//! A source of random numbers (virtio 1.2, section 5.4).

use std::fs::File;
use std::io::{self, Read, Write};

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{BrokenRing, Buffers, Ring, VirtioDevice};

/// The host's random numbers.
const SOURCE: &str = "/dev/urandom";

/// Limit of bytes returned for one chain. The device may write less than there is room for (section
/// 5.4.6.1); a guest that needs more asks again.
pub const ENTROPY_CHAIN_BYTES_MAX: usize = 4096;

/// An entropy device that returns random numbers of the host's kernel.
#[derive(Debug)]
pub struct Entropy {
    source: File,
}

impl Entropy {
    /// Opens the random numbers of the host's kernel.
    ///
    /// # Errors
    ///
    /// Fails when `/dev/urandom` cannot be opened.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            source: File::open(SOURCE)?,
        })
    }
}

impl VirtioDevice for Entropy {
    fn name(&self) -> &str {
        "rng"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[128]
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn serve(&self, _queue: usize, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = ring.memory();
        ring.serve_next(|chain| {
            let Some(Buffers { mut to_driver, .. }) = Buffers::of(&chain, memory) else {
                return 0;
            };
            let mut bytes = [0; ENTROPY_CHAIN_BYTES_MAX];
            let count = to_driver.available_bytes().min(bytes.len());
            let bytes = &mut bytes[..count];
            // `/dev/urandom` returns as many bytes as requested once the kernel is seeded. What
            // could not be filled is not reported as written.
            match (&self.source).read_exact(bytes) {
                Ok(()) if to_driver.write_all(bytes).is_ok() => u32::try_from(count).unwrap_or(0),
                _ => 0,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::virtio::test_driver::{Driver, PART_BYTES, SECOND_PART, STARTED};

    fn started() -> Driver<Entropy> {
        let driver = Driver::of(Entropy::new().unwrap());
        driver.start(driver.offered());
        assert_eq!((driver.get(8), driver.get(0x70)), (4, STARTED));
        driver
    }

    #[test]
    fn buffers_are_filled_with_bytes_that_differ() {
        let driver = started();
        let mut seen = Vec::new();
        for _ in 0..2 {
            driver.offer(0, 0, &[(0x10_0000, 10, true), (SECOND_PART, 54, true)]);
            driver.serve(0);
            assert_eq!(driver.last_used(0), (0, 64));
            let mut bytes = [0; 64];
            let memory = &driver.memory;
            memory
                .read_slice(&mut bytes[..10], GuestAddress(0x10_0000))
                .unwrap();
            memory
                .read_slice(&mut bytes[10..], GuestAddress(SECOND_PART))
                .unwrap();
            seen.push(bytes);
        }
        assert_ne!(seen[0], seen[1]);
        assert!(seen.iter().all(|bytes| bytes.iter().any(|b| *b != 0)));
        assert_eq!(driver.get(0x60), 1, "the driver was notified");
    }

    #[test]
    fn one_chain_gets_no_more_than_the_limit_and_only_where_it_may_be_written() {
        let driver = started();
        driver.offer(0, 0, &[(0x10_0000, 0x10_0000, true)]);
        driver.serve(0);
        assert_eq!(driver.last_used(0), (0, 4096));
        let after: u64 = driver.memory.read_obj(GuestAddress(0x10_1000)).unwrap();
        assert_eq!(after, 0);
        for buffer in [
            (0x30_0000, 64, false),
            (0x30_0000, 0, true),
            (PART_BYTES, 64, true),
            (PART_BYTES - 32, 64, true),
            (u64::MAX - 31, 64, true),
        ] {
            driver.offer(0, 0, &[buffer]);
            driver.serve(0);
            assert_eq!(driver.last_used(0), (0, 0), "{buffer:x?}");
        }
        let untouched: u64 = driver.memory.read_obj(GuestAddress(0x30_0000)).unwrap();
        assert_eq!(untouched, 0);
    }

    proptest! {
        #[test]
        fn no_ring_makes_the_device_panic_or_hang(
            descriptors in proptest::collection::vec(
                (
                    prop_oneof![0..2 * SECOND_PART, any::<u64>()],
                    prop_oneof![0_u32..5000, any::<u32>()],
                    0_u32..16,
                    prop_oneof![0_u16..16, any::<u16>()],
                ),
                16,
            ),
            heads in proptest::collection::vec(prop_oneof![0_u16..16, any::<u16>()], 0..8),
        ) {
            let driver = started();
            for (at, (address, bytes, flags, next)) in (0..).zip(descriptors) {
                driver.descriptor(0, at, address, bytes, flags, next);
            }
            for head in &heads {
                driver.make_available(0, *head);
            }
            driver.serve(0);
            let status = driver.get(0x70);
            prop_assert!(status == STARTED || status == STARTED | 0x40, "{:#x}", status);
        }
    }
}
