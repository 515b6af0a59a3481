//! The places of both copies of each block, or of its pieces.

use crate::stripe::Layout;

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

/// Numbers the zones of donors: donors whose zones have one name share a number, and a donor
/// without a name is a zone of its own.
///
/// # Panics
///
/// With more than 256 donors; the fabric allows far fewer.
#[must_use]
pub fn zones<'a>(names: impl IntoIterator<Item = Option<&'a str>>) -> Vec<u8> {
    let mut known: Vec<Option<&str>> = Vec::new();
    let number = |name: Option<&'a str>| {
        let same = known.iter().position(|one| name.is_some() && *one == name);
        let at = same.unwrap_or_else(|| {
            known.push(name);
            known.len() - 1
        });
        u8::try_from(at).expect("at most 256 donors")
    };
    names.into_iter().map(number).collect()
}

impl Placement {
    /// Places `wanted` blocks, or as many as fit, on donors that lend these slots and are in these
    /// zones, in proportion to the slots.
    ///
    /// Each donor gets a consecutive part of a sequence of all copies that is at most half as long
    /// as the sequence (McNaughton's wrap-around rule, Management Science 6, 1959). Elements half a
    /// sequence apart are therefore on different donors, and are the copies of one block.
    ///
    /// The donors of a zone follow each other. A zone with at most half the copies therefore has no
    /// block twice. One needs to have more only if all others are full, and then holds both copies
    /// of the blocks beyond that half: as many as with any other placement.
    ///
    /// # Panics
    ///
    /// With more than 256 donors; the fabric allows far fewer.
    #[must_use]
    pub fn new(slots: &[u32], zones: &[u8], wanted: u32) -> Self {
        assert_eq!(slots.len(), zones.len(), "each donor has a zone");
        let blocks = capacity(slots).min(wanted);
        let used = used_slots(slots, zones, blocks);
        let mut by_zone: Vec<u8> = (0..=u8::MAX).take(slots.len()).collect();
        by_zone.sort_by_key(|&donor| zones[usize::from(donor)]);
        let places = |donor: u8| {
            let count = used[usize::from(donor)];
            (0..count).map(move |slot| Place { donor, slot })
        };
        let sequence: Vec<Place> = by_zone.into_iter().flat_map(places).collect();
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

/// Returns for how many blocks donors that lend these slots for pieces can store all pieces on
/// different donors.
#[must_use]
pub fn stripe_capacity(slots: &[u32], layout: Layout) -> u32 {
    let width = layout.pieces() as u64;
    // A donor has at most one piece of a block.
    let is_enough = |blocks: u32| {
        let usable = slots.iter().map(|&slots| u64::from(slots.min(blocks)));
        usable.sum::<u64>() >= width * u64::from(blocks)
    };
    let most = slots.iter().map(|&slots| u64::from(slots)).sum::<u64>() / width;
    let (mut fits, mut too_many) = (0, u32::try_from(most).map_or(u32::MAX, |most| most + 1));
    while fits + 1 < too_many {
        let middle = fits + (too_many - fits) / 2;
        match is_enough(middle) {
            true => fits = middle,
            false => too_many = middle,
        }
    }
    fits
}

/// The places of the pieces of blocks.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StripePlacement {
    /// The places of the pieces of each block, in order, block by block. Blocks with their first
    /// piece on the same donor are consecutive, in the order of the donors.
    pub places: Vec<Place>,
    /// For each donor, the number of blocks with their first piece there.
    pub primaries: Vec<u32>,
    /// For each donor, the number of used slots: the first ones of its loan.
    pub used: Vec<u32>,
}

impl StripePlacement {
    /// Places `wanted` blocks, or as many as fit, on donors that lend these slots, in proportion to
    /// them.
    ///
    /// This is the rule of [`Placement::new`] for more copies: elements of the sequence that are as
    /// far apart as there are blocks are the pieces of one block. Which of them are pieces of data
    /// differs from block to block, so that all donors are read.
    #[must_use]
    pub fn new(slots: &[u32], layout: Layout, wanted: u32) -> Self {
        let width = layout.pieces();
        let blocks = stripe_capacity(slots, layout).min(wanted);
        let lent: Vec<u64> = slots.iter().map(|&slots| slots.into()).collect();
        let most: Vec<u64> = slots
            .iter()
            .map(|&slots| slots.min(blocks).into())
            .collect();
        let used = shares(&lent, &most, width as u64 * u64::from(blocks));
        let count = |share: u64| u32::try_from(share).expect("at most the slots of the donor");
        let used: Vec<u32> = used.into_iter().map(count).collect();
        let places = (0..=u8::MAX).zip(&used);
        let sequence = places.flat_map(|(donor, &used)| (0..used).map(move |slot| (donor, slot)));
        let sequence: Vec<Place> = sequence
            .map(|(donor, slot)| Place { donor, slot })
            .collect();
        let count = blocks as usize;
        let pieces = |block: usize| {
            let turned = (0..width).map(move |at| (at + block) % width);
            let sequence = &sequence;
            turned.map(move |at| sequence[at * count + block])
        };
        let mut stripes: Vec<Vec<Place>> =
            (0..count).map(|block| pieces(block).collect()).collect();
        stripes.sort_by_key(|stripe| stripe[0].donor);
        let mut primaries = vec![0; slots.len()];
        for stripe in &stripes {
            primaries[usize::from(stripe[0].donor)] += 1;
        }
        Self {
            places: stripes.concat(),
            primaries,
            used,
        }
    }
}

/// Divides the copies of `blocks` blocks among the zones, and what a zone gets among its donors: at
/// most one copy of each block for a donor, and for a zone while others have room.
fn used_slots(slots: &[u32], zones: &[u8], blocks: u32) -> Vec<u32> {
    let zones_end = zones.iter().max().map_or(0, |&last| usize::from(last) + 1);
    let (mut lent, mut most) = (vec![0_u64; zones_end], vec![0_u64; zones_end]);
    for (&slots, &zone) in slots.iter().zip(zones) {
        lent[usize::from(zone)] += u64::from(slots);
        most[usize::from(zone)] += u64::from(slots.min(blocks));
    }
    let once = |&most: &u64| most.min(u64::from(blocks));
    let copies = 2 * u64::from(blocks);
    let mut of_zones = shares(&lent, &most.iter().map(once).collect::<Vec<_>>(), copies);
    // Only one zone can have more room than for each block once when the others are full.
    let mut left = copies - of_zones.iter().sum::<u64>();
    for (share, &most) in of_zones.iter_mut().zip(&most) {
        let part = left.min(most - *share);
        *share += part;
        left -= part;
    }
    debug_assert_eq!(
        left, 0,
        "{blocks} blocks are at most the capacity of {slots:?}"
    );
    let mut used = vec![0; slots.len()];
    for (zone, &share) in of_zones.iter().enumerate() {
        let here: Vec<usize> = (0..slots.len())
            .filter(|&donor| usize::from(zones[donor]) == zone)
            .collect();
        let lent: Vec<u64> = here.iter().map(|&donor| slots[donor].into()).collect();
        let most: Vec<u64> = lent.iter().map(once).collect();
        for (donor, share) in here.into_iter().zip(shares(&lent, &most, share)) {
            used[donor] = u32::try_from(share).expect("at most the slots of the donor");
        }
    }
    used
}

/// Divides `copies` in proportion to these weights, at most so many for each, as far as there is
/// room.
fn shares(weights: &[u64], most: &[u64], copies: u64) -> Vec<u64> {
    let sum: u64 = weights.iter().sum();
    let share = |(&weight, &most): (&u64, &u64)| {
        let exact = u128::from(copies) * u128::from(weight) / u128::from(sum.max(1));
        u64::try_from(exact).unwrap_or(u64::MAX).min(most)
    };
    let mut shares: Vec<u64> = weights.iter().zip(most).map(share).collect();
    let mut left = copies - shares.iter().sum::<u64>();
    // The rest goes to those with room in turn.
    for (share, &most) in shares.iter_mut().zip(most) {
        let part = left.min(most - *share);
        *share += part;
        left -= part;
    }
    shares
}

#[cfg(test)]
mod tests;
