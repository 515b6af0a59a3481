//! Pieces that could not be made, and donors that avoid being found.

use super::*;

#[test]
fn a_piece_that_cannot_be_made_is_not_blamed_on_the_donor_that_is_to_have_it() {
    let mut vm = Vm::new("4+2", &[1; 7], 1);
    for page in 0..4 {
        vm.write(page * 4096);
    }
    let set = Arc::clone(&vm.bed.set);
    let donors: Vec<_> = set.copies().all(0).map(|copy| copy.place.donor).collect();
    // Three of five are right. The piece that is lost is one of data, which reads ask for first.
    for forging in &donors[1..3] {
        // Each piece of what is sent at once.
        vm.forge(usize::from(*forging), |now, _, _, _| {
            now.iter().map(|byte| byte ^ 1).collect()
        });
    }
    let lost = usize::from(donors[0]);
    vm.bed.cut(lost);
    assert_ne!(set.lost(lost, "it was killed"), Loss::OfBlocks);
    poll_until(&mut vm.evictor, "repaired", |_| {
        set.copies().degraded() == 0
    });
    let new = set.copies().copy(0, 0).place;
    assert!(!donors.contains(&new.donor));
    assert!((0..4).all(|page| set.copies().lacks(new, page, 1)));
    assert!(
        !set.copies().lacks(new, 4, 508),
        "of pages without seals there is nothing to know"
    );
    for forging in &donors[1..3] {
        vm.bed.donors[usize::from(*forging)]
            .lock()
            .expect("no panic")
            .forgery = None;
    }
    for page in 0..4 {
        vm.reader.post_read(Ticket(7), page * 4096).expect("room");
        let bytes = vm.answer();
        assert!(vm.is_genuine(page * 4096, &bytes), "other pieces are read");
        vm.reader
            .post_reread(Ticket(7), page * 4096, None)
            .expect("room");
        let bytes = vm.answer();
        assert!(vm.is_genuine(page * 4096, &bytes));
    }
    assert_eq!(
        (set.wrong_pieces.get(), vm.events()),
        (0, (vec![], vec![lost]))
    );
    (0..4).for_each(|page| vm.write(page * 4096));
    assert!(!set.copies().has_holes());
    vm.assert_pieces();
}

#[test]
fn a_donor_that_forges_first_answers_and_is_silent_when_asked_again_is_found() {
    for run in [None, Some(3)] {
        let mut vm = Vm::new("4+2", &[1; 6], 1);
        for page in 0..12 {
            vm.write(page * 4096);
        }
        let set = Arc::clone(&vm.bed.set);
        let hostile = set.copies().copy(0, 1).place.donor;
        let donor = usize::from(hostile);
        for page in [0, 3, 6] {
            assert!(!set.copies().is_out(hostile), "{page} pages");
            vm.forge(donor, FLIPPED_BIT);
            let offset = page * 4096;
            match run {
                None => vm.reader.post_read(Ticket(7), offset).expect("room"),
                Some(pages) => {
                    let posted = vm.reader.post_read_run(Ticket(7), offset, pages);
                    posted.expect("room");
                }
            }
            let bytes = vm.answer();
            assert!(!vm.is_genuine(offset, &bytes));
            vm.bed.cut(donor);
            vm.reader.post_reread(Ticket(7), offset, run).expect("room");
            let bytes = vm.answer();
            assert!(vm.is_genuine(offset, &bytes));
            vm.bed.donors[donor].lock().expect("no panic").forgery = None;
            vm.bed.restore(donor);
            poll_idle(&mut vm.reader);
        }
        assert!(set.copies().is_out(hostile));
        assert_eq!(vm.events(), (vec![donor], vec![donor]));
        assert_eq!(set.wrong_pieces.get(), 3);
    }
}

/// Polls until late answers have arrived.
fn poll_idle(transport: &mut ReplicatedTransport) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while transport.members.iter().any(|member| !member.is_idle()) {
        assert!(Instant::now() < deadline, "the late answer");
        transport.poll(&mut |completion| panic!("unexpected {completion:?}"));
    }
}

#[test]
fn a_slow_donor_whose_answer_was_right_is_not_suspected() {
    let mut vm = Vm::new("4+2", &[1; 6], 1);
    (0..8).for_each(|page| vm.write(page * 4096));
    let set = Arc::clone(&vm.bed.set);
    let [hostile, slow] = [0, 1].map(|at| usize::from(set.copies().copy(0, at).place.donor));
    for page in 0..2 {
        vm.forge(hostile, FLIPPED_BIT);
        vm.reader.post_read(Ticket(7), page * 4096).expect("room");
        let bytes = vm.answer();
        assert!(!vm.is_genuine(page * 4096, &bytes));
        vm.bed.cut(slow);
        vm.reader
            .post_reread(Ticket(7), page * 4096, None)
            .expect("room");
        let bytes = vm.answer();
        assert!(vm.is_genuine(page * 4096, &bytes));
        vm.bed.restore(slow);
        poll_idle(&mut vm.reader);
    }
    assert_eq!(vm.events(), (vec![hostile], vec![]));
    assert_eq!(set.wrong_pieces.get(), 2);
}

#[test]
fn what_was_read_before_the_last_write_back_suspects_no_donor() {
    let mut vm = Vm::new("4+2", &[1; 6], 1);
    let set = Arc::clone(&vm.bed.set);
    let [hostile, slow] = [0, 1].map(|at| usize::from(set.copies().copy(0, at).place.donor));
    vm.write(0);
    assert!(vm.read(0, None));
    vm.write(0);
    vm.forge(hostile, FLIPPED_BIT);
    vm.reader.post_read(Ticket(7), 0).expect("room");
    let bytes = vm.answer();
    assert!(!vm.is_genuine(0, &bytes));
    vm.bed.cut(slow);
    vm.reader.post_reread(Ticket(7), 0, None).expect("room");
    let bytes = vm.answer();
    assert!(vm.is_genuine(0, &bytes));
    assert_eq!(vm.events(), (vec![hostile], vec![]));
    assert_eq!(set.wrong_pieces.get(), 1);
}
