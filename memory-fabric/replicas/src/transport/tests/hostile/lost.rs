//! Pages that a copy was made without: they are waited for, kept where they may be right, and known as
//! lost when they are.

use super::copies::{found, repair, with_one_out};
use super::*;
use std::sync::mpsc::{Receiver, channel};

const PAGE: u64 = PAGE_SIZE as u64;

/// Returns the numbers of pages that were reported as lost.
fn lost_pages(vm: &Vm) -> Vec<u64> {
    let events = vm.bed.events.lock().expect("no panic");
    let lost = events.iter().filter_map(|event| match event {
        ReplicaEvent::PagesLost { pages } => Some(*pages),
        _ => None,
    });
    lost.collect()
}

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
    assert_eq!(lost_pages(&vm), [1]);
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
    assert!(!set.down(0, "cut"), "the guest does not wait");
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
    // As if its last write-back had arrived there, and the answer had not.
    vm.bed.set.copies().note_missed(0, 1, 0);
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

/// Begins to drain a donor. How many copies stayed is sent in the end.
fn begin_drain(vm: &Vm, donor: usize) -> Receiver<u32> {
    let (sender, ended) = channel();
    let observer = Box::new(move |event| {
        if let LeaveEvent::Ended { stayed } = event {
            let _ = sender.send(stayed);
        }
    });
    let left = vm.bed.set.leave(donor, &[], observer);
    assert_eq!(left, Ok(1));
    ended
}

/// Drains a donor. Returns how many copies stayed.
fn drain(vm: &mut Vm, donor: usize) -> u32 {
    let ended = begin_drain(vm, donor);
    end_drain(vm, &ended)
}

fn end_drain(vm: &mut Vm, ended: &Receiver<u32>) -> u32 {
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

#[test]
fn what_only_the_copy_of_a_donor_that_leaves_has_is_read_there_and_moves() {
    let mut vm = Vm::of(Bed::new(&[2; 3], 1));
    (0..8).for_each(|page| vm.write(page * PAGE));
    let set = Arc::clone(&vm.bed.set);
    let [leaving, other] = set.copies().of(0).map(|copy| copy.place.donor);
    vm.bed.cut(other.into());
    assert!(!set.down(other.into(), "cut"));
    vm.write(7 * PAGE);
    vm.forge(leaving.into(), FLIPPED_BIT);
    vm.bed.restore(other.into());
    set.up(other.into());
    poll_until(&mut vm.evictor, "repaired", |_| {
        set.copies().degraded() == 0
    });
    trust(&vm, leaving.into());
    assert!(set.lacks(other, 7 * PAGE) && !set.lacks(leaving, 7 * PAGE));
    let ended = begin_drain(&vm, leaving.into());
    assert!(set.read_elsewhere(leaving, 3 * PAGE), "it was wrong there");
    // Nothing is filled yet.
    assert!(vm.read(7 * PAGE, None) && vm.read(3 * PAGE, None));
    assert_eq!(end_drain(&mut vm, &ended), 0);
    let mut donors = set.copies().all(0).map(|copy| copy.place.donor);
    let new = donors.find(|donor| *donor != other).expect("a copy");
    assert!(new != leaving && !set.lacks(new, 7 * PAGE));
    let right = page_with(vm.version);
    assert!(found(&vm, new.into(), 7 * PAGE).expect("it has moved") == right);
    assert!(lost_pages(&vm).is_empty());
}

#[test]
fn a_page_that_is_lost_when_a_copy_is_made_again_is_reported_once() {
    let mut vm = with_a_hole();
    let set = Arc::clone(&vm.bed.set);
    assert!(set.read_elsewhere(0, 3 * PAGE));
    vm.forge(0, FLIPPED_BIT);
    poll_until(&mut vm.evictor, "filled", |_| set.copies().degraded() == 0);
    assert!(set.lacks(0, 7 * PAGE) && set.lacks(1, 7 * PAGE));
    assert!(set.is_last_of(0, 7 * PAGE) && set.is_last_of(1, 7 * PAGE));
    assert_eq!((set.copies().lost_pages(), lost_pages(&vm)), (1, vec![1]));
    assert_ne!(set.lost(0, "it is hostile"), Loss::OfBlocks);
    assert_eq!(lost_pages(&vm), [1]);
}

#[test]
fn a_copy_without_a_page_is_not_asked_for_it_however_long_the_other_one_takes() {
    let mut vm = with_a_hole();
    vm.bed.cut(0);
    vm.reader.post_read(Ticket(7), 7 * PAGE).expect("room");
    let until = Instant::now() + 2 * READ_STALL;
    while Instant::now() < until {
        vm.reader.poll(&mut |completion| panic!("{completion:?}"));
    }
    vm.bed.restore(0);
    let bytes = vm.answer();
    assert!(vm.is_genuine(7 * PAGE, &bytes));
}

#[test]
fn a_piece_that_a_donor_returns_with_counts_when_it_is_made_again() {
    let mut vm = Vm::new("4+2", &[1; 6], 1);
    vm.write(0);
    let set = Arc::clone(&vm.bed.set);
    let donors: Vec<usize> = set
        .copies()
        .all(0)
        .map(|copy| copy.place.donor.into())
        .collect();
    vm.bed.cut(donors[1]);
    assert!(!set.down(donors[1], "cut"));
    // Three of the other five are right, and so is what it has.
    vm.forge(donors[2], FLIPPED_BIT);
    vm.forge(donors[3], FLIPPED_BIT);
    vm.bed.restore(donors[1]);
    set.up(donors[1]);
    poll_until(&mut vm.evictor, "filled", |_| set.copies().degraded() == 0);
    assert!(!set.copies().has_holes());
    vm.assert_pieces();
}

#[test]
fn a_page_of_a_stripe_that_is_freed_alone_is_not_missed() {
    let mut vm = Vm::new("4+2", &[1; 6], 1);
    vm.write(PAGE);
    let copies = vm.bed.set.copies();
    copies.add_hole(copies.copy(0, 2).place, 1);
    vm.evictor.post_drop(PAGE, 1).expect("room");
    assert!(!copies.has_holes());
}

#[test]
fn a_drain_while_pages_are_written_and_freed_leaves_no_copy_and_no_hole() {
    for layout in [None, Some("2+1")] {
        let mut vm = match layout {
            None => Vm::of(Bed::new(&[2; 4], 1)),
            Some(layout) => Vm::new(layout, &[2; 5], 1),
        };
        // No donor goes out, however slow this thread is.
        vm.evictor.look_at += Duration::from_secs(3600);
        // The others are zeroes.
        (0..64).for_each(|page| vm.write(page * PAGE));
        let set = Arc::clone(&vm.bed.set);
        let first = set.copies().copy(0, 0).place.donor;
        for leaving in [first, set.copies().copy(0, 1).place.donor] {
            let ended = begin_drain(&vm, leaving.into());
            let mut stayed = None;
            let mut page = 0;
            let deadline = Instant::now() + Duration::from_secs(20);
            while stayed.is_none() {
                assert!(Instant::now() < deadline, "{layout:?}: it does not end");
                vm.write(page % 64 * PAGE);
                page += 1;
                let mut is_dropped = page >= 200;
                if !is_dropped {
                    let offset = (100 + 2 * page) * PAGE;
                    vm.evictor.post_drop(offset, 2).expect("room");
                }
                while !is_dropped {
                    assert!(Instant::now() < deadline, "{layout:?}: it is not dropped");
                    vm.evictor.poll(&mut |completion| {
                        assert!(matches!(completion, Completion::Dropped(2)));
                        is_dropped = true;
                    });
                }
                stayed = ended.try_recv().ok();
            }
            assert_eq!(stayed, Some(0), "{layout:?}");
            assert!(set.copies().all(0).all(|copy| copy.place.donor != leaving));
            assert!(!set.copies().has_holes(), "{layout:?}");
        }
        assert!((0..64).all(|page| vm.read(page * PAGE, None)));
    }
}

#[test]
fn a_page_that_is_freed_after_it_was_not_copied_moves_with_its_copy() {
    let mut vm = Vm::of(Bed::new(&[2; 3], 1));
    vm.evictor.look_at += Duration::from_secs(3600);
    (0..512).for_each(|page| vm.write(page * PAGE));
    let set = Arc::clone(&vm.bed.set);
    let [leaving, other] = set.copies().of(0).map(|copy| usize::from(copy.place.donor));
    for donor in [leaving, other] {
        vm.forge(donor, |now, before, other, number| {
            match now == page_with(1) {
                true => FLIPPED_BIT(now, before, other, number),
                false => now.to_vec(),
            }
        });
    }
    let ended = begin_drain(&vm, leaving);
    // Each was read twice. The rest of the block takes longer.
    poll_until(&mut vm.evictor, "both are wrong", |_| {
        set.wrong_pieces.get() == 2
    });
    let (_, new) = vm.evictor.repairs.third_place(0).expect("it moves");
    assert!(set.copies().lacks(new, 0, 1));
    vm.evictor.post_drop(0, 1).expect("room");
    vm.seals.lock().expect("no panic").remove(&0);
    let mut is_dropped = false;
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_dropped {
        assert!(Instant::now() < deadline, "it is not dropped");
        vm.evictor.poll(&mut |_| is_dropped = true);
    }
    assert_eq!(end_drain(&mut vm, &ended), 0);
    assert!(!set.copies().has_holes());
}

#[test]
fn a_donor_is_not_blamed_for_pages_that_it_may_have_missed() {
    let vm = with_one_out();
    let set = &vm.bed.set;
    vm.bed.restore(1);
    set.up(1);
    assert!(set.copies().readmit(1));
    (0..8).for_each(|page| set.note_wrong(1, page * PAGE));
    assert_eq!(set.wrong_pieces.get(), 0);
    assert!(!set.copies().is_out(1));
    set.note_wrong(0, 7 * PAGE);
    assert_eq!(set.wrong_pieces.get(), 1);
}

/// Returns whether a page is right when it is read again, and which donor sent it.
pub(super) fn reread(vm: &mut Vm, offset: u64) -> (bool, usize) {
    vm.reader
        .post_reread(Ticket(7), offset, None)
        .expect("room");
    let (mut found, mut bytes) = (None, Vec::new());
    let deadline = Instant::now() + Duration::from_secs(20);
    while found.is_none() {
        assert!(Instant::now() < deadline, "nothing is read");
        vm.reader.poll(&mut |completion| match completion {
            Completion::ReadFrom(donor, Ticket(7), page) => {
                assert_eq!(found.replace(donor), None, "it completes once");
                bytes = page.to_vec();
            }
            other => panic!("unexpected {other:?}"),
        });
    }
    (vm.is_genuine(offset, &bytes), found.expect("it was read"))
}

/// Two donors, of which the second one is back: it missed a write-back of page 7, and its copy is
/// not filled yet.
pub(super) fn with_one_back() -> Vm {
    let vm = with_one_out();
    vm.bed.restore(1);
    vm.bed.set.up(1);
    assert!(vm.bed.set.copies().readmit(1));
    vm
}

#[test]
fn a_page_whose_only_valid_copy_is_wrong_is_read_from_one_that_is_not_filled_yet() {
    let mut vm = with_one_back();
    vm.forge(0, FLIPPED_BIT);
    for page in 0..7 {
        assert!(vm.read(page * PAGE, None), "page {page}");
        assert_eq!(reread(&mut vm, page * PAGE), (true, 1));
    }
    // This one is old there: it is never used, and the valid copy decides what follows.
    assert_eq!(reread(&mut vm, 7 * PAGE), (false, 0));
    assert_eq!(vm.events(), (vec![], vec![1]), "no donor is blamed");
    trust(&vm, 0);
    assert_eq!(reread(&mut vm, 7 * PAGE), (true, 0));
    assert_eq!((vm.reader.outstanding, vm.reader.in_flight()), (0, 0));
}

#[test]
fn a_copy_that_is_not_filled_and_is_silent_delays_a_page_and_loses_none() {
    let mut vm = with_one_back();
    vm.bed.cut(1);
    // The bit flipped on its way: the valid copy is asked as well.
    assert_eq!(reread(&mut vm, 3 * PAGE), (true, 0));
    // It is wrong, and the other one is waited for.
    vm.forge(0, FLIPPED_BIT);
    vm.reader
        .post_reread(Ticket(7), 4 * PAGE, None)
        .expect("room");
    let until = Instant::now() + 2 * READ_STALL;
    while Instant::now() < until {
        vm.reader.poll(&mut |completion| panic!("{completion:?}"));
    }
    assert!(vm.forged(0) > 0, "it was asked");
    vm.bed.restore(1);
    let bytes = vm.answer();
    assert!(vm.is_genuine(4 * PAGE, &bytes));
    // It goes out.
    vm.bed.cut(1);
    vm.reader
        .post_reread(Ticket(7), 5 * PAGE, None)
        .expect("room");
    vm.reader.poll(&mut |completion| panic!("{completion:?}"));
    assert!(!vm.bed.set.down(1, "cut"));
    let bytes = vm.answer();
    assert!(!vm.is_genuine(5 * PAGE, &bytes));
    assert_eq!(vm.reader.outstanding, 0);
}

#[test]
fn a_page_of_a_stripe_with_too_few_right_pieces_is_tried_with_those_that_are_not_filled() {
    let mut vm = Vm::new("2+1", &[1; 3], 1);
    (0..8).for_each(|page| vm.write(page * PAGE));
    let set = Arc::clone(&vm.bed.set);
    let donors: Vec<_> = set.copies().all(0).map(|copy| copy.place.donor).collect();
    let back = donors[0];
    vm.bed.cut(back.into());
    assert!(!set.down(back.into(), "cut"));
    vm.write(7 * PAGE);
    vm.bed.restore(back.into());
    set.up(back.into());
    assert!(set.copies().readmit(back));
    vm.forge(donors[1].into(), FLIPPED_BIT);
    assert!((0..7).all(|page| vm.read(page * PAGE, None)));
    assert!(!vm.read(7 * PAGE, None), "its piece is old");
    let (reported, _) = vm.events();
    assert_eq!(reported, [usize::from(donors[1])]);
    assert_eq!((vm.reader.outstanding, vm.reader.in_flight()), (0, 0));
}
