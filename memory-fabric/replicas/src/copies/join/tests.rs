//! Places of donors that join.

use super::*;
use crate::copies::{LastCopy, LeaveError, Spared};
use crate::placement::Place;

fn place(donor: u8, slot: u32) -> Place {
    Place { donor, slot }
}

/// Two blocks on donors 0 and 1, in zones of their own, and places for three more.
fn copies() -> Copies {
    let places = [[place(0, 0), place(1, 0)], [place(1, 1), place(0, 1)]];
    Copies::new(&places, &[2, 2], &[2, 2], &[0, 1]).with_joiners(3)
}

/// A donor joins, and the thread that repairs puts it to use.
fn join(copies: &Copies, donor: u8, slots: u32, beside: Option<u8>) {
    assert!(copies.join(donor, slots, beside));
    assert!(!copies.readmit(donor), "not every thread is connected");
    assert!(!copies.is_member(donor));
    assert!(copies.note_joined(donor));
    assert!(copies.readmit(donor));
    assert!(copies.is_member(donor) && !copies.is_out(donor));
}

#[test]
fn a_place_without_a_donor_is_out_and_has_no_room() {
    let copies = copies();
    for donor in 2..5 {
        assert!(copies.is_out(donor) && copies.has_left(donor) && !copies.is_member(donor));
        assert!(!copies.readmit(donor));
        assert_eq!((copies.room_at(donor), copies.blocks_at(donor)), (0, 0));
        assert_eq!(copies.leave(donor), Err(LeaveError::Out));
        // A late report of the last one that was here.
        assert_eq!(copies.expel(donor, Spared::Blocks), Ok(false));
        assert!(copies.has_left(donor));
    }
}

#[test]
fn only_copies_on_a_lost_donor_are_displaced() {
    let copies = copies();
    assert_eq!(copies.exclude(0), Ok(true));
    assert_eq!(
        (copies.degraded(), copies.displaced()),
        (2, 0),
        "it may return"
    );
    copies.note_missed(0, 0, 7);
    copies.note_missed(1, 1, 7);
    assert!(copies.readmit(0));
    assert_eq!((copies.degraded(), copies.displaced()), (2, 0), "behind");
    while let Some(repair) = copies.begin_repair(0) {
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!(copies.degraded(), 0);
    assert_eq!(copies.expel(0, Spared::Blocks), Ok(true));
    assert_eq!((copies.degraded(), copies.displaced()), (2, 2));
    // One that joins has room for one of them.
    join(&copies, 2, 1, None);
    while let Some(repair) = copies.begin_repair(0) {
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!((copies.degraded(), copies.displaced()), (1, 1));
    join(&copies, 3, 2, None);
    assert_eq!((copies.degraded(), copies.displaced()), (1, 0), "has room");
    while let Some(repair) = copies.begin_repair(0) {
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!((copies.degraded(), copies.displaced()), (0, 0));
    // The donor of one copy will not return, that of the other one is away: nothing could be copied.
    assert_eq!(copies.expel(3, Spared::Blocks), Ok(true));
    assert_eq!(copies.displaced(), 1);
    let others = [1, 2].map(|donor| copies.exclude(donor));
    assert_eq!((others, copies.displaced()), ([Err(LastCopy), Ok(true)], 1));
}

#[test]
fn zones_of_donors_that_join_are_those_of_others_or_their_own() {
    let copies = copies();
    join(&copies, 2, 2, Some(0));
    join(&copies, 3, 2, None);
    assert_eq!(copies.zone(2), copies.zone(0));
    assert!(![0, 1].contains(&copies.zone(3)));
    // The place of a donor that has left may become another zone, which nothing else is in.
    assert!(copies.retire(3));
    join(&copies, 4, 2, None);
    join(&copies, 3, 2, None);
    assert_ne!(copies.zone(3), copies.zone(4));
    // One block of donor 1 goes to the other zone that has room, not beside its other copy.
    assert_eq!(copies.leave(1), Ok(2));
    while let crate::copies::NextMove::Begun(begun) = copies.begin_move() {
        assert_ne!(begun.to.donor, 2, "it is in the zone of donor 0");
        assert!(copies.end_move(&begun, &[]));
    }
    assert_eq!(copies.in_one_zone(), 0);
}

#[test]
fn copies_go_to_the_donors_that_were_named_or_the_drain_is_refused() {
    let copies = copies();
    join(&copies, 2, 2, None);
    join(&copies, 3, 1, None);
    let refused = LeaveError::NoRoom { blocks: 2, room: 1 };
    assert_eq!(copies.leave_for(0, 1 << 3), Err(refused));
    assert_eq!(copies.room_at(3), 1, "nothing has changed");
    assert_eq!(copies.leave_for(0, 1 << 2), Ok(2));
    while let crate::copies::NextMove::Begun(begun) = copies.begin_move() {
        assert_eq!(begun.to.donor, 2);
        assert!(copies.end_move(&begun, &[]));
    }
    assert_eq!((copies.blocks_at(2), copies.blocks_at(3)), (2, 0));
}

#[test]
fn places_on_a_donor_that_has_left_are_not_those_of_the_next_one() {
    let copies = copies();
    join(&copies, 2, 4, None);
    let reader = copies.register();
    copies.vacate_one(place(2, 3));
    let epoch = copies.vacated_epoch();
    assert!(copies.retire(2));
    join(&copies, 2, 1, None);
    reader.note(epoch);
    assert!(copies.reclaim_kept() && !copies.keeps_places());
    assert_eq!(copies.room_at(2), 1);
}
