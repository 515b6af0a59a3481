//! Pages that a copy was made without: they are waited for, kept where they may be right, and known as
//! lost when they are.

use super::copies::{found, repair, with_one_out};
use super::*;

const PAGE: u64 = PAGE_SIZE as u64;

fn trust(vm: &Vm, donor: usize) {
    vm.bed.donors[donor].lock().expect("no panic").forgery = None;
}

/// Two donors, of which the second one has no right copy of page 7, and the first one has.
fn with_a_hole() -> Vm {
    let mut vm = with_one_out();
    vm.forge(0, FLIPPED_BIT);
    repair(&mut vm);
    trust(&vm, 0);
    let set = &vm.bed.set;
    assert!(set.lacks(1, 7 * PAGE) && !(0..7).any(|page| set.lacks(1, page * PAGE)));
    vm
}

#[test]
fn no_number_of_pages_that_could_not_be_copied_is_blamed_on_the_new_donor() {
    const PAGES: u64 = 200;
    let mut vm = Vm::of(Bed::new(&[1, 1], 1));
    (0..PAGES).for_each(|page| vm.write(page * PAGE));
    vm.bed.cut(1);
    assert!(!vm.bed.set.down(1, "cut"));
    (0..PAGES).for_each(|page| vm.write(page * PAGE));
    vm.forge(0, FLIPPED_BIT);
    repair(&mut vm);
    trust(&vm, 0);
    let set = Arc::clone(&vm.bed.set);
    let wrong = set.wrong_pieces.get();
    for offset in (0..PAGES).map(|page| page * PAGE) {
        assert!(set.lacks(1, offset));
        set.note_wrong(1, offset);
        assert!(vm.read(offset, None), "read from the donor that has it");
    }
    assert_eq!(set.wrong_pieces.get(), wrong);
    assert_eq!(vm.events(), (vec![0], vec![1]), "it was out before");
    (0..PAGES).for_each(|page| vm.write(page * PAGE));
    assert!(!set.copies().has_holes());
    assert!((0..PAGES).all(|page| found(&vm, 1, page * PAGE) == found(&vm, 0, page * PAGE)));
}

#[test]
fn a_page_that_only_one_donor_may_have_is_waited_for_and_then_known_as_lost() {
    let mut vm = with_a_hole();
    let set = Arc::clone(&vm.bed.set);
    vm.bed.cut(0);
    assert!(set.down(0, "cut"), "the guest waits for it");
    vm.bed.restore(0);
    assert!(set.up(0));
    assert!(vm.read(7 * PAGE, None));
    assert_eq!(set.copies().lost_pages(), 0);
    vm.bed.cut(0);
    assert!(set.down(0, "cut"));
    let loss = set.lost(0, "it did not return");
    assert_eq!(loss, Loss::OfCopies { was_awaited: true });
    assert_eq!(set.copies().lost_pages(), 1);
    let lost = ReplicaEvent::PagesLost { donor: 0, pages: 1 };
    assert!(vm.bed.events.lock().expect("no panic").contains(&lost));
    assert!((0..7).all(|page| vm.read(page * PAGE, None)));
    assert!(!vm.read(7 * PAGE, None), "it does not open");
    assert!(set.is_last_of(1, 7 * PAGE) && set.lacks(1, 7 * PAGE));
    let wrong = set.wrong_pieces.get();
    set.note_wrong(1, 7 * PAGE);
    assert_eq!(set.wrong_pieces.get(), wrong, "it was not given the page");
    vm.write(7 * PAGE);
    assert_eq!(set.copies().lost_pages(), 0);
    assert!(vm.read(7 * PAGE, None));
}

#[test]
fn a_page_that_the_guest_has_freed_is_not_lost() {
    let mut vm = with_a_hole();
    let set = Arc::clone(&vm.bed.set);
    vm.evictor.post_drop(6 * PAGE, 2).expect("room");
    assert!(!set.copies().has_holes());
    vm.bed.cut(0);
    assert!(!set.down(0, "cut"), "nothing is waited for");
}

#[test]
fn a_copy_that_is_made_again_keeps_a_page_that_the_other_lacks() {
    let mut vm = with_a_hole();
    let set = Arc::clone(&vm.bed.set);
    // Page 3 of it was wrong twice. The donor is needed for page 7.
    assert!(set.read_elsewhere(0, 3 * PAGE));
    assert!(set.copies().readable(0).iter().flatten().count() == 1);
    assert!(vm.read(3 * PAGE, None));
    assert!(
        !set.is_last_of(1, 7 * PAGE),
        "it is there when that is filled"
    );
    assert_eq!(set.copies().lost_pages(), 0);
    poll_until(&mut vm.evictor, "filled", |_| set.copies().degraded() == 0);
    assert!(!set.lacks(0, 7 * PAGE) && set.lacks(1, 7 * PAGE));
    assert!((0..8).all(|page| vm.read(page * PAGE, None)));
    let right = page_with(vm.version);
    assert!(found(&vm, 0, 7 * PAGE).expect("filled") == right);
}

#[test]
fn what_the_new_copy_has_is_read_twice() {
    let mut vm = Vm::of(Bed::new(&[1, 1], 1));
    vm.write(0);
    vm.bed.cut(1);
    assert!(!vm.bed.set.down(1, "cut"));
    vm.forge(0, FLIPPED_BIT);
    vm.forge(1, |now, before, other, number| match number {
        1 => FLIPPED_BIT(now, before, other, number),
        _ => now.to_vec(),
    });
    repair(&mut vm);
    assert_eq!(vm.forged(1), 1);
    assert!(!vm.bed.set.copies().has_holes());
    assert_ne!(vm.bed.set.lost(0, "it is hostile"), Loss::OfBlocks);
    assert!(vm.read(0, None));
}

/// Drains a donor. Returns how many copies stayed.
fn drain(vm: &mut Vm, donor: usize) -> u32 {
    let (sender, ended) = std::sync::mpsc::channel();
    let observer = Box::new(move |event| {
        if let LeaveEvent::Ended { stayed } = event {
            let _ = sender.send(stayed);
        }
    });
    let left = vm.bed.set.leave(donor, &[], observer);
    assert_eq!(left, Ok(1));
    let mut stayed = None;
    poll_until(&mut vm.evictor, "it ended", |_| {
        stayed = ended.try_recv().ok();
        stayed.is_some()
    });
    stayed.expect("it ended")
}

#[test]
fn a_move_gives_up_no_copy_of_a_page_that_was_right_nowhere_when_it_was_read() {
    for layout in [None, Some("2+1")] {
        let mut vm = match layout {
            None => Vm::of(Bed::new(&[2; 3], 1)),
            Some(layout) => Vm::new(layout, &[2; 4], 1),
        };
        (0..2).for_each(|page| vm.write(page * PAGE));
        let set = Arc::clone(&vm.bed.set);
        let donors = || {
            set.copies()
                .all(0)
                .map(|copy| usize::from(copy.place.donor))
        };
        let before: Vec<_> = donors().collect();
        let (leaving, other) = (before[0], before[1]);
        // The network changes what both send.
        for donor in [leaving, other] {
            vm.forge(donor, FLIPPED_BIT);
        }
        assert_eq!(drain(&mut vm, leaving), 1, "{layout:?}");
        assert!(donors().eq(before.iter().copied()), "{layout:?}");
        assert!(!set.copies().has_holes(), "of the new place");
        for donor in [leaving, other] {
            trust(&vm, donor);
        }
        poll_until(&mut vm.evictor, "whole", |_| set.copies().degraded() == 0);
        // The pages are right in the copy that was to be given up.
        if layout.is_none() {
            let copy = |page: u64| found(&vm, leaving, page * PAGE).expect("a copy");
            assert!((0..2).all(|page| copy(page) == page_with(page + 1)));
        }
        assert!((0..2).all(|page| vm.read(page * PAGE, None)));
        assert_eq!(drain(&mut vm, leaving), 0, "{layout:?}");
        assert!(donors().all(|donor| donor != leaving));
        assert_ne!(set.lost(other, "it was killed"), Loss::OfBlocks);
        assert!((0..2).all(|page| vm.read(page * PAGE, None)));
    }
}

#[test]
fn a_move_of_a_page_that_is_known_to_be_in_no_copy_goes_on() {
    let mut vm = Vm::of(Bed::new(&[2; 3], 1));
    vm.write(0);
    let set = Arc::clone(&vm.bed.set);
    let places: Vec<_> = set.copies().all(0).map(|copy| copy.place).collect();
    for place in &places {
        vm.forge(place.donor.into(), FLIPPED_BIT);
        set.copies().add_hole(*place, 0);
    }
    assert_eq!(set.copies().lost_pages(), 1);
    assert_eq!(drain(&mut vm, places[0].donor.into()), 0);
    let new = set.copies().copy(0, 0).place;
    assert!(new.donor != places[0].donor && set.copies().lacks(new, 0, 1));
    assert_eq!(set.wrong_pieces.get(), 0);
}
