use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

/// Donors without zones.
fn apart(slots: &[u32], wanted: u32) -> Placement {
    Placement::new(slots, &zones(slots.iter().map(|_| None)), wanted)
}

/// Returns how many blocks have both copies in one zone.
fn in_one_zone(placement: &Placement, zones: &[u8]) -> usize {
    let zone = |place: Place| zones[usize::from(place.donor)];
    let is_in_one = |pair: &&[Place; 2]| zone(pair[0]) == zone(pair[1]);
    placement.blocks.iter().filter(is_in_one).count()
}

#[test]
fn two_donors_hold_one_copy_of_each_block_and_half_of_the_primary_ones() {
    let placement = apart(&[10, 12], 8);
    assert_eq!(placement.blocks.len(), 8);
    assert_eq!(placement.primaries, [4, 4]);
    assert_eq!(placement.used, [8, 8]);
}

#[test]
fn a_large_donor_is_used_only_as_far_as_the_others_hold_the_second_copies() {
    assert_eq!(capacity(&[100, 3, 4]), 7);
    assert_eq!(capacity(&[5, 5, 5]), 7);
    assert_eq!(capacity(&[9]), 0);
    assert_eq!(capacity(&[]), 0);
}

#[test]
fn zones_are_numbered_by_name_and_donors_without_one_are_alone() {
    let names = [Some("a"), None, Some("b"), Some("a"), None];
    assert_eq!(zones(names), [0, 1, 2, 0, 3]);
}

#[test]
fn both_zones_of_four_donors_have_every_block_once() {
    // The donors of a zone are not neighbours, and without zones 0 and 2 would share blocks.
    let placement = Placement::new(&[20, 20, 20, 20], &[0, 1, 0, 1], 40);
    assert_eq!(placement.blocks.len(), 40);
    assert_eq!(in_one_zone(&placement, &[0, 1, 0, 1]), 0);
    assert!(in_one_zone(&apart(&[20, 20, 20, 20], 40), &[0, 1, 0, 1]) > 0);
}

#[test]
fn a_zone_with_too_much_of_the_memory_has_only_what_no_other_holds_twice() {
    let zones = [0, 0, 1];
    let placement = Placement::new(&[10, 10, 4], &zones, 12);
    assert_eq!(placement.blocks.len(), 12);
    assert_eq!(placement.used[2], 4);
    assert_eq!(in_one_zone(&placement, &zones), 8);
}

/// Returns for how many blocks donors have pieces on different ones, by taking one of each block from
/// those with the most slots left.
fn one_by_one(slots: &[u32], width: usize) -> u32 {
    let mut left = slots.to_vec();
    for blocks in 0.. {
        left.sort_unstable_by(|one, other| other.cmp(one));
        if left.len() < width || left[width - 1] == 0 {
            return blocks;
        }
        left[..width].iter_mut().for_each(|slots| *slots -= 1);
    }
    unreachable!("slots are used up")
}

#[test]
fn more_donors_than_pieces_have_room_for_more_blocks_than_each_has_slots() {
    let layout = "4+2".parse().expect("a layout");
    assert_eq!(stripe_capacity(&[220; 8], layout), 293);
    assert_eq!(stripe_capacity(&[220; 6], layout), 220);
    assert_eq!(stripe_capacity(&[220; 5], layout), 0);
    assert_eq!(stripe_capacity(&[], layout), 0);
}

/// Donors, each with slots and a zone.
fn donors() -> impl Strategy<Value = Vec<(u32, u8)>> {
    prop::collection::vec((0_u32..40, 0_u8..4), 0..9)
}

proptest! {
    #[test]
    fn stripes_have_as_many_blocks_as_fit(slots in prop::collection::vec(0_u32..60, 0..12)) {
        for layout in ["2+1", "4+2"] {
            let layout: Layout = layout.parse().expect("a layout");
            prop_assert_eq!(stripe_capacity(&slots, layout), one_by_one(&slots, layout.pieces()));
        }
    }

    #[test]
    fn copies_are_on_different_donors_and_no_slot_is_used_twice(
        donors in donors(),
        wanted in 0_u32..200,
    ) {
        let (slots, zones): (Vec<u32>, Vec<u8>) = donors.into_iter().unzip();
        let placement = Placement::new(&slots, &zones, wanted);
        prop_assert_eq!(placement.blocks.len(), capacity(&slots).min(wanted) as usize);
        let mut seen = HashSet::new();
        for [first, second] in &placement.blocks {
            prop_assert_ne!(first.donor, second.donor);
            for place in [first, second] {
                prop_assert!(place.slot < placement.used[usize::from(place.donor)]);
                prop_assert!(seen.insert(*place), "{:?} is used twice", place);
            }
        }
        for (used, slots) in placement.used.iter().zip(&slots) {
            prop_assert!(used <= slots);
        }
        let primaries: Vec<u8> = placement.blocks.iter().map(|pair| pair[0].donor).collect();
        prop_assert!(primaries.is_sorted());
        for (donor, &count) in (0_u8..).zip(&placement.primaries) {
            prop_assert_eq!(primaries.iter().filter(|&&at| at == donor).count(), count as usize);
        }
    }

    /// A block with a copy outside the largest zone uses a slot there, so no placement has fewer
    /// blocks in one zone.
    #[test]
    fn as_few_blocks_as_possible_have_both_copies_in_one_zone(
        donors in donors(),
        wanted in 0_u32..200,
    ) {
        let (slots, zones): (Vec<u32>, Vec<u8>) = donors.into_iter().unzip();
        let placement = Placement::new(&slots, &zones, wanted);
        let lent = |zone: u8| -> u32 {
            let here = slots.iter().zip(&zones).filter(|(_, at)| **at == zone);
            here.map(|(slots, _)| slots).sum()
        };
        let outside = slots.iter().sum::<u32>() - (0..4).map(lent).max().unwrap_or(0);
        let blocks = placement.blocks.len();
        let least = blocks.saturating_sub(outside as usize);
        prop_assert_eq!(in_one_zone(&placement, &zones), least);
    }
}
