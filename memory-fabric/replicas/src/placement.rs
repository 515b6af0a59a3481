//! The places of both copies of each block.

/// The place of a copy: a donor, and a block of its loan.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Place {
    /// Index of the donor's link.
    pub donor: u8,
    /// The block of its loan.
    pub slot: u32,
}

/// The places of blocks, and what remains of the loans.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Placement {
    /// Both places of each block; the first is the primary one. Blocks with their primary place on
    /// the same donor are consecutive, in the order of the donors.
    pub blocks: Vec<[Place; 2]>,
    /// For each donor, the number of blocks with their primary place there.
    pub primaries: Vec<u32>,
    /// For each donor, the number of used slots: the first ones of its loan.
    pub used: Vec<u32>,
}

/// Returns for how many blocks donors that lend these slots can store two copies on different
/// donors.
#[must_use]
pub fn capacity(slots: &[u32]) -> u32 {
    let sum: u64 = slots.iter().copied().map(u64::from).sum();
    let most = u64::from(slots.iter().copied().max().unwrap_or(0));
    // A donor cannot hold more copies than all others together.
    u32::try_from((sum / 2).min(sum - most)).unwrap_or(u32::MAX)
}

impl Placement {
    /// Places `wanted` blocks, or as many as fit, on donors that lend these slots, in proportion to
    /// them.
    ///
    /// Each donor gets a consecutive part of a sequence of all copies that is at most half as long
    /// as the sequence (McNaughton's wrap-around rule, Management Science 6, 1959). Elements half a
    /// sequence apart are therefore on different donors, and are the copies of one block.
    ///
    /// # Panics
    ///
    /// With more than 256 donors; the fabric allows far fewer.
    #[must_use]
    pub fn new(slots: &[u32], wanted: u32) -> Self {
        let blocks = capacity(slots).min(wanted);
        let used = shares(slots, blocks);
        let donors = || (0..=u8::MAX).zip(&used);
        let sequence: Vec<Place> = donors()
            .flat_map(|(donor, &count)| (0..count).map(move |slot| Place { donor, slot }))
            .collect();
        let (first, second) = sequence.split_at(blocks as usize);
        let mut primaries = vec![0_u32; slots.len()];
        let mut pairs: Vec<[Place; 2]> = Vec::with_capacity(first.len());
        for (&one, &other) in first.iter().zip(second) {
            let load = |place: Place| {
                let donor = usize::from(place.donor);
                // As a part of what the donor holds.
                (u64::from(primaries[donor]) << 32) / u64::from(used[donor].max(1))
            };
            let pair = if load(other) < load(one) {
                [other, one]
            } else {
                [one, other]
            };
            primaries[usize::from(pair[0].donor)] += 1;
            pairs.push(pair);
        }
        pairs.sort_by_key(|pair| pair[0].donor);
        Self {
            blocks: pairs,
            primaries,
            used,
        }
    }
}

/// Divides the copies of `blocks` blocks among the donors: in proportion to their slots, and at
/// most one copy of each block for each.
fn shares(slots: &[u32], blocks: u32) -> Vec<u32> {
    let sum: u64 = slots.iter().copied().map(u64::from).sum();
    let copies = 2 * u64::from(blocks);
    let mut shares: Vec<u32> = slots
        .iter()
        .map(|&slots| {
            let share = copies * u64::from(slots) / sum.max(1);
            u32::try_from(share).unwrap_or(u32::MAX).min(blocks)
        })
        .collect();
    let mut left = copies - shares.iter().copied().map(u64::from).sum::<u64>();
    // The rest goes to donors with room in turn.
    for (share, &slots) in shares.iter_mut().zip(slots) {
        let room = slots.min(blocks) - *share;
        let part = u32::try_from(left).unwrap_or(u32::MAX).min(room);
        *share += part;
        left -= u64::from(part);
    }
    debug_assert_eq!(
        left, 0,
        "{blocks} blocks are at most the capacity of {slots:?}"
    );
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn two_donors_hold_one_copy_of_each_block_and_half_of_the_primary_ones() {
        let placement = Placement::new(&[10, 12], 8);
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

    proptest! {
        #[test]
        fn copies_are_on_different_donors_and_no_slot_is_used_twice(
            slots in prop::collection::vec(0_u32..40, 0..9),
            wanted in 0_u32..200,
        ) {
            let placement = Placement::new(&slots, wanted);
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
    }
}
