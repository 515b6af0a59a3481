//! Guests with disks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use devices::virtio::{Block, BrokenRing, CarriesOut, Chain, Disk, Ring, VirtioDevice};
use ssi_hv::machine::{ConsoleConfig, Outcome, STOP_TIME_MAX};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::support::{LIMIT, Running, Sender, kvm_is_there, machine_with, memory, run};
use tiny_guests::read_two_disks;

/// Creates a disk of one sector, which starts with `byte`.
fn disk(number: usize, byte: u8) -> Block {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [byte; 512]).unwrap();
    let disk = Disk::open(file.path(), true).unwrap();
    Block::new(number, disk)
}

/// Starts a guest that reads two disks of one sector each, which start with `a` and `b`.
fn start(memory: GuestMemoryMmap) -> Running {
    start_with_first(memory, Arc::new(disk(0, b'a')))
}

/// Like [`start`], with this first disk.
fn start_with_first(memory: GuestMemoryMmap, first: Arc<dyn VirtioDevice>) -> Running {
    let (sender, output) = mpsc::channel();
    let console = ConsoleConfig::output_only(Box::new(Sender::new(sender)));
    let code = read_two_disks::code();
    let disks = vec![first, Arc::new(disk(1, b'b'))];
    run(machine_with(code, 1, memory, console, disks), output)
}

#[test]
fn a_guest_reads_its_disks() {
    if !kvm_is_there() {
        return;
    }
    let (outcome, said) = start(memory()).finish();
    assert_eq!((outcome, said.as_str()), (Outcome::Shutdown, "ba"));
}

/// Makes accesses to a page of `memory` fault and wait.
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
    // The first disk waits, and the second is read nevertheless.
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

/// A device that reports each request, and does not finish it before it is allowed to.
#[derive(Debug)]
struct Held {
    disk: Block,
    /// Whether it serves requests on threads, as disks do; otherwise it never finishes.
    on_threads: bool,
    at_work: AtomicBool,
    begun: Mutex<mpsc::Sender<()>>,
    goes_on: Mutex<mpsc::Receiver<()>>,
}

impl Held {
    /// Creates the device, a receiver of its reports, and a sender that lets it finish one request.
    fn new(on_threads: bool) -> (Arc<Self>, mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((begun, has_begun), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
        let held = Self {
            disk: disk(0, b'a'),
            on_threads,
            at_work: AtomicBool::new(false),
            begun: Mutex::new(begun),
            goes_on: Mutex::new(goes_on),
        };
        (Arc::new(held), has_begun, go_on)
    }

    fn wait(&self) {
        self.at_work.store(self.on_threads, Ordering::SeqCst);
        // The receiver is dropped when a test has failed.
        let _ = self.begun.lock().unwrap().send(());
        let _ = self.goes_on.lock().unwrap().recv_timeout(LIMIT);
        self.at_work.store(false, Ordering::SeqCst);
    }
}

impl VirtioDevice for Held {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn device_id(&self) -> u32 {
        self.disk.device_id()
    }

    fn features(&self) -> u64 {
        self.disk.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.disk.queue_sizes()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.disk.read_config(offset, data);
    }

    fn on_threads(&self) -> Option<&dyn CarriesOut> {
        self.on_threads.then_some(self)
    }

    fn serve(&self, _queue: usize, _ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        self.wait();
        Ok(true)
    }

    fn waits_for_host(&self) -> bool {
        self.at_work.load(Ordering::SeqCst)
    }
}

impl CarriesOut for Held {
    fn threads(&self) -> usize {
        1
    }

    fn carry_out(&self, chain: &Chain<'_>, memory: &GuestMemoryMmap) -> u32 {
        self.wait();
        self.disk.carry_out(chain, memory)
    }
}

#[test]
fn what_a_slow_disk_has_begun_is_waited_for_at_the_end() {
    if !kvm_is_there() {
        return;
    }
    let (slow, begun, go_on) = Held::new(true);
    let running = start_with_first(memory(), slow);
    begun.recv_timeout(LIMIT).unwrap();
    running.wait_for(b'b');
    running.handle.stop();
    let later = STOP_TIME_MAX + Duration::from_secs(1);
    assert!(!running.ends_within(later), "it is left behind");
    assert!(running.handle.devices_at_work());
    go_on.send(()).unwrap();
    assert_eq!(running.outcome(), Outcome::Stopped);
    assert!(running.handle.all_vcpus_ended(), "nobody is left");
}

#[test]
fn a_device_that_always_has_more_to_do_stops_after_a_turn() {
    if !kvm_is_there() {
        return;
    }
    let (busy, begun, go_on) = Held::new(false);
    let running = start_with_first(memory(), busy);
    begun.recv_timeout(LIMIT).unwrap();
    running.handle.pause();
    go_on.send(()).unwrap();
    assert!(running.handle.wait_until_paused(LIMIT / 2));
    assert!(begun.try_recv().is_err(), "it had another turn");
    running.handle.resume();
    begun.recv_timeout(LIMIT).expect("it continues");
    running.handle.stop();
    go_on.send(()).unwrap();
    assert_eq!(running.outcome(), Outcome::Stopped);
    assert!(running.handle.all_vcpus_ended(), "nobody is left");
}
