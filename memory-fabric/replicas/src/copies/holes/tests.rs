//! Tests of holes in copies.

use super::*;
use crate::copies::Spared;

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
