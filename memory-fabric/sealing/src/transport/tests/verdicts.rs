//! What follows from verdicts on pages that do not open.

use super::*;

#[test]
fn a_run_with_a_page_that_is_not_read_now_ends_and_its_other_pages_are_read_alone() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    let mut random = Random(6);
    let plain = [random.page(), random.page()];
    vm.write(0, &plain[0]);
    vm.write(4096, &plain[1]);
    vm.bench.has_time.store(true, Ordering::Relaxed);
    wire.forge(4096, [1; PAGE_SIZE], usize::MAX);
    vm.transport.post_read_run(Ticket(3), 0, 2).expect("room");
    let mut unread = 0;
    for _ in 0..4 {
        vm.transport.poll(&mut |completion| {
            assert!(matches!(completion, Completion::Unread(Ticket(3))));
            unread += 1;
        });
    }
    assert_eq!((unread, vm.faults().len()), (1, 1));
    assert_eq!(vm.transport.in_flight(), 0);
    vm.transport.post_read(Ticket(4), 0).expect("room");
    assert_eq!(vm.pages(), [(4, plain[0].to_vec())]);
    // A single page is lost then.
    vm.transport.post_read(Ticket(5), 4096).expect("room");
    assert_eq!(vm.pages(), []);
    assert_eq!(vm.transport.in_flight(), 1);
}

#[test]
fn no_page_is_read_again_for_ever() {
    for run in [None, Some(1)] {
        let wire = Wire::new();
        let mut vm = Vm::new(&wire);
        vm.write(0, &Random(8).page());
        vm.bench.has_copy.store(true, Ordering::Relaxed);
        wire.forge(0, [1; PAGE_SIZE], usize::MAX);
        match run {
            None => vm.transport.post_read(Ticket(1), 0).expect("room"),
            Some(pages) => {
                let posted = vm.transport.post_read_run(Ticket(1), 0, pages);
                posted.expect("room");
            }
        }
        let mut unread = 0;
        for _ in 0..4 * VERDICTS_MAX {
            vm.transport.poll(&mut |completion| {
                assert!(matches!(completion, Completion::Unread(Ticket(1))));
                unread += 1;
            });
        }
        assert_eq!(vm.stats.rejected.get(), u64::from(2 * VERDICTS_MAX));
        let faults = vm.faults();
        let (donor, offset) = (None, 0);
        let never = Fault::NeverGenuine { donor, offset };
        let is_single = run.is_none();
        assert_eq!(faults.last() == Some(&never), is_single);
        assert_eq!(unread, u32::from(!is_single));
        assert_eq!(vm.transport.in_flight(), usize::from(is_single));
    }
}

#[test]
fn a_page_with_another_copy_is_read_until_a_donor_sends_it() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    let plain = Random(2).page();
    vm.write(0, &plain);
    vm.bench.has_copy.store(true, Ordering::Relaxed);
    // Two attempts at one donor, two at the next.
    wire.forge(0, [1; PAGE_SIZE], 4);
    vm.transport.post_read(Ticket(1), 0).expect("room");
    let mut came = vm.pages();
    came.extend(vm.pages());
    assert_eq!(came, [(1, plain.to_vec())]);
    assert_eq!(vm.faults().len(), 2);
    assert_eq!(wire.0.lock().unwrap().rereads, 2);
    assert_eq!(vm.stats.rejected.get(), 4);
}
