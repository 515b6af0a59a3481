//! Properties for all requests and all descriptor chains.

use proptest::prelude::*;

use super::*;

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
