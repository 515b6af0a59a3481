//! Discards and writes of zeroes.

use super::*;

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
    for ranges in [&[(0, 1, 1)][..], &[(0, 8, 0), (8, 8, 1)]] {
        let data = bed.put_ranges(ranges);
        assert_eq!(bed.request(DISCARD, 0, &[data]), UNSUPPORTED, "unmap");
    }
    let (address, ..) = bed.put_ranges(&[(0, 1, 0)]);
    assert_eq!(bed.request(DISCARD, 0, &[(address, 15, false)]), IO_ERROR);
    let image = std::fs::read(bed.file.path()).unwrap();
    assert!(image.iter().all(|byte| *byte == 1));
}
