//! Guests with disks.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use devices::virtio::{Block, Disk, VirtioDevice};
use ssi_hv::machine::{ConsoleConfig, Outcome, STOP_TIME_MAX};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::guests::read_two_disks;
use crate::support::{Running, Sender, kvm_is_there, machine_with, memory, run};

/// A guest that reads two disks of one sector each, which begin with `a` and `b`.
fn start(memory: GuestMemoryMmap) -> Running {
    let disks = b"ab".iter().enumerate().map(|(number, byte)| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [*byte; 512]).unwrap();
        let disk = Disk::open(file.path(), true).unwrap();
        Arc::new(Block::new(number, disk)) as Arc<dyn VirtioDevice>
    });
    let (sender, output) = mpsc::channel();
    let console = ConsoleConfig::output_only(Box::new(Sender::new(sender)));
    let code = read_two_disks::code();
    run(
        machine_with(code, 1, memory, console, disks.collect()),
        output,
    )
}

#[test]
fn a_guest_reads_its_disks() {
    if !kvm_is_there() {
        return;
    }
    let (outcome, said) = start(memory()).finish();
    assert_eq!((outcome, said.as_str()), (Outcome::Shutdown, "ba"));
}

/// Makes a page of `memory` one that is waited for.
fn absent(memory: &GuestMemoryMmap, address: u64) -> Option<(userfaultfd::Uffd, *mut u8)> {
    let page = memory.get_host_address(GuestAddress(address)).unwrap();
    let uffd = userfaultfd::UffdBuilder::new()
        .close_on_exec(true)
        .user_mode_only(false)
        .create()
        .inspect_err(|error| println!("SKIPPED: no userfaultfd for faults of the kernel: {error}"))
        .ok()?;
    uffd.register(page.cast(), 4096).unwrap();
    Some((uffd, page))
}

#[test]
fn a_device_that_waits_for_a_page_does_not_hold_up_another() {
    if !kvm_is_there() {
        return;
    }
    let memory = memory();
    let Some((uffd, page)) = absent(&memory, 0x3f_0000) else {
        return;
    };
    let running = start(memory.clone());
    let event = uffd.read_event().unwrap().unwrap();
    assert!(matches!(event, userfaultfd::Event::Pagefault { .. }));
    // The first disk waits now, and the second is read all the same.
    running.wait_for(b'b');
    // SAFETY: the page is part of `memory`, which is alive, and registered.
    unsafe { uffd.zeropage(page.cast(), 4096, true) }.unwrap();
    running.wait_for(b'a');
    assert_eq!(running.outcome(), Outcome::Shutdown);
}

#[test]
fn a_device_that_waits_for_a_page_does_not_keep_the_machine_from_stopping() {
    if !kvm_is_there() {
        return;
    }
    let memory = memory();
    let Some((uffd, page)) = absent(&memory, 0x3f_0000) else {
        return;
    };
    let running = start(memory.clone());
    uffd.read_event().unwrap().unwrap();
    running.wait_for(b'b');
    let stopped_at = Instant::now();
    running.handle.stop();
    assert_eq!(running.outcome(), Outcome::Stopped);
    let taken = stopped_at.elapsed();
    assert!(taken >= STOP_TIME_MAX, "the device went on: {taken:?}");
    assert!(taken < STOP_TIME_MAX + Duration::from_secs(10), "{taken:?}");
    assert!(!running.handle.all_vcpus_ended(), "it is left behind");
    // SAFETY: the page is part of `memory`, which is alive, and registered.
    unsafe { uffd.zeropage(page.cast(), 4096, true) }.unwrap();
}
