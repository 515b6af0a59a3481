use super::*;
use std::sync::atomic::{AtomicU32, Ordering};

#[test]
fn bytes_of_any_length_are_copied_to_and_from_any_offset() {
    let memory = Mapping::anonymous(3 * PAGE_SIZE).expect("three pages");
    for (offset, length) in [(0, 0), (1, 7), (5, 8), (4090, 4103), (3 * PAGE_SIZE - 1, 1)] {
        let bytes: Vec<u8> = (1..=250).cycle().take(length).collect();
        memory.write(offset, &bytes);
        let mut found = vec![0; length];
        memory.read(offset, &mut found);
        assert_eq!(found, bytes, "{length} bytes at {offset}");
        let mut appended = vec![255];
        memory.append_to(&mut appended, offset, length);
        assert_eq!((appended[0], &appended[1..]), (255, &bytes[..]));
    }
    // What was not written is unchanged.
    let mut first = [7; 1];
    memory.read(0, &mut first);
    assert_eq!(first, [0]);
}

#[test]
#[should_panic(expected = "2 bytes at 4095 of a mapping of 4096")]
fn a_copy_past_the_end_panics() {
    let memory = Mapping::anonymous(PAGE_SIZE).expect("a page");
    memory.read(PAGE_SIZE - 1, &mut [0; 2]);
}

#[test]
fn a_slice_starts_with_zeroes_and_is_shared_by_threads() {
    let slice = ZeroedSlice::<AtomicU32>::new(5000).expect("five pages");
    assert_eq!(slice.len(), 5000);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| slice[4999].fetch_add(1, Ordering::Relaxed));
        }
    });
    assert_eq!(slice[4999].load(Ordering::Relaxed), 2);
    assert!(
        slice[..4999]
            .iter()
            .all(|word| word.load(Ordering::Relaxed) == 0)
    );
    assert!(ZeroedSlice::<AtomicU32>::new(0).expect("empty").is_empty());
    assert!(ZeroedSlice::<AtomicU32>::new(usize::MAX).is_err());
}

#[test]
fn a_large_mapping_is_unmapped_from_its_end_in_parts() {
    assert_eq!(parts(1).collect::<Vec<_>>(), [(0, 1)]);
    assert_eq!(parts(UNMAP_BYTES).collect::<Vec<_>>(), [(0, UNMAP_BYTES)]);
    let bytes = 2 * UNMAP_BYTES + PAGE_SIZE;
    let expected = [
        (2 * UNMAP_BYTES, PAGE_SIZE),
        (UNMAP_BYTES, UNMAP_BYTES),
        (0, UNMAP_BYTES),
    ];
    assert_eq!(parts(bytes).collect::<Vec<_>>(), expected);
    let memory = Mapping::anonymous(bytes).expect("address space");
    memory.write(bytes - 1, &[1]);
    drop(memory);
}
