//! Guests with a balloon.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use devices::virtio::{Balloon, FreePages, FreeRange, VirtioDevice};
use ssi_hv::machine::{ConsoleConfig, Outcome};

use crate::support::{self, LIMIT, kvm_is_there, machine_with, memory, run};
use tiny_guests::report_free_pages;

/// Records the guest's free ranges.
#[derive(Debug, Default)]
struct FreeRanges(Mutex<Vec<(u64, u64)>>);

impl FreePages for FreeRanges {
    fn discard(&self, ranges: &[FreeRange]) {
        let ranges = ranges.iter().map(|range| (range.start.0, range.bytes));
        self.0.lock().unwrap().extend(ranges);
    }
}

#[test]
fn a_guest_reports_free_pages_through_its_balloon() {
    if !kvm_is_there() {
        return;
    }
    for balloon in [true, false] {
        let ranges = Arc::new(FreeRanges::default());
        let free_pages: Arc<dyn FreePages> = Arc::clone(&ranges) as _;
        let devices = balloon.then(|| Arc::new(Balloon::new(free_pages)) as Arc<dyn VirtioDevice>);
        let (sender, output) = mpsc::channel();
        let console = ConsoleConfig::output_only(Box::new(support::Sender::new(sender)));
        let machine = machine_with(
            report_free_pages::code(),
            1,
            memory(),
            console,
            devices.into_iter().collect(),
        );
        let running = run(machine, output);
        let handle = running.handle.clone();
        let (outcome, said) = running.finish();
        assert_eq!(outcome, Outcome::Shutdown);
        assert!(
            handle.all_vcpus_ended(),
            "the device's thread has ended too"
        );
        let reported = ranges.0.lock().unwrap();
        if balloon {
            assert_eq!(
                (said.as_str(), reported.as_slice()),
                ("f", &[(0x30_0000, 0x2000)][..])
            );
        } else {
            assert_eq!((said.as_str(), reported.len()), ("?", 0));
        }
    }
}

/// A device that stays busy until it is allowed to finish.
#[derive(Debug)]
struct AtWork {
    begun: Mutex<mpsc::Sender<()>>,
    leave: Mutex<mpsc::Receiver<()>>,
}

impl FreePages for AtWork {
    fn discard(&self, _: &[FreeRange]) {
        self.begun.lock().unwrap().send(()).unwrap();
        self.leave.lock().unwrap().recv_timeout(LIMIT).unwrap();
    }
}

#[test]
fn pausing_waits_for_a_device_that_is_at_work() {
    if !kvm_is_there() {
        return;
    }
    let ((begun, at_work), (leave, may_leave)) = (mpsc::channel(), mpsc::channel());
    let balloon = Balloon::new(Arc::new(AtWork {
        begun: Mutex::new(begun),
        leave: Mutex::new(may_leave),
    }));
    let (sender, output) = mpsc::channel();
    let console = ConsoleConfig::output_only(Box::new(support::Sender::new(sender)));
    let code = report_free_pages::code();
    let machine = machine_with(code, 1, memory(), console, vec![Arc::new(balloon)]);
    let running = run(machine, output);
    at_work.recv_timeout(LIMIT).unwrap();
    running.handle.pause();
    let moment = Duration::from_millis(100);
    assert!(!running.handle.wait_until_paused(moment), "it writes");
    leave.send(()).unwrap();
    assert!(running.handle.wait_until_paused(LIMIT));
    running.handle.resume();
    assert_eq!(running.finish(), (Outcome::Shutdown, "f".to_owned()));
}
