//! Files of working sets: as they were written, and otherwise.

use super::*;
use proptest::prelude::*;

const SUBJECT: Subject = Subject {
    guest_bytes: 1 << 30,
    span_pages: 1 << 18,
    image_bytes: 12345,
    image_checksum: 0xdead_beef,
};

fn run(first: u32, count: u32) -> PageRange {
    PageRange::new(PageIndex::new(first), count)
}

/// A file with a changed byte and a checksum that is right all the same.
fn resealed(mut bytes: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    bytes[at] = value;
    let end = bytes.len() - CHECKSUM_BYTES;
    let checksum = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn what_does_not_fit_is_named() {
    let bytes = encode(&SUBJECT, &[run(7, 16), run(1, 1)]);
    let refused = |bytes: &[u8]| decode(bytes, &SUBJECT).expect_err("refused").to_string();
    assert!(refused(&[]).contains("0 bytes, 52 expected"));
    assert!(refused(&bytes[..bytes.len() - 1]).contains("cut short"));
    assert!(refused(&[&bytes[..], &[0]].concat()).contains("69 bytes, 68 expected"));
    assert!(refused(&resealed(bytes.clone(), 0, b'X')).contains("not a working set"));
    assert!(refused(&resealed(bytes.clone(), 8, 9)).contains("version 9"));
    assert!(refused(&resealed(bytes.clone(), 13, 0x40)).contains("page size"));
    assert!(refused(&resealed(bytes.clone(), 20, 1)).contains("size of guest memory"));
    assert!(refused(&resealed(bytes.clone(), 33, 1)).contains("kernel or initial"));
    assert!(refused(&resealed(bytes.clone(), 40, 1)).contains("kernel or initial"));
    // A count of runs that would need 32 GiB.
    assert!(refused(&resealed(bytes.clone(), 47, 0xff)).contains("1048576 is the limit"));
    // Pages beyond the guest, and a run of none.
    assert!(refused(&resealed(bytes.clone(), 51, 0xff)).contains("the guest has 262144"));
    assert!(refused(&resealed(bytes.clone(), 52, 0)).contains("names 0 pages"));
    let mut damaged = bytes;
    damaged[50] ^= 4;
    assert!(refused(&damaged).contains("damaged"));
}

#[test]
fn a_file_appears_whole_or_not_at_all() {
    let directory = std::env::temp_dir().join(format!("ssi-hv-ws-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let path = directory.join("set");
    check_writable(&path).expect("writable");
    assert!(!path.exists());
    // A process of this number was killed here.
    fs::write(temporary(&path), b"half").expect("written");
    check_writable(&path).expect("writable");
    fs::write(temporary(&path), b"half").expect("written");
    let runs = vec![run(3, 4), run(100, 1)];
    save(&path, &encode(&SUBJECT, &runs)).expect("saved");
    save(&path, &encode(&SUBJECT, &runs)).expect("replaced");
    assert_eq!(load(&path, &SUBJECT).expect("fits"), runs);
    assert_eq!(fs::read_dir(&directory).expect("a directory").count(), 1);
    for bad in [directory.join("none/set"), directory.clone()] {
        assert!(check_writable(&bad).is_err());
        let error = save(&bad, b"").expect_err("not written").to_string();
        assert!(error.contains("has room"), "{error}");
    }
    assert!(matches!(
        load(&directory.join("absent"), &SUBJECT),
        Err(WorkingSetError::Read(..))
    ));
    // More than any working set has is not read, however long it is.
    let endless = load(Path::new("/dev/zero"), &SUBJECT).expect_err("no working set");
    assert!(matches!(endless, WorkingSetError::Magic), "{endless}");
    fs::remove_dir_all(directory).expect("removed");
}

#[test]
fn a_page_is_recorded_at_its_first_touch_only() {
    let homes = HomeTable::new(crate::homes::NodeId(0), &[run(0, 8192)], None);
    let recorder = Recorder::new(&homes).expect("a small guest");
    for touched in [
        run(64, 16),
        run(80, 2),
        run(8191, 1),
        run(70, 1),
        run(64, 1),
    ] {
        recorder.record(touched);
    }
    assert_eq!(recorder.runs(), [run(64, 18), run(8191, 1)]);
    assert!(!recorder.is_full());
}

proptest! {
    #[test]
    fn sets_round_trip(pages in prop::collection::vec((0_u32..1 << 18, 1_u32..64), 0..200)) {
        let runs: Vec<_> = pages
            .into_iter()
            .map(|(first, count)| run(first, count))
            .filter(|run| run.end() <= SUBJECT.span_pages)
            .collect();
        let bytes = encode(&SUBJECT, &runs);
        prop_assert_eq!(decode(&bytes, &SUBJECT).expect("fits"), runs);
        for cut in [1, bytes.len() / 2, bytes.len() - 1] {
            prop_assert!(decode(&bytes[..cut], &SUBJECT).is_err());
        }
    }

    #[test]
    fn no_bytes_make_decode_panic_or_accept(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if bytes.len() >= 8 && bytes[0] % 2 == 0 {
            bytes[..8].copy_from_slice(&MAGIC);
        }
        prop_assert!(decode(&bytes, &SUBJECT).is_err());
    }
}
