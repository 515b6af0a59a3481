//! Tests of holes in copies.

use super::*;
use crate::copies::Spared;
use crate::stripe::Layout;

const fn place(donor: u8, slot: u32) -> Place {
    Place { donor, slot }
}

fn copies() -> Copies {
    let places = [[place(0, 0), place(1, 0)], [place(0, 1), place(1, 1)]];
    Copies::new(&places, &[2, 2], &[2, 2], &[0, 1])
}

#[test]
fn a_hole_is_of_one_page_of_one_place_until_it_is_filled() {
    let copies = copies();
    assert!(!copies.has_holes());
    copies.add_hole(place(0, 1), 0);
    copies.add_hole(place(0, 1), 0);
    copies.add_hole(place(1, 0), 511);
    assert!(copies.lacks(place(0, 1), 0, 1) && copies.lacks(place(1, 0), 500, 12));
    assert!(!copies.lacks(place(0, 1), 1, 511) && !copies.lacks(place(0, 0), 0, 512));
    assert!(copies.lacks_at(0, 1, 0) && !copies.lacks_at(1, 1, 0));
    assert!(copies.has_no_other(1, 1, 0) && copies.has_no_other(0, 0, 511));
    assert!(!copies.has_no_other(0, 1, 0), "the other copy has it");
    assert!(!copies.has_no_other(0, 0, 3), "there is no hole");
    copies.fill_holes(place(0, 1), 0, 1);
    assert!(!copies.lacks(place(0, 1), 0, 1) && copies.has_holes());
    copies.fill_holes(place(1, 0), 0, 512);
    assert!(!copies.has_holes());
}

#[test]
fn every_page_may_be_a_hole() {
    let copies = copies();
    let all = [place(0, 0), place(1, 1)];
    for place in all {
        (0..512).for_each(|page| copies.add_hole(place, page));
        assert!((0..512).all(|page| copies.lacks(place, page, 1)));
    }
    copies.fill_holes(all[0], 63, 66);
    for page in 0..512 {
        let is_filled = (63..129).contains(&page);
        assert_eq!(copies.lacks(all[0], page, 1), !is_filled, "{page}");
        assert!(copies.lacks(all[1], page, 1));
    }
    assert!(!copies.lacks(all[0], 63, 66) && copies.lacks(all[0], 63, 67));
    all.into_iter()
        .for_each(|place| copies.fill_holes(place, 0, 512));
    assert!(!copies.has_holes());
    // The last slot that there can be.
    let last = place(63, SLOTS_MAX - 1);
    copies.add_hole(last, 511);
    assert!(copies.lacks(last, 511, 1) && !copies.lacks(place(63, 0), 511, 1));
}

#[test]
fn a_donor_with_a_page_that_the_other_lacks_does_not_go_out_while_it_may_return() {
    let copies = copies();
    copies.add_hole(place(1, 1), 7);
    assert_eq!(copies.lost_pages(), 0);
    assert!(copies.exclude(0).is_err());
    assert_eq!(copies.exclude(1), Ok(true), "the other has all");
    assert!(copies.readmit(1));
    assert!(copies.begin_repair(0).is_some());
    let copies = self::copies();
    (6..8).for_each(|page| copies.add_hole(place(1, 1), page));
    copies.add_hole(place(0, 1), 6);
    assert_eq!(copies.lost_pages(), 1, "none has page 6");
    assert!(copies.exclude(0).is_err());
    assert_eq!(
        copies.expel(0, Spared::Blocks),
        Ok(true),
        "its memory is gone"
    );
    assert_eq!(copies.lost_pages(), 2);
    copies.fill_holes(place(1, 1), 0, 512);
    assert_eq!(copies.lost_pages(), 0, "written since");
}

#[test]
fn a_piece_that_may_have_missed_a_write_back_makes_no_other_donor_superfluous() {
    let layout: Layout = "4+2".parse().expect("possible");
    let places: Vec<_> = (0..6).map(|donor| place(donor, 0)).collect();
    let copies = Copies::striped(&places, layout, &[1; 6], &[1; 6]);
    copies.keep_holes();
    // Page 3 is written while donor 5 is out; then the piece of donor 0 is made again without it.
    assert_eq!(copies.exclude(5), Ok(true));
    copies.note_missed(0, 5, 3);
    copies.add_hole(place(0, 0), 3);
    assert!(copies.readmit(5));
    assert!(
        copies.exclude(1).is_err(),
        "three others are sure to have it"
    );
    assert_eq!(copies.lost_pages(), 0);
    let repair = copies.begin_repair(0).expect("that of donor 5");
    assert_eq!((repair.at, repair.to), (5, place(5, 0)));
    assert!(copies.exclude(1).is_err());
    copies.add_hole(repair.to, 3);
    assert!(copies.end_repair(&repair, &[]));
    assert!(copies.exclude(1).is_err(), "donors 1 to 4 have it");
    assert_eq!(copies.exclude(5), Ok(true), "it lacks the page");
    assert_eq!(copies.note_lost(0..1), 0);
    assert!(copies.expel(1, Spared::Blocks).is_ok());
    assert_eq!(copies.note_lost(0..1), 1);
}

#[test]
fn a_new_copy_that_lacks_what_it_has_not_got_yet_is_not_waited_for_and_a_loss_is_noted_once() {
    let places = [[place(0, 0), place(1, 0)]];
    let copies = Copies::new(&places, &[1; 3], &[1, 1, 0], &[0, 1, 2]);
    copies.keep_holes();
    copies.add_hole(place(1, 0), 7);
    assert!(copies.expel(0, Spared::Blocks).is_ok());
    assert_eq!((copies.lost_pages(), copies.note_lost(0..1)), (1, 1));
    let repair = copies.begin_repair(0).expect("there is room");
    assert_eq!(repair.to, place(2, 0));
    assert!((0..512).all(|page| copies.lacks(repair.to, page, 1)));
    copies.fill_holes(repair.to, 0, 7);
    assert_eq!(copies.note_lost(0..1), 0);
    assert_eq!(
        copies.exclude(2),
        Ok(true),
        "it has nothing that donor 1 lacks"
    );
    assert!(copies.expel(2, Spared::Blocks).is_ok());
    assert_eq!((copies.lost_pages(), copies.note_lost(0..1)), (1, 0));
    // It is written, and lost again.
    copies.forget_lost(0, 7, 1);
    assert_eq!(copies.note_lost(0..1), 1);
    copies.forget_pages(0, 6, 2);
    assert_eq!((copies.lost_pages(), copies.note_lost(0..1)), (0, 0));
}

#[test]
fn a_page_that_valid_copies_lack_may_be_in_one_that_is_not() {
    let copies = copies();
    copies.add_hole(place(1, 0), 7);
    assert!(copies.has_gap(0, 7, 1) && copies.has_gap(0, 0, 8) && !copies.has_gap(0, 0, 7));
    assert!(copies.spoil(0, 0));
    let sources = |page| [0, 1].map(|at| copies.source_at(0, at, page, 1));
    let (here, other) = (place(0, 0), place(1, 0));
    assert_eq!(
        sources(7),
        [Some((here, Has::Perhaps)), Some((other, Has::NotAll))]
    );
    assert_eq!(
        sources(6),
        [Some((here, Has::Perhaps)), Some((other, Has::All))]
    );
    assert!(!copies.has_no_other(1, 0, 7) && copies.has_no_other(0, 0, 7));
    copies.add_hole(here, 7);
    assert_eq!(sources(7), [None, Some((other, Has::NotAll))]);
    assert!(copies.has_no_other(1, 0, 7));
}

#[test]
fn a_place_that_is_used_again_takes_no_more_memory() {
    let copies = copies();
    copies.keep_holes();
    let first = place(0, 0);
    copies.begin_place(first);
    let pages = std::ptr::from_ref(copies.holes.of(first).expect("made"));
    for _ in 0..3 {
        assert!((0..512).all(|page| copies.lacks(first, page, 1)));
        copies.fill_holes(first, 0, 512);
        assert!(!copies.has_holes());
        copies.begin_place(first);
        assert!(std::ptr::eq(copies.holes.of(first).expect("kept"), pages));
    }
    // A page that is a hole twice is counted once.
    copies.begin_place(first);
    copies.fill_holes(first, 0, 512);
    assert!(!copies.has_holes());
}
