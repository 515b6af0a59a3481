//! Donors leave; the thread that repairs is played by the test.

use super::*;
use crate::copies::Loan;
use crate::copies::Spared;
use crate::placement::{Placement, zones};
use proptest::prelude::*;

fn copies(slots: &[u32], blocks: u32) -> Copies {
    let zones = zones(slots.iter().map(|_| None));
    let placement = Placement::new(slots, &zones, blocks);
    Copies::new(&placement.blocks, slots, &placement.used, &zones)
}

/// Returns how many blocks of `others`, the donors of their other copies, can get places in another
/// zone: the largest flow to the room of each donor, found with augmenting paths.
fn separable(others: &[u8], room: &[u32], zones: &[u8]) -> usize {
    let slots = (0..).zip(room);
    let slots = slots.flat_map(|(donor, &room)| (0..room).map(move |_| donor));
    let slots: Vec<u8> = slots.collect();
    let zone = |donor: u8| zones[usize::from(donor)];
    let mut holders: Vec<Option<usize>> = vec![None; slots.len()];
    fn place(
        block: usize,
        fits: &dyn Fn(usize, usize) -> bool,
        holders: &mut [Option<usize>],
        tried: &mut [bool],
    ) -> bool {
        for slot in 0..holders.len() {
            if tried[slot] || !fits(block, slot) {
                continue;
            }
            tried[slot] = true;
            let is_free = match holders[slot] {
                None => true,
                Some(holder) => place(holder, fits, holders, tried),
            };
            if is_free {
                holders[slot] = Some(block);
                return true;
            }
        }
        false
    }
    let fits = |block: usize, slot: usize| zone(others[block]) != zone(slots[slot]);
    let placed = (0..others.len()).filter(|&block| {
        let mut tried = vec![false; slots.len()];
        place(block, &fits, &mut holders, &mut tried)
    });
    placed.count()
}

proptest! {
    #[test]
    fn what_leaves_goes_to_other_zones_as_far_as_any_choice_of_places_can(
        blocks in prop::collection::vec(1_u8..6, 0..14),
        room in prop::collection::vec(0_u32..6, 5),
        zones in prop::collection::vec(0_u8..3, 6),
    ) {
        // All blocks have one copy on donor 0, and the other one on one of five others.
        let mut used = [0_u32; 6];
        let mut take = |donor: u8| {
            used[usize::from(donor)] += 1;
            Place { donor, slot: used[usize::from(donor)] - 1 }
        };
        let places: Vec<_> = blocks.iter().map(|&other| [take(0), take(other)]).collect();
        let all_room: Vec<u32> = [0].into_iter().chain(room).collect();
        let slots: Vec<u32> = used.iter().zip(&all_room).map(|(used, room)| used + room).collect();
        let copies = Copies::new(&places, &slots, &used, &zones);
        let donors: Vec<u8> = (0..6).collect();
        let all = separable(&blocks, &all_room, &donors);
        match copies.leave(0) {
            Err(LeaveError::NoRoom { room, .. }) => {
                prop_assert!(all < blocks.len());
                prop_assert_eq!(room as usize, all);
            }
            Err(other) => prop_assert!(false, "{other:?}"),
            Ok(_) => {
                prop_assert_eq!(all, blocks.len());
                prop_assert_eq!(move_all(&copies).1, 0);
                let apart = separable(&blocks, &all_room, &zones);
                prop_assert_eq!(copies.in_one_zone() as usize, blocks.len() - apart);
            }
        }
    }
}

#[test]
fn a_copy_is_made_again_in_another_zone_while_one_has_room() {
    // Donors 0 and 1 are zone 0, the others zones 1 and 2: two blocks of donor 2 have their other
    // copies on 0, and there is room for one of them outside of zone 0, on donor 3.
    let place = |donor, slot| Place { donor, slot };
    let places = [[place(0, 0), place(2, 0)], [place(2, 1), place(0, 1)]];
    let copies = Copies::new(&places, &[2, 9, 2, 1], &[2, 0, 2, 0], &[0, 0, 1, 2]);
    assert_eq!(copies.in_one_zone(), 0);
    assert_eq!(copies.expel(2, Spared::Blocks), Ok(true));
    let mut targets = Vec::new();
    while let Some(repair) = copies.begin_repair(0) {
        targets.push(repair.to.donor);
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!(targets, [3, 1]);
    assert_eq!((copies.degraded(), copies.in_one_zone()), (0, 1));
}

/// Moves everything; returns how many blocks moved, and how many stayed.
fn move_all(copies: &Copies) -> (u32, u32) {
    for moved in 0.. {
        match copies.begin_move() {
            NextMove::Begun(begun) => {
                let places = copies.readable(begun.block);
                assert_eq!(places.iter().flatten().count(), 2, "both stay readable");
                assert!(!places.contains(&Some(begun.to)), "not before it is full");
                assert!(copies.end_move(&begun, &[]));
            }
            NextMove::Ended { stayed } => return (moved, stayed),
            NextMove::None => panic!("none leaves"),
        }
    }
    unreachable!("it ends")
}

#[test]
fn every_copy_of_a_leaving_donor_moves_to_one_without_the_other_copy() {
    for slots in [&[4, 4, 4][..], &[6, 3, 3, 6], &[2, 2, 2, 2, 2]] {
        let copies = copies(slots, 4);
        let held = copies.blocks_at(1);
        assert_eq!(copies.leave(1), Ok(held));
        assert_eq!(copies.leave(0), Err(LeaveError::Leaving(1)));
        assert!(!copies.retire(1), "it holds copies");
        assert_eq!(move_all(&copies), (held, 0));
        assert_eq!((copies.blocks_at(1), copies.degraded()), (0, 0));
        for block in 0..4 {
            let [first, second] = copies.of(block).map(|copy| copy.place.donor);
            assert_ne!(first, second, "block {block}");
        }
        assert_eq!(copies.begin_move(), NextMove::None);
        assert!(copies.retire(1) && copies.is_out(1) && copies.has_left(1));
        assert!(!copies.readmit(1), "it has left");
        assert_eq!(copies.leave(1), Err(LeaveError::Out));
    }
}

#[test]
fn a_donor_gets_no_copy_between_the_last_move_and_its_end() {
    let copies = copies(&[4, 4, 4, 4], 4);
    let held = copies.blocks_at(0);
    assert_eq!(copies.leave(0), Ok(held));
    assert_eq!(move_all(&copies), (held, 0));
    // Another donor is lost before the first one has left, which has the most room.
    assert_eq!(copies.expel(1, Spared::Blocks), Ok(true));
    let mut from = 0;
    while let Some(repair) = copies.begin_repair(from) {
        assert_ne!(repair.to.donor, 0);
        from = repair.block;
        assert!(copies.end_repair(&repair, &[]));
    }
    // Nor does a copy of another donor that is drained.
    if copies.leave(2).is_ok() {
        move_with_what_is_left(&copies);
    }
    assert_eq!(copies.blocks_at(0), 0);
    assert!(copies.retire(0));
}

#[test]
fn a_donor_without_copies_that_did_not_leave_can_be_drained_again() {
    let copies = copies(&[4, 4, 4], 4);
    let held = copies.blocks_at(0);
    assert_eq!(copies.leave(0), Ok(held));
    assert_eq!(move_all(&copies), (held, 0));
    assert_eq!(copies.leave(0), Ok(0));
    assert_eq!(move_all(&copies), (0, 0));
    assert!(copies.retire(0));
}

#[test]
fn a_donor_whose_copies_find_no_room_stays_and_no_slot_is_taken() {
    let copies = copies(&[4, 4, 1], 4);
    let held = copies.blocks_at(0);
    let refused = copies.leave(0).expect_err("too little room");
    let LeaveError::NoRoom { blocks, room } = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(blocks, held);
    assert!(room < held);
    let rooms =
        |copies: &Copies| -> Vec<u32> { copies.lock().loans.iter().map(Loan::room).collect() };
    let before = rooms(&copies);
    for _ in 0..10 {
        assert_eq!(copies.leave(0), Err(refused));
    }
    assert_eq!(rooms(&copies), before);
    assert_eq!(copies.begin_move(), NextMove::None);
}

#[test]
fn places_are_exchanged_where_that_makes_room_for_all() {
    // Three blocks on donor 0, whose other copies are on 3, 1 and 2, and one slot left on each of
    // these: only some orders of the blocks find places without an exchange.
    for others in [
        [3, 1, 2],
        [3, 2, 1],
        [1, 2, 3],
        [1, 3, 2],
        [2, 1, 3],
        [2, 3, 1],
    ] {
        let pair = |(slot, donor)| [Place { donor: 0, slot }, Place { donor, slot: 0 }];
        let places: Vec<_> = (0..).zip(others).map(pair).collect();
        let copies = Copies::new(&places, &[3, 2, 2, 2], &[3, 1, 1, 1], &[0, 1, 2, 3]);
        assert_eq!(copies.leave(0), Ok(3), "{others:?}");
        assert_eq!(move_all(&copies), (3, 0), "{others:?}");
        for block in 0..3 {
            let [first, second] = copies.of(block).map(|copy| copy.place.donor);
            assert_ne!(first, second, "block {block}");
        }
    }
}

#[test]
fn a_block_with_one_copy_takes_a_place_that_is_reserved_for_a_move() {
    // Donor 0 leaves; donor 1 is lost meanwhile; 2 and 3 have all the room, which is reserved.
    let place = |donor, slot| Place { donor, slot };
    let places = [
        [place(0, 0), place(2, 0)],
        [place(0, 1), place(3, 0)],
        [place(1, 0), place(2, 1)],
        [place(1, 1), place(3, 1)],
    ];
    let copies = Copies::new(&places, &[2, 2, 3, 3], &[2, 2, 2, 2], &[0, 1, 2, 3]);
    assert_eq!(copies.leave(0), Ok(2));
    assert_eq!(copies.expel(1, Spared::Blocks), Ok(true));
    assert_eq!(copies.degraded(), 2);
    let mut from = 0;
    while let Some(repair) = copies.begin_repair(from) {
        from = repair.block;
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!(copies.degraded(), 0);
    assert_eq!(move_with_what_is_left(&copies), (0, 2));
    assert_eq!(copies.degraded(), 0, "what stays has two copies");
}

#[test]
fn what_was_read_from_a_donor_that_went_out_is_not_used() {
    let copies = copies(&[4, 4, 4], 4);
    copies.leave(0).expect("there is room");
    let begun = match copies.begin_move() {
        NextMove::Begun(begun) => begun,
        other => panic!("{other:?}"),
    };
    // The donor that leaves still has the other copy of the block.
    assert_eq!(copies.exclude(begun.from.donor), Ok(true));
    let of_other = [(1 - begun.at, begun.from)];
    assert!(!copies.end_move(&begun, &of_other));
    assert!(!copies.end_repair(&begun, &of_other), "its source is out");
}

#[test]
fn a_copy_that_is_found_to_be_wrong_while_it_moves_is_made_again_first() {
    let place = |donor, slot| Place { donor, slot };
    let places = [[place(1, 0), place(0, 0)], [place(0, 1), place(2, 0)]];
    let copies = Copies::new(&places, &[4, 4, 1, 4], &[2, 1, 1, 0], &[0, 1, 2, 3]);
    assert_eq!(copies.leave(1), Ok(1));
    let NextMove::Begun(begun) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert_eq!((begun.from, begun.to.donor), (place(0, 0), 3));
    // From now on the other block needs donor 0.
    assert_eq!(copies.expel(2, Spared::Blocks), Ok(true));
    assert!(
        copies.spoil(0, 0),
        "the copy of the donor that leaves is right"
    );
    assert_eq!(copies.readable(0), [Some(place(1, 0)), None]);
    assert!(!copies.end_move(&begun, &[(1, begun.from)]));
    copies.give_up_move(&begun);
    // The other one gets a copy as well, so that it goes on with both.
    let mut repaired = Vec::new();
    while let Some(repair) = copies.begin_repair(0) {
        repaired.push((repair.block, repair.from));
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!(repaired, [(0, place(1, 0)), (1, place(0, 1))]);
    assert_eq!(move_all(&copies), (1, 0));
    assert_eq!((copies.degraded(), copies.blocks_at(1)), (0, 0));
}

#[test]
fn what_cannot_move_any_more_stays_and_the_donor_is_used_on() {
    let copies = copies(&[2, 2, 2], 2);
    // Both copies of each block are on donors 0 and 1, or one is on donor 2.
    let held = copies.leave(0).expect("there is room");
    assert!(held > 0);
    // The only donor with room is gone before anything moves.
    let target = match copies.begin_move() {
        NextMove::Begun(begun) => begun,
        other => panic!("{other:?}"),
    };
    assert_eq!(copies.exclude(target.to.donor), Ok(true));
    assert!(!copies.end_move(&target, &[]), "its donor is out");
    copies.give_up_move(&target);
    let (moved, stayed) = move_with_what_is_left(&copies);
    assert_eq!(moved + stayed, held);
    assert!(stayed > 0);
    assert!(!copies.is_out(0));
    assert_eq!(copies.begin_move(), NextMove::None);
}

fn move_with_what_is_left(copies: &Copies) -> (u32, u32) {
    for moved in 0..10 {
        match copies.begin_move() {
            NextMove::Begun(begun) => assert!(copies.end_move(&begun, &[])),
            NextMove::Ended { stayed } => return (moved, stayed),
            NextMove::None => panic!("none leaves"),
        }
    }
    panic!("it does not end")
}

#[test]
fn a_donor_that_goes_out_while_it_leaves_is_one_that_is_lost() {
    let copies = copies(&[4, 4, 4], 4);
    let held = copies.leave(0).expect("there is room");
    let NextMove::Begun(begun) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert!(copies.end_move(&begun, &[]));
    assert_eq!(copies.expel(0, Spared::Blocks), Ok(true));
    assert_eq!(copies.begin_move(), NextMove::Ended { stayed: held - 1 });
    // The reserved places are free again for its copies.
    let mut from = 0;
    while let Some(repair) = copies.begin_repair(from) {
        from = repair.block;
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!((copies.degraded(), copies.blocks_at(0)), (0, 0));
}

#[test]
fn a_copy_that_a_leaving_donor_has_missed_is_moved_and_not_filled() {
    let copies = copies(&[4, 4, 4], 4);
    assert_eq!(copies.exclude(0), Ok(true));
    for block in 0..copies.blocks() {
        let here = copies.all(block).position(|copy| copy.place.donor == 0);
        here.into_iter()
            .for_each(|at| copies.note_missed(block, at, 5));
    }
    assert!(copies.readmit(0));
    let held = copies.blocks_at(0);
    assert_eq!(copies.degraded(), held);
    assert_eq!(copies.leave(0), Ok(held));
    assert_eq!(copies.begin_repair(0), None);
    assert_eq!(move_with_what_is_left(&copies), (held, 0));
    assert_eq!(copies.degraded(), 0);
}

#[test]
fn places_that_a_failed_drain_has_left_are_used_again_when_no_request_is_outstanding() {
    let copies = copies(&[4, 4, 4], 4);
    let (reader, evictor) = (copies.register(), copies.register());
    let before = copies.room_at(0);
    let held = copies.leave(0).expect("there is room");
    let NextMove::Begun(moved) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert!(copies.end_move(&moved, &[]));
    // The donors to which the rest could move are gone.
    let NextMove::Begun(target) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert_eq!(copies.expel(target.to.donor, Spared::Blocks), Ok(true));
    copies.give_up_move(&target);
    let (_, stayed) = move_with_what_is_left(&copies);
    assert!(stayed > 0 && stayed < held);
    let vacated = held - stayed;
    let look = |from| copies.begin_repair(from);

    let epoch = copies.vacated_epoch();
    look(copies.blocks());
    assert_eq!(
        copies.room_at(0),
        before,
        "two threads may have requests there"
    );
    reader.note(epoch);
    look(copies.blocks());
    assert_eq!(copies.room_at(0), before, "one may");
    evictor.note(epoch);
    look(copies.blocks());
    assert_eq!(copies.room_at(0), before + vacated);
    // What was written there stays: such a place is not taken for an empty one.
    let mut ledger = copies.lock();
    let loan = &mut ledger.loans[0];
    let all: Vec<_> = std::iter::from_fn(|| loan.take()).collect();
    assert_eq!(
        all.iter().filter(|(_, is_empty)| !is_empty).count(),
        vacated as usize
    );
}

#[test]
fn each_block_is_counted_once_with_its_first_and_its_other_copy() {
    let copies = copies(&[4, 4, 4], 4);
    copies.leave(0).expect("there is room");
    loop {
        let found = copies.by_donors();
        assert_eq!(found.values().sum::<u32>(), copies.blocks());
        for donor in 0..3 {
            let counted_at = |at: usize| {
                let there = found.iter().filter(|(donors, _)| donors[at] == donor);
                there.map(|(_, blocks)| blocks).sum::<u32>()
            };
            assert_eq!(counted_at(0), copies.first_copies_at(donor));
            assert_eq!(counted_at(0) + counted_at(1), copies.blocks_at(donor));
        }
        let NextMove::Begun(begun) = copies.begin_move() else {
            break;
        };
        assert!(copies.end_move(&begun, &[]));
    }
    assert!(copies.by_donors().keys().all(|donors| !donors.contains(&0)));
}
