//! Copies with wrong pages: no right page is replaced by a wrong one, also while copies move.

use super::lost::{reread, with_one_back};
use super::*;
use crate::member::Purpose;
use std::sync::{OnceLock, Weak};

/// Returns what a donor has of the page at an offset, if that may be read there.
pub(super) fn found(vm: &Vm, donor: usize, offset: u64) -> Option<Vec<u8>> {
    let (block, in_block) = split(offset);
    let mut places = vm.bed.set.copies().readable(block).into_iter().flatten();
    let place = places.find(|place| usize::from(place.donor) == donor)?;
    let donor = vm.bed.donors[donor].lock().expect("no panic");
    Some(donor.bytes_at(offset_at(place, in_block, 1), PAGE_SIZE))
}

/// Two donors with a copy of some pages. The second one is out, and misses a write-back of the last.
pub(super) fn with_one_out() -> Vm {
    let mut vm = Vm::of(Bed::new(&[1, 1], 1));
    for page in 0..8 {
        vm.write(page * 4096);
    }
    vm.bed.cut(1);
    assert!(!vm.bed.set.down(1, "cut"));
    vm.write(7 * 4096);
    vm
}

pub(super) fn repair(vm: &mut Vm) {
    vm.bed.restore(1);
    vm.bed.set.up(1);
    let set = Arc::clone(&vm.bed.set);
    poll_until(&mut vm.evictor, "repaired", |_| {
        set.copies().degraded() == 0
    });
}

#[test]
fn a_repair_keeps_right_pages_where_the_other_copy_is_wrong() {
    for forgery in FORGERIES {
        let mut vm = with_one_out();
        vm.forge(0, forgery);
        repair(&mut vm);
        for page in 0..7 {
            let right = page_with(page + 1);
            assert!(found(&vm, 1, page * 4096).expect("filled") == right);
        }
        let (reported, out) = vm.events();
        assert_eq!((reported, out), (vec![0], vec![1]), "it was needed");
        // It is not needed any more: reads go to the right copy.
        assert_ne!(vm.bed.set.lost(0, "it is hostile"), Loss::OfBlocks);
        assert!((0..7).all(|page| vm.read(page * 4096, None)));
    }
}

#[test]
fn a_page_without_a_right_copy_is_read_where_it_may_be_right_and_suspects_no_other_donor() {
    let mut vm = with_one_out();
    let copies = |vm: &Vm| vm.bed.set.copies().of(0);
    vm.forge(0, FLIPPED_BIT);
    repair(&mut vm);
    let set = Arc::clone(&vm.bed.set);
    let new = copies(&vm).into_iter().find(|copy| copy.place.donor == 1);
    let new = new.expect("a copy").place;
    assert!(set.copies().lacks(new, 7, 1) && !set.copies().lacks(new, 0, 7));
    vm.bed.donors[0].lock().expect("no panic").forgery = None;
    let wrong = set.wrong_pieces.get();
    for _ in 0..10 {
        vm.reader.post_read(Ticket(7), 7 * 4096).expect("room");
        let bytes = vm.answer();
        assert!(
            vm.is_genuine(7 * 4096, &bytes),
            "read from the donor that has it"
        );
    }
    // Nothing else has it.
    assert!(set.is_last_of(0, 7 * 4096) && !set.is_last_of(0, 0));
    set.note_wrong(1, 7 * 4096);
    assert_eq!(set.wrong_pieces.get(), wrong, "it was not given the page");
    vm.write(7 * 4096);
    assert!(!set.copies().has_holes());
    assert!(found(&vm, 1, 7 * 4096).expect("a copy") == page_with(vm.version));
    set.note_wrong(1, 7 * 4096);
    assert_eq!(set.wrong_pieces.get(), wrong + 1);
}

#[test]
fn a_bit_that_flips_on_the_way_to_a_repair_changes_nothing() {
    let mut vm = with_one_out();
    // Only the first answer.
    vm.forge(0, |now, before, other, number| match number {
        1 => FLIPPED_BIT(now, before, other, number),
        _ => now.to_vec(),
    });
    repair(&mut vm);
    assert!(vm.forged(0) > 0);
    for page in 0..7 {
        assert!(found(&vm, 1, page * 4096).expect("filled") == page_with(page + 1));
    }
    assert!(found(&vm, 1, 7 * 4096).expect("filled") == page_with(vm.version));
    assert!(!vm.bed.set.copies().has_holes());
    assert_eq!(vm.events(), (vec![], vec![1]));
}

#[test]
fn a_copy_that_moves_is_read_elsewhere_where_it_is_wrong() {
    for hostile in 0..3 {
        let mut vm = Vm::of(Bed::new(&[4, 4, 4], 4));
        for block in 0..4 {
            (0..3).for_each(|page| vm.write(block * BLOCK_BYTES + page * 4096));
        }
        vm.forge(hostile, FLIPPED_BIT);
        let (sender, ended) = std::sync::mpsc::channel();
        let observer = Box::new(move |event| {
            if let LeaveEvent::Ended { .. } = event {
                let _ = sender.send(());
            }
        });
        let left = vm.bed.set.leave(0, &[], observer);
        assert!(left.expect("there is room") > 0);
        let set = Arc::clone(&vm.bed.set);
        poll_until(&mut vm.evictor, "it leaves", |_| ended.try_recv().is_ok());
        let pages = vm.seals.lock().expect("no panic").clone();
        for (offset, version) in pages {
            let all = (0..3).filter_map(|donor| Some((donor, found(&vm, donor, offset)?)));
            for (donor, bytes) in all {
                let is_right = bytes == page_with(version);
                assert!(is_right, "hostile {hostile}: {donor} at {offset}");
            }
        }
        assert!(!set.copies().has_holes());
        let (reported, _) = vm.events();
        assert!(reported.iter().all(|donor| *donor == hostile));
        assert!(hostile == 0 || !reported.is_empty());
    }
}

#[test]
fn a_donor_that_is_back_while_it_is_given_up_is_not_used_again() {
    let placement = Placement::new(&[2; 3], &[0, 1, 2], 2);
    for is_lost in [true, false] {
        let known = Arc::<OnceLock<Weak<ReplicaSet>>>::default();
        let of_observer = Arc::clone(&known);
        let observer = Box::new(move |event| {
            if let ReplicaEvent::Degraded { donor, .. } = event {
                let set = of_observer.get().and_then(Weak::upgrade).expect("in use");
                set.up(donor);
                assert!(!set.copies().readmit(model::as_u8(donor)), "it is lost");
            }
        });
        let copies = Copies::new(&placement.blocks, &[2; 3], &placement.used, &[0, 1, 2]);
        let set = Arc::new(ReplicaSet::new(copies, 3, observer));
        known.set(Arc::downgrade(&set)).expect("once");
        match is_lost {
            true => assert_ne!(set.lost(1, "it was killed"), Loss::OfBlocks),
            false => (0..3).for_each(|page| set.note_wrong(1, page * 4096)),
        }
        assert!(set.copies().is_lost(1) && set.copies().is_out(1));
        assert_eq!(set.losses.get(), 1);
    }
}

#[test]
fn a_page_is_read_from_the_valid_copy_while_the_donor_of_the_other_one_has_no_room() {
    let mut vm = with_one_back();
    vm.bed.cut(1);
    let busy = &mut vm.reader.members[1];
    while busy.read(Purpose::Abandoned, 0, None).is_ok() {}
    assert_eq!(reread(&mut vm, 3 * 4096), (true, 0));
    // It is wrong there, which does not decide while the other one was not asked.
    vm.forge(0, FLIPPED_BIT);
    for page in [4, 5] {
        let forged = vm.forged(0);
        let posted = vm.reader.post_reread(Ticket(7), page * 4096, None);
        posted.expect("the valid one has room");
        let deadline = Instant::now() + Duration::from_secs(20);
        while vm.forged(0) == forged || vm.reader.unposted.is_empty() {
            assert!(Instant::now() < deadline, "it was not asked");
            vm.reader.poll(&mut |completion| panic!("{completion:?}"));
        }
        match page {
            4 => vm.bed.restore(1),
            _ => assert!(!vm.bed.set.down(1, "cut")),
        }
        let bytes = vm.answer();
        assert_eq!(vm.is_genuine(page * 4096, &bytes), page == 4, "page {page}");
        vm.bed.cut(1);
        let busy = &mut vm.reader.members[1];
        while busy.read(Purpose::Abandoned, 0, None).is_ok() {}
    }
    assert_eq!(vm.reader.outstanding, 0);
}
