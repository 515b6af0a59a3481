use super::*;
use crate::page::{PAGE_SIZE, PageIndex};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use userfaultfd::EventBuffer;

/// A call that reads a page of the guest view, as a device does which writes to a disk.
fn write_out(file: &File, page: usize) -> io::Result<isize> {
    let page = std::ptr::with_exposed_provenance(page);
    // SAFETY: the kernel checks the range, and only reads it.
    match unsafe { libc::write(file.as_raw_fd(), page, PAGE_SIZE) } {
        -1 => Err(io::Error::last_os_error()),
        count => Ok(count),
    }
}

#[test]
fn a_call_that_waits_for_a_page_fails_and_writes_nothing() {
    let memory = GuestMemory::new(4 * PAGE_SIZE).expect("a small memory");
    let uffd = Uffd::new().expect("userfaultfd, as root has it");
    let page = memory.guest_page(PageIndex::new(1));
    uffd.register(page, 2 * PAGE_SIZE).expect("registered");
    let file = tempfile::tempfile().expect("a file");
    let address = page.expose_provenance();
    let limit = Instant::now() + Duration::from_secs(10);
    let result = std::thread::scope(|scope| {
        let device = scope.spawn(|| write_out(&file, address));
        let mut events = EventBuffer::new(1);
        while uffd.read_faults(&mut events, |_| {}).expect("read") == 0 {
            assert!(Instant::now() < limit, "no fault");
            std::thread::yield_now();
        }
        uffd.end(&memory).expect("ended");
        device.join().expect("it ends")
    });
    let error = result.expect_err("no bytes were there");
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    assert_eq!(file.metadata().expect("fstat").len(), 0);
    // A touch that comes later fails as well, and memory that was not registered stays.
    assert!(write_out(&file, address + PAGE_SIZE).is_err());
    assert!(write_out(&file, address - PAGE_SIZE).is_ok());
    uffd.end(&memory).expect("nothing is left to do");
}
