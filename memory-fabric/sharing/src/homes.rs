//! The home of each block: the member that keeps its directory and stores its bytes while no node
//! has a copy.

use std::ops::Range;
use std::sync::Arc;

use fabric_coherence::members::MEMBERS_MAX;
use fabric_coherence::{Member, MemberSet};
use fabric_homes::{BLOCK_BYTES, BLOCK_PAGES};

/// What the members lend is less than the guest's memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "the nodes lend {} MiB of memory, and the guest has {} MiB: lend {} MiB more",
    mib(*lent),
    mib(*guest),
    mib(guest - lent)
)]
pub struct TooLittleLent {
    /// Blocks of the guest.
    pub guest: u64,
    /// Blocks that all members lend.
    pub lent: u64,
}

const fn mib(blocks: u64) -> u64 {
    (blocks * BLOCK_BYTES) >> 20
}

/// The homes of all blocks. The same on every node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Homes {
    blocks: Arc<[Member]>,
    /// The blocks that the guest has, in their order.
    guest: Arc<[Range<usize>]>,
    /// How many of the guest's blocks each member is the home of.
    shares: [usize; MEMBERS_MAX],
}

/// Which blocks of the guest's memory have their home at which member.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Layout {
    /// Blocks of all members, mixed evenly: the guest takes all memory for alike.
    #[default]
    Mixed,
    /// Those of one member after those of the other, by their place: the guest sees which memory is
    /// where.
    InOrder,
}

impl Homes {
    /// Homes of so many blocks, one member after the other.
    #[must_use]
    pub fn in_turns(members: MemberSet, blocks: usize) -> Self {
        let turns: Vec<Member> = members.iter().collect();
        let mut shares = [0; MEMBERS_MAX];
        let homes = (0..blocks).map(|block| turns[block % turns.len()]);
        let blocks: Arc<[Member]> = homes.collect();
        blocks.iter().for_each(|home| shares[home.index()] += 1);
        Self {
            guest: std::iter::once(0..blocks.len()).collect(),
            blocks,
            shares,
        }
    }

    /// Homes in proportion to the blocks that the members lend, by their place. The guest has the
    /// blocks of `ranges`; nobody uses others below the last one.
    ///
    /// # Errors
    /// When the guest has more blocks than are lent.
    pub fn in_proportion(
        lent: &[u64],
        ranges: &[Range<usize>],
        layout: Layout,
    ) -> Result<Self, TooLittleLent> {
        let guest: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let shares = shares(guest as u64, lent)?;
        let end = ranges.last().map_or(0, |range| range.end);
        let mut homes = vec![member(0); end];
        let guest_blocks = ranges.iter().cloned().flatten();
        if layout == Layout::InOrder {
            let places = (0..).zip(shares);
            let places = places.flat_map(|(place, share)| std::iter::repeat_n(place, share));
            for (block, place) in guest_blocks.zip(places) {
                homes[block] = member(place);
            }
            return Ok(Self {
                blocks: homes.into(),
                guest: ranges.into(),
                shares,
            });
        }
        // Each block goes to the member that is furthest behind its share.
        let mut behind = [0_i64; MEMBERS_MAX];
        for block in guest_blocks {
            for (behind, share) in behind.iter_mut().zip(shares) {
                *behind += i64::try_from(share).unwrap_or(i64::MAX);
            }
            let furthest = (0..MEMBERS_MAX).rev().max_by_key(|place| behind[*place]);
            let place = furthest.unwrap_or_default();
            behind[place] -= i64::try_from(guest).unwrap_or(i64::MAX);
            homes[block] = member(place);
        }
        Ok(Self {
            blocks: homes.into(),
            guest: ranges.into(),
            shares,
        })
    }

    /// The home of each block.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Member> {
        self.blocks.iter().copied()
    }

    /// The guest's blocks whose home a member is, in their order.
    pub fn blocks_at(&self, member: Member) -> impl Iterator<Item = usize> {
        let blocks = self.guest.iter().cloned().flatten();
        blocks.filter(move |block| self.blocks[*block] == member)
    }

    /// Number of blocks, unused ones included.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// How many of the guest's pages have their home at a member.
    #[must_use]
    pub fn pages_at(&self, member: Member) -> usize {
        self.shares[member.index()] * BLOCK_PAGES as usize
    }
}

fn member(place: usize) -> Member {
    let member = u8::try_from(place).ok().and_then(Member::at);
    member.expect("a place below the limit of members")
}

/// Divides the guest's blocks in proportion to what is lent; what rounding leaves goes to those who
/// would have got most of a block more.
fn shares(guest: u64, lent: &[u64]) -> Result<[usize; MEMBERS_MAX], TooLittleLent> {
    let sum = lent
        .iter()
        .fold(0_u64, |sum, lent| sum.saturating_add(*lent));
    if guest > sum || lent.len() > MEMBERS_MAX {
        return Err(TooLittleLent { guest, lent: sum });
    }
    let exact = |lent: u64| u128::from(guest) * u128::from(lent);
    let whole = u128::from(sum).max(1);
    let mut shares = [0; MEMBERS_MAX];
    let mut rests: Vec<(u128, usize)> = Vec::new();
    for (place, lent) in lent.iter().enumerate() {
        shares[place] = usize::try_from(exact(*lent) / whole).unwrap_or(usize::MAX);
        rests.push((exact(*lent) % whole, place));
    }
    rests.sort_by_key(|(rest, place)| (std::cmp::Reverse(*rest), *place));
    let given: usize = shares.iter().sum();
    let left = usize::try_from(guest).unwrap_or(usize::MAX) - given;
    for (_, place) in rests.into_iter().take(left) {
        shares[place] += 1;
    }
    Ok(shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_are_in_proportion_and_mixed() {
        let homes =
            Homes::in_proportion(&[4, 2, 2], &[0..4, 10..14], Layout::Mixed).expect("enough");
        let at = |range: Range<usize>| range.map(|block| homes.blocks[block].index());
        assert_eq!(at(0..4).collect::<Vec<_>>(), [0, 1, 2, 0]);
        assert_eq!(at(10..14).collect::<Vec<_>>(), [0, 1, 2, 0]);
        assert_eq!((homes.len(), homes.pages_at(member(0))), (14, 2048));
        assert_eq!(homes.pages_at(member(2)), 1024);
    }

    #[test]
    fn homes_in_order_are_parts_of_the_memory() {
        let ranges = [0..4, 10..14];
        let homes = Homes::in_proportion(&[4, 2, 2], &ranges, Layout::InOrder).expect("enough");
        let blocks = |place| homes.blocks_at(member(place)).collect::<Vec<_>>();
        // Blocks that nobody uses have no place anywhere.
        assert_eq!(blocks(0), [0, 1, 2, 3]);
        assert_eq!((blocks(1), blocks(2)), (vec![10, 11], vec![12, 13]));
        assert_eq!(homes.pages_at(member(0)), 2048);
    }

    #[test]
    fn equal_loans_take_turns() {
        for count in 1..=4_u8 {
            let members = (0..count).filter_map(Member::at);
            let members = members.fold(MemberSet::EMPTY, MemberSet::with);
            let blocks = 12;
            let lent = vec![blocks as u64; count.into()];
            let homes =
                Homes::in_proportion(&lent, std::slice::from_ref(&(0..blocks)), Layout::Mixed);
            assert_eq!(homes, Ok(Homes::in_turns(members, blocks)));
        }
    }

    #[test]
    fn nobody_stores_more_than_it_lends() {
        let mut random = 1_u64;
        for _ in 0..1000 {
            let mut next = |below: u64| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (random >> 33) % below
            };
            let lent: Vec<u64> = (0..=next(16)).map(|_| next(100)).collect();
            let sum: u64 = lent.iter().sum();
            let guest = if next(2) == 0 { sum } else { next(sum + 1) };
            let whole = usize::try_from(guest).expect("small");
            let layout = [Layout::Mixed, Layout::InOrder][usize::from(next(2) == 0)];
            let homes = Homes::in_proportion(&lent, std::slice::from_ref(&(0..whole)), layout)
                .expect("enough");
            let mut found = vec![0; lent.len()];
            homes.iter().for_each(|home| found[home.index()] += 1);
            for (place, (found, lent)) in found.into_iter().zip(&lent).enumerate() {
                assert!(found <= *lent, "{guest} of {lent:?}");
                let pages = homes.pages_at(member(place));
                assert_eq!(pages as u64, found * u64::from(BLOCK_PAGES));
            }
        }
    }

    #[test]
    fn too_little_is_refused_with_what_is_missing() {
        let refused = Homes::in_proportion(&[4, 3], std::slice::from_ref(&(0..8)), Layout::Mixed)
            .expect_err("too little");
        let text = refused.to_string();
        assert!(
            text.contains("lend 14 MiB") && text.contains("has 16 MiB"),
            "{text}"
        );
        assert!(text.contains("lend 2 MiB more"), "{text}");
    }
}
