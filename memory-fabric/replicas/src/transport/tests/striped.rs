//! Stripes: what is read while donors are lost, and what donors have afterwards.

use super::*;
use fabric_pages::page::PAGE_SIZE;

fn bed(layout: &str, spare: usize) -> Bed {
    let layout: Layout = layout.parse().expect("possible");
    Bed::striped(&vec![2; layout.pieces() + spare], layout, 2)
}

pub(super) fn write(evictor: &mut ReplicatedTransport, offset: u64, version: u64) {
    evictor
        .post_write(Ticket(0), offset, &page_with(version))
        .expect("room");
    poll_until(evictor, "written", |completed| !completed.is_empty());
}

/// Returns the donors of a block, in the order of its pieces.
fn donors(bed: &Bed, block: u32) -> Vec<usize> {
    let all = bed.set.copies().all(block);
    all.map(|copy| copy.place.donor.into()).collect()
}

#[test]
fn a_page_is_read_from_as_many_donors_as_it_has_pieces_of_data() {
    let bed = bed("4+2", 0);
    let (mut evictor, mut reader) = (bed.transport(Role::Evictor), bed.transport(Role::Reader));
    write(&mut evictor, 4096, 7);
    reader.post_read(Ticket(1), 4096).expect("room");
    let asked = reader.members.iter().filter(|member| !member.is_idle());
    assert_eq!(asked.count(), 4);
    poll_until(&mut reader, "read", |completed| completed == [(1, 7)]);
}

#[test]
fn any_two_of_six_donors_may_be_lost_at_once_while_a_page_is_read() {
    for first in 0..6 {
        for second in first + 1..6 {
            let bed = bed("4+2", 0);
            let mut evictor = bed.transport(Role::Evictor);
            let mut reader = bed.transport(Role::Reader);
            for page in 0..4 {
                write(&mut evictor, page * 4096, 7 + page);
            }
            bed.cut(first);
            bed.cut(second);
            reader.post_read(Ticket(1), 0).expect("room");
            for lost in [first, second] {
                let loss = bed.set.lost(lost, "it was killed");
                assert_eq!(loss, Loss::OfCopies { was_awaited: false });
            }
            poll_until(&mut reader, "read", |completed| completed == [(1, 7)]);
            reader.post_read_run(Ticket(2), 4096, 3).expect("room");
            let mut runs = 0;
            let deadline = Instant::now() + Duration::from_secs(20);
            while runs == 0 {
                assert!(Instant::now() < deadline, "the run is not read");
                reader.poll(&mut |completion| {
                    let Completion::ReadRunFrom(_, Ticket(2), bytes) = completion else {
                        panic!("unexpected {completion:?}");
                    };
                    let versions = bytes.chunks(PAGE_SIZE).map(fake::version_of);
                    assert_eq!(versions.collect::<Vec<_>>(), [8, 9, 10]);
                    runs += 1;
                });
            }
            // A third one is needed.
            let third = (0..6).find(|donor| ![first, second].contains(donor));
            assert_eq!(bed.set.lost(third.expect("six"), "it too"), Loss::OfBlocks);
        }
    }
}

#[test]
fn a_write_back_is_complete_when_all_donors_in_use_have_their_pieces() {
    let bed = bed("2+1", 0);
    let mut evictor = bed.transport(Role::Evictor);
    let last = donors(&bed, 0)[2];
    bed.cut(last);
    evictor
        .post_write(Ticket(3), 0, &page_with(7))
        .expect("room");
    for _ in 0..100 {
        evictor.poll(&mut |completion| panic!("{completion:?} without parity"));
    }
    assert_ne!(bed.set.lost(last, "it was killed"), Loss::OfBlocks);
    poll_until(&mut evictor, "written", |completed| completed == [(3, 0)]);
}

#[test]
fn a_late_piece_is_replaced_by_parity_and_the_read_completes_once() {
    let bed = bed("4+2", 0);
    let (mut evictor, mut reader) = (bed.transport(Role::Evictor), bed.transport(Role::Reader));
    write(&mut evictor, 0, 9);
    let late = donors(&bed, 0)[1];
    bed.cut(late);
    reader.post_read(Ticket(1), 0).expect("room");
    poll_until(&mut reader, "read", |completed| completed == [(1, 9)]);
    bed.restore(late);
    let deadline = Instant::now() + Duration::from_secs(20);
    while reader.members.iter().any(|member| !member.is_idle()) {
        assert!(Instant::now() < deadline, "the late answer");
        reader.poll(&mut |completion| panic!("{completion:?} twice"));
    }
    assert_eq!(
        (reader.in_flight(), bed.events()),
        (0, 0),
        "it was only late"
    );
}

#[test]
fn pieces_of_lost_donors_are_made_again_on_others_and_more_may_be_lost_then() {
    let bed = bed("4+2", 2);
    let mut evictor = bed.transport(Role::Evictor);
    for block in 0..2 {
        for page in 0..3 {
            write(
                &mut evictor,
                block * BLOCK_BYTES + page * 4096,
                1 + block * 3 + page,
            );
        }
    }
    let copies = bed.set.copies();
    for lost in [[0, 1], [2, 3]] {
        for donor in lost {
            bed.cut(donor);
            assert_ne!(bed.set.lost(donor, "it was killed"), Loss::OfBlocks);
        }
        let mut reader = bed.transport(Role::Reader);
        for page in 0..6 {
            let offset = page / 3 * BLOCK_BYTES + page % 3 * 4096;
            reader.post_read(Ticket(5), offset).expect("room");
            poll_until(&mut reader, "read", |completed| {
                completed == [(5, 1 + page)]
            });
        }
        if lost == [0, 1] {
            poll_until(&mut evictor, "repaired", |_| copies.degraded() == 0);
        }
    }
    assert!(bed.set.repaired_blocks.get() > 0);
}

#[test]
fn a_piece_is_made_again_of_the_pages_that_donors_have_and_of_no_other() {
    let bed = bed("4+2", 1);
    let mut evictor = bed.transport(Role::Evictor);
    let before = [1, 4, 5, 6, 7, 8, 9, 10, 11, 300].map(|page| (page, 10 + page));
    for (page, version) in before {
        write(&mut evictor, page * 4096, version);
    }
    // What the guest has freed, and one of these that it has written again since. A drop of a part of
    // the donors' page does not reach them.
    for (first, pages) in [(4, 4), (300, 1)] {
        evictor.post_drop(first * 4096, pages).expect("room");
    }
    let mut dropped = 0;
    let deadline = Instant::now() + Duration::from_secs(20);
    while dropped < 4 {
        assert!(Instant::now() < deadline, "the drop does not end");
        evictor.poll(&mut |completion| match completion {
            Completion::Dropped(pages) => dropped += pages,
            other => panic!("unexpected {other:?}"),
        });
    }
    write(&mut evictor, 6 * 4096, 90);
    let lost = donors(&bed, 0)[0];
    bed.cut(lost);
    let counts = |of: fn(&FakeDonor) -> u64| -> u64 {
        let all = bed.donors.iter();
        all.map(|donor| of(&donor.lock().expect("no panic"))).sum()
    };
    let (read, written) = (counts(|donor| donor.answers), counts(|donor| donor.writes));
    assert_ne!(bed.set.lost(lost, "it was killed"), Loss::OfBlocks);
    let copies = bed.set.copies();
    poll_until(&mut evictor, "made again", |_| copies.degraded() == 0);
    // Pages 1, 6, and 8 to 11, whose pieces are a page of each donor.
    assert_eq!(counts(|donor| donor.answers) - read, 3 * 4);
    assert_eq!(counts(|donor| donor.writes) - written, 3);
    let mut reader = bed.transport(Role::Reader);
    let last = donors(&bed, 0)[5];
    bed.cut(last);
    assert_ne!(bed.set.lost(last, "it too"), Loss::OfBlocks);
    for (page, version) in [(1, 11), (6, 90), (8, 18), (11, 21)] {
        reader.post_read(Ticket(5), page * 4096).expect("room");
        poll_until(&mut reader, "read", |done| done == [(5, version)]);
    }
}

#[test]
fn blocks_without_a_page_are_complete_some_at_a_time() {
    let bed = Bed::new(&[200; 3], 200);
    let mut evictor = bed.transport(Role::Evictor);
    bed.cut(0);
    assert_ne!(bed.set.lost(0, "it was killed"), Loss::OfBlocks);
    let copies = bed.set.copies();
    let before = copies.degraded();
    evictor.poll(&mut |completion| panic!("{completion:?}"));
    let left = copies.degraded();
    assert!(left > 0 && left < before, "{left} of {before}");
    let due = evictor.wake_by().expect("it goes on by itself");
    assert!(due <= Instant::now());
    poll_until(&mut evictor, "complete", |_| copies.degraded() == 0);
}

#[test]
fn a_repair_of_scattered_pages_leaves_most_of_a_slow_connection_to_write_backs() {
    let bed = bed("8+2", 1);
    let mut evictor = bed.transport(Role::Evictor);
    (0..64).for_each(|page| write(&mut evictor, page * 8 * 4096, 1 + page));
    let pieces = donors(&bed, 0);
    bed.cut(pieces[0]);
    assert_ne!(bed.set.lost(pieces[0], "it was killed"), Loss::OfBlocks);
    bed.cut(pieces[1]);
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        evictor.poll(&mut |completion| panic!("{completion:?}"));
    }
    let asked = evictor.members[pieces[1]].in_flight();
    assert!((1..=IN_FLIGHT_MAX / 4).contains(&asked), "{asked} reads");
    assert_eq!(evictor.in_flight(), 0, "the pager has asked for nothing");
    bed.restore(pieces[1]);
    let copies = bed.set.copies();
    poll_until(&mut evictor, "made again", |_| copies.degraded() == 0);
}

#[test]
fn drops_keep_pieces_of_other_pages_in_the_same_page_of_a_donor() {
    let bed = bed("4+2", 0);
    let (mut evictor, mut reader) = (bed.transport(Role::Evictor), bed.transport(Role::Reader));
    (0..16).for_each(|page| write(&mut evictor, page * 4096, 1 + page));
    let dropped = |evictor: &mut ReplicatedTransport, first: u64, pages| {
        evictor.post_drop(first * 4096, pages).expect("room");
        let mut found = 0;
        let deadline = Instant::now() + Duration::from_secs(20);
        while found == 0 {
            assert!(Instant::now() < deadline, "the drop does not end");
            assert!(evictor.in_flight() > 0, "it is outstanding");
            evictor.poll(&mut |completion| match completion {
                Completion::Dropped(pages) => found += pages,
                other => panic!("unexpected {other:?}"),
            });
        }
        assert_eq!(found, pages);
    };
    // Pages 4 to 7 are a page at each donor; 1 to 3 are parts of one, of which none is outstanding,
    // however many are dropped before a poll.
    for page in 0..1_500 {
        evictor.post_drop((1 + page % 3) * 4096, 1).expect("room");
    }
    evictor.post_drop(4096, 3).expect("room");
    assert_eq!(evictor.in_flight(), 0);
    dropped(&mut evictor, 3, 6);
    for page in (0..4).chain(8..16) {
        reader.post_read(Ticket(5), page * 4096).expect("room");
        poll_until(&mut reader, "read", |completed| {
            completed == [(5, 1 + page)]
        });
    }
    for page in 4..8 {
        reader.post_read(Ticket(5), page * 4096).expect("room");
        poll_until(&mut reader, "read", |completed| completed == [(5, 0)]);
    }
}

/// Every page that is read has the version that was written last, whatever happens to donors; in
/// the end all pieces are those of that version.
#[test]
fn no_piece_of_another_version_is_used_in_any_of_many_random_histories() {
    assert_eventful((0..160).map(|seed| World::striped(seed).run(2_000)));
}

/// A repair that was given up and begins again posts no second write of a page, and neither does a
/// write-back: the two may take different ways.
#[test]
fn a_repair_that_begins_again_waits_for_the_writes_of_the_one_before() {
    let bed = bed("4+2", 0);
    let mut evictor = bed.transport(Role::Evictor);
    for page in 0..40 {
        write(&mut evictor, page * 4096, 1 + page);
    }
    let donors = donors(&bed, 0);
    let (returns, source) = (donors[1], donors[2]);
    bed.set.down(returns, "it was cut");
    evictor.poll(&mut |completion| panic!("{completion:?}"));
    (0..40).for_each(|page| bed.set.copies().note_missed(0, 1, page));
    bed.set.up(returns);
    let deadline = Instant::now() + Duration::from_secs(20);
    while evictor.members[returns].in_flight() == 0 {
        assert!(Instant::now() < deadline, "the repair writes");
        evictor.poll(&mut |completion| panic!("{completion:?}"));
    }
    bed.cut(returns);
    let written = evictor.members[returns].in_flight();
    bed.set.down(source, "it was cut");
    let mut answered = 0;
    for _ in 0..400 {
        // The first pages are read again meanwhile, and may not be written.
        evictor.poll(&mut |completion| panic!("{completion:?}"));
        answered += usize::from(evictor.members[donors[0]].in_flight() > 0);
    }
    assert!(answered > 0, "the repair has begun again");
    assert!(evictor.members[returns].in_flight() >= written);
    // So is a write-back, which the transports of this donor would refuse.
    evictor
        .post_write(Ticket(5), 0, &page_with(99))
        .expect("room");
    for _ in 0..20 {
        evictor.poll(&mut |completion| panic!("{completion:?}"));
    }
    bed.restore(returns);
    poll_until(&mut evictor, "written", |completed| completed == [(5, 0)]);
    bed.set.up(source);
    let copies = bed.set.copies();
    poll_until(&mut evictor, "repaired", |_| copies.degraded() == 0);
    let layout = copies.layout().expect("striped");
    for page in 0..40 {
        let version = if page == 0 { 99 } else { 1 + page };
        hostile::assert_pieces(&bed, layout, page * 4096, version, "in the end");
    }
}
