use super::*;
use fabric_pages::uffd::Uffd;
use std::fs::File;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vm_memory::FileOffset;

const PAGE: usize = 4096;
const BASE: u64 = 0x10_0000;

/// Memory of four pages, of which the third is poisoned.
fn memory() -> (GuestMemoryMmap, Uffd) {
    let file = File::from(
        rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("a file"),
    );
    file.set_len(4 * PAGE as u64).expect("room");
    let range = (GuestAddress(BASE), 4 * PAGE, Some(FileOffset::new(file, 0)));
    let memory = GuestMemoryMmap::from_ranges_with_files([range]).expect("a small memory");
    let start = memory.get_host_address(GuestAddress(BASE)).expect("there");
    let uffd = Uffd::new().expect("a userfaultfd");
    uffd.register(start, 4 * PAGE).expect("registered");
    for page in [0, 1, 3] {
        let zeroed = uffd.zero(start.wrapping_add(page * PAGE), 1);
        assert_eq!(zeroed.expect("zeroed"), 1);
    }
    uffd.poison(start.wrapping_add(2 * PAGE)).expect("poisoned");
    (memory, uffd)
}

/// One test, since there is one handler.
#[test]
fn a_memory_error_is_found_by_looking_and_stops_a_thread_that_does_not_look() {
    let (memory, _uffd) = memory();
    let errors = MemoryErrors::handle(&memory).expect("a handler");
    let place = |page: usize| {
        memory
            .get_host_address(GuestAddress(BASE))
            .unwrap()
            .wrapping_add(page * PAGE)
    };
    for (page, usable) in [(0, true), (2, false), (1, true), (2, false), (3, true)] {
        assert_eq!(is_usable(place(page).wrapping_add(77)), usable, "{page}");
    }
    let in_guest = guest_address(&memory, place(2).addr() as u64 + 5);
    assert_eq!(in_guest, Some(GuestAddress(BASE + 2 * PAGE as u64 + 5)));
    let before = guest_address(&memory, place(0).addr() as u64 - 1);
    assert_eq!(before, None);

    // As a device that is in the middle of an access. The thread is left behind.
    assert!(errors.stuck().read().is_err(), "nothing has happened yet");
    let (memory, pages) = (Arc::new(memory), Arc::new(()));
    let (of_thread, running) = (Arc::clone(&memory), Arc::clone(&pages));
    thread::spawn(move || {
        let mut bytes = [0; 8];
        let lost = GuestAddress(BASE + 2 * PAGE as u64);
        let _ = vm_memory::Bytes::read_slice(&*of_thread, &mut bytes, lost);
        drop(running);
    });
    let deadline = Instant::now() + Duration::from_secs(30);
    while errors.stuck().read().is_err() {
        assert!(Instant::now() < deadline, "the thread was not stopped");
        thread::yield_now();
    }
    assert_eq!(Arc::strong_count(&pages), 2, "the thread has continued");
    // The other end of what a vCPU does: an access that KVM has reported by the signal.
    let (read, address) = while_inside(|| 5);
    assert_eq!((read, address), (5, None));
}
