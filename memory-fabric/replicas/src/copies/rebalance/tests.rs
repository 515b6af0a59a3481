//! Copies move to donors with less than their share; the thread that repairs is played by the test.

use super::*;
use crate::copies::NextMove;
use crate::copies::Spared;
use crate::placement::{Placement, StripePlacement, zones};

fn copies(slots: &[u32], blocks: u32) -> Copies {
    let zones = zones(slots.iter().map(|_| None));
    let placement = Placement::new(slots, &zones, blocks);
    Copies::new(&placement.blocks, slots, &placement.used, &zones).with_joiners(2)
}

fn striped(slots: &[u32], layout: &str, blocks: u32) -> Copies {
    let layout = layout.parse().expect("possible");
    let placement = StripePlacement::new(slots, layout, blocks);
    Copies::striped(&placement.places, layout, slots, &placement.used).with_joiners(2)
}

fn join(copies: &Copies, donor: u8, slots: u32, beside: Option<u8>) {
    assert!(copies.join(donor, slots, beside));
    assert!(copies.note_joined(donor) && copies.readmit(donor));
}

/// Moves everything; returns how many copies moved, and how many stayed.
fn move_all(copies: &Copies) -> (u32, u32) {
    for moved in 0.. {
        match copies.begin_move() {
            NextMove::Begun(begun) => {
                assert_eq!(copies.degraded(), 0, "all stay readable");
                assert!(!copies.has_copy(begun.block, begun.to.donor));
                assert!(copies.end_move(&begun, &[]));
            }
            NextMove::Ended { stayed } => return (moved, stayed),
            NextMove::None => panic!("nothing is rebalanced"),
        }
    }
    unreachable!("it ends")
}

fn held<const N: usize>(copies: &Copies) -> [u32; N] {
    std::array::from_fn(|donor| copies.blocks_at(u8::try_from(donor).expect("small")))
}

fn assert_apart(copies: &Copies) {
    for block in 0..copies.blocks() {
        let donors = copies.all(block).map(|copy| copy.place.donor);
        let mut donors: Vec<u8> = donors.collect();
        donors.sort_unstable();
        donors.dedup();
        assert_eq!(donors.len(), copies.width(), "block {block}");
    }
}

#[test]
fn a_donor_that_joins_gets_its_share_by_what_it_lends() {
    for (slots, wanted) in [(24, [16, 16, 16]), (12, [9, 19, 20]), (48, [16, 16, 16])] {
        let copies = copies(&[24, 24], 24);
        join(&copies, 2, slots, None);
        let moves = copies.rebalance().expect("nothing moves");
        assert_eq!(copies.rebalance(), Err(LeaveError::Rebalancing));
        assert_eq!(copies.leave(0), Err(LeaveError::Rebalancing));
        assert_eq!(move_all(&copies), (moves, 0));
        let held: [u32; 3] = held(&copies);
        let mut sorted = held;
        sorted.sort_unstable();
        assert_eq!((sorted, held[2]), (wanted, wanted[0]), "{slots} slots");
        assert_apart(&copies);
        assert_eq!(copies.begin_repair(0), None);
        // What they have left is used again.
        let room = [0, 1].map(|donor| copies.room_at(donor));
        assert_eq!(room, [24 - held[0], 24 - held[1]]);
        assert_eq!(copies.rebalance(), Ok(0));
        assert_eq!(move_all(&copies), (0, 0));
    }
}

#[test]
fn several_donors_that_join_get_their_shares_though_both_copies_of_blocks_move() {
    let copies = copies(&[8, 8], 8);
    join(&copies, 2, 8, None);
    join(&copies, 3, 8, Some(2));
    // Four each, of which eight have to move off both: none beside a copy in the same zone.
    assert_eq!(copies.rebalance(), Ok(8));
    assert_eq!(move_all(&copies), (8, 0));
    assert_eq!((held(&copies), copies.in_one_zone()), ([4, 4, 4, 4], 0));
    assert_apart(&copies);
    let copies = self::copies(&[12, 12], 8);
    join(&copies, 2, 1 << 20, None);
    join(&copies, 3, 1 << 20, None);
    assert_eq!(copies.rebalance(), Ok(8));
    assert_eq!(move_all(&copies), (8, 0));
    assert_eq!(
        held(&copies),
        [4, 4, 4, 4],
        "a donor has one copy of a block at most"
    );
}

#[test]
fn it_stops_and_goes_on() {
    let copies = copies(&[24, 24], 24);
    assert!(!copies.stop_rebalancing(), "there is nothing to stop");
    join(&copies, 2, 24, None);
    assert_eq!(copies.rebalance(), Ok(16));
    let NextMove::Begun(begun) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert!(copies.stop_rebalancing());
    assert!(copies.end_move(&begun, &[]));
    assert_eq!(move_all(&copies), (0, 15));
    assert_eq!((held(&copies), copies.room_at(2)), ([23, 24, 1], 23));
    assert_eq!(copies.rebalance(), Ok(15));
    // A move that is given up after that is not begun again.
    let NextMove::Begun(begun) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert!(copies.stop_rebalancing());
    copies.give_up_move(&begun);
    assert_eq!(move_all(&copies), (0, 15));
    assert_eq!(copies.rebalance(), Ok(15));
    assert_eq!(move_all(&copies), (15, 0));
    assert_eq!(held(&copies), [16, 16, 16]);
}

#[test]
fn no_copy_moves_into_the_zone_of_the_other_one() {
    let copies = copies(&[8, 8], 8);
    join(&copies, 2, 8, Some(1));
    // Copies of donor 0 would be beside those of donor 1.
    assert_eq!(copies.rebalance(), Ok(3));
    assert_eq!(move_all(&copies), (3, 0));
    assert_eq!((held(&copies), copies.in_one_zone()), ([8, 5, 3], 0));
}

#[test]
fn copies_that_share_a_zone_move_within_it() {
    let zones = zones([Some("rack"); 2]);
    let (slots, blocks) = ([8, 8], 8);
    let placement = Placement::new(&slots, &zones, blocks);
    let copies = Copies::new(&placement.blocks, &slots, &placement.used, &zones).with_joiners(2);
    join(&copies, 2, 8, Some(0));
    let moves = copies.rebalance().expect("nothing moves");
    assert!(moves > 0);
    assert_eq!(move_all(&copies), (moves, 0));
    assert_eq!(held(&copies).map(|held: u32| held / 5), [1; 3]);
    assert_apart(&copies);
}

#[test]
fn what_cannot_move_since_the_new_donor_is_lost_stays() {
    let copies = copies(&[24, 24], 24);
    join(&copies, 2, 24, None);
    assert_eq!(copies.rebalance(), Ok(16));
    for _ in 0..4 {
        let NextMove::Begun(begun) = copies.begin_move() else {
            panic!("nothing moves");
        };
        assert!(copies.end_move(&begun, &[]));
    }
    let NextMove::Begun(begun) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert_eq!(copies.expel(2, Spared::Blocks), Ok(true));
    assert!(!copies.end_move(&begun, &[]));
    copies.give_up_move(&begun);
    assert_eq!(copies.degraded(), 4);
    let mut repaired = 0;
    while let Some(repair) = copies.begin_repair(0) {
        assert!(copies.end_repair(&repair, &[]));
        repaired += 1;
    }
    // The places that the four had left are used again once nothing moves.
    let before = repaired;
    assert_eq!(move_all(&copies), (0, 12));
    while let Some(repair) = copies.begin_repair(0) {
        assert!(copies.end_repair(&repair, &[]));
        repaired += 1;
    }
    assert_eq!((before, repaired, copies.degraded()), (0, 4, 0));
    assert_eq!(held(&copies), [24, 24, 0]);
}

#[test]
fn a_donor_that_gives_may_be_lost_meanwhile() {
    let copies = copies(&[24, 24], 24);
    join(&copies, 2, 24, None);
    assert_eq!(copies.rebalance(), Ok(16));
    let NextMove::Begun(begun) = copies.begin_move() else {
        panic!("nothing moves");
    };
    assert!(copies.end_move(&begun, &[]));
    assert_eq!(copies.expel(0, Spared::Blocks), Ok(true));
    // A block without a second copy comes before one that moves, and gets its place.
    while let Some(repair) = copies.begin_repair(0) {
        assert!(copies.end_repair(&repair, &[]));
    }
    assert!(copies.degraded() <= 1, "only the one that has moved");
    let (_, stayed) = move_all_that_can(&copies);
    assert!(stayed > 0);
    while let Some(repair) = copies.begin_repair(0) {
        assert!(copies.end_repair(&repair, &[]));
    }
    assert_eq!((copies.degraded(), held(&copies)), (0, [0, 24, 24]));
}

fn move_all_that_can(copies: &Copies) -> (u32, u32) {
    for moved in 0.. {
        match copies.begin_move() {
            NextMove::Begun(begun) => assert!(copies.end_move(&begun, &[])),
            NextMove::Ended { stayed } => return (moved, stayed),
            NextMove::None => panic!("nothing is rebalanced"),
        }
    }
    unreachable!("it ends")
}

#[test]
fn pieces_of_stripes_move_to_a_donor_that_joins_and_off_one_that_leaves() {
    for (layout, donors) in [("2+1", 3), ("4+2", 6), ("4+2", 7), ("8+2", 10)] {
        let copies = striped(&vec![24; donors], layout, 24);
        let (new, width) = (u8::try_from(donors).expect("few"), copies.width());
        let before = copies.blocks_at(0);
        let refused = copies.leave(0);
        if donors == width {
            let (blocks, room) = (24, 0);
            assert_eq!(refused, Err(LeaveError::NoRoom { blocks, room }));
        } else {
            assert_eq!(refused, Ok(before));
            assert_eq!(move_all(&copies), (before, 0));
            assert!(copies.retire(0));
            assert!(copies.join(0, 24, None) && copies.note_joined(0) && copies.readmit(0));
        }
        join(&copies, new, 24, None);
        let moves = copies.rebalance().expect("nothing moves");
        assert!(moves > 0);
        assert_eq!(move_all(&copies), (moves, 0));
        assert_apart(&copies);
        let share = 24 * u32::try_from(width).expect("few") / (u32::from(new) + 1);
        for donor in 0..=new {
            let held = copies.blocks_at(donor);
            assert!(
                (share..=share + u32::from(new)).contains(&held),
                "{layout}: {donor} has {held}"
            );
        }
        let held = copies.blocks_at(1);
        assert_eq!(copies.leave(1), Ok(held));
        assert_eq!(move_all(&copies), (held, 0));
        assert!(copies.retire(1));
        assert_eq!(copies.degraded(), 0);
        assert_apart(&copies);
    }
}
