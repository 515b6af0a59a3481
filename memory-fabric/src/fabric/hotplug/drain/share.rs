//! Which blocks of memory with one copy move, so that each donor has its share.
//!
//! The share of a donor is in proportion to what it lends. Blocks leave the donors with the largest
//! excess first, from the end of what each holds: neighbours stay neighbours, in which case pages of
//! several blocks are read by one request.

use crate::homes::{Home, HomeTable, NodeId};
use crate::pager::relocate::BlockMove;

/// A donor that can get blocks.
#[derive(Clone, Debug)]
pub(super) struct Lender {
    pub node: NodeId,
    /// Blocks that it lends.
    pub lent: u32,
    /// Slots of these that are free, in order.
    pub free: Vec<u32>,
}

/// A donor while moves are planned.
#[derive(Debug)]
struct Load {
    lender: Lender,
    /// What it holds, in order.
    held: Vec<(u32, Home)>,
    /// How many blocks are to leave it, and to move to it.
    excess: usize,
    lack: usize,
}

/// Returns the moves after which each donor has its share, by ascending block. Blocks on donors that
/// are not among `lenders` stay, and so do those for which there is no free slot.
pub(super) fn plan(homes: &HomeTable, lenders: Vec<Lender>) -> Vec<BlockMove> {
    let loads = lenders.into_iter().map(|lender| Load {
        held: homes.ram_blocks_at(lender.node).collect(),
        lender,
        excess: 0,
        lack: 0,
    });
    let mut loads: Vec<Load> = loads.collect();
    let shares = shares(&loads);
    for (load, share) in loads.iter_mut().zip(shares) {
        load.excess = load.held.len().saturating_sub(share);
        let lack = share.saturating_sub(load.held.len());
        load.lack = lack.min(load.lender.free.len());
    }
    let mut taken: Vec<(usize, u32, Home)> = Vec::new();
    while let (Some(from), Some(to)) = (
        largest(&loads, |load| load.excess),
        largest(&loads, |load| load.lack),
    ) {
        let Some((block, home)) = loads[from].held.pop() else {
            break;
        };
        loads[from].excess -= 1;
        loads[to].lack -= 1;
        taken.push((to, block, home));
    }
    // Neighbours get neighbouring slots.
    taken.sort_unstable_by_key(|&(_, block, _)| block);
    let mut used = vec![0; loads.len()];
    let with_slot = |(to, block, from): (usize, u32, Home)| {
        let Lender { node, free, .. } = &loads[to].lender;
        let (node, slot) = (*node, free[used[to]]);
        used[to] += 1;
        let to = Home { node, slot };
        BlockMove { block, from, to }
    };
    taken.into_iter().map(with_slot).collect()
}

/// Returns the donor with the largest number that is not 0, the first one of several.
fn largest(loads: &[Load], number: impl Fn(&Load) -> usize) -> Option<usize> {
    let numbers = loads.iter().map(number).enumerate();
    let found = numbers.rev().max_by_key(|&(_, number)| number);
    found.filter(|&(_, number)| number > 0).map(|(at, _)| at)
}

/// Returns the share of each donor, in blocks: in proportion to what it lends, the rest to the largest
/// fractions.
fn shares(loads: &[Load]) -> Vec<usize> {
    let held: u64 = loads.iter().map(|load| load.held.len() as u64).sum();
    let lent: u64 = loads.iter().map(|load| u64::from(load.lender.lent)).sum();
    // Below 2^23 each.
    let products = loads.iter().map(|load| held * u64::from(load.lender.lent));
    let products: Vec<u64> = products.collect();
    let lent = lent.max(1);
    let whole = |product: &u64| usize::try_from(product / lent).expect("64-bit host");
    let mut shares: Vec<usize> = products.iter().map(whole).collect();
    let given: u64 = shares.iter().map(|&share| share as u64).sum();
    let mut order: Vec<usize> = (0..loads.len()).collect();
    // Of equal fractions, the donor that holds more keeps it: nothing moves for a rest.
    order.sort_by_key(|&at| {
        let held = loads[at].held.len();
        std::cmp::Reverse((products[at] % lent, held.saturating_sub(shares[at])))
    });
    let rest = usize::try_from(held - given).expect("fewer than donors");
    for at in order.into_iter().take(rest) {
        shares[at] += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{PageIndex, PageRange};
    use std::collections::HashSet;

    /// A guest whose blocks are on these nodes, in slots in order.
    fn guest(nodes: &[u8]) -> HomeTable {
        let pages = u32::try_from(nodes.len()).expect("a few") * 512;
        let ram = PageRange::new(PageIndex::new(0), pages);
        let homes = HomeTable::new(NodeId(0), &[ram], None);
        let mut slots = [0; 256];
        for (block, &node) in (0..).zip(nodes) {
            let slot = slots[usize::from(node)];
            slots[usize::from(node)] += 1;
            let node = NodeId(node);
            homes.assign(block, Home { node, slot });
        }
        homes
    }

    fn lender(node: u8, lent: u32, free: impl IntoIterator<Item = u32>) -> Lender {
        let (node, free) = (NodeId(node), free.into_iter().collect());
        Lender { node, lent, free }
    }

    /// Makes the moves, and returns how many blocks each of these nodes has then.
    fn after(homes: &HomeTable, moves: &[BlockMove], nodes: &[u8]) -> Vec<usize> {
        for &BlockMove { block, from, to } in moves {
            homes.move_home(block, from, to);
        }
        let all: HashSet<_> = (0..64).filter_map(|block| homes.home(block)).collect();
        let blocks = (0..64).filter(|&block| homes.home(block).is_some());
        assert_eq!(all.len(), blocks.count(), "a slot has two blocks");
        let count = |&node| homes.ram_blocks_at(NodeId(node)).count();
        nodes.iter().map(count).collect()
    }

    #[test]
    fn a_donor_that_joins_gets_its_share_from_both_others() {
        let homes = guest(&[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
        let lenders = [lender(1, 6, []), lender(2, 6, []), lender(3, 6, 0..6)];
        let moves = plan(&homes, lenders.to_vec());
        let moved: Vec<_> = moves.iter().map(|one| (one.block, one.to.slot)).collect();
        assert_eq!(moved, [(4, 0), (5, 1), (10, 2), (11, 3)]);
        assert_eq!(after(&homes, &moves, &[1, 2, 3]), [4, 4, 4]);
        let again = [lender(1, 6, []), lender(2, 6, []), lender(3, 6, 4..6)];
        assert_eq!(plan(&homes, again.to_vec()), []);
    }

    #[test]
    fn shares_are_in_proportion_to_what_donors_lend_and_nothing_moves_for_a_rest() {
        let homes = guest(&[1; 10]);
        let lenders = [lender(1, 30, 10..30), lender(2, 10, 0..10)];
        let moves = plan(&homes, lenders.to_vec());
        assert_eq!(after(&homes, &moves, &[1, 2]), [8, 2], "2.5 of 10");
        let homes = guest(&[1, 2, 2]);
        let lenders = [lender(1, 4, 1..4), lender(2, 4, 2..4)];
        assert_eq!(plan(&homes, lenders.to_vec()), []);
    }

    #[test]
    fn only_free_slots_are_used_and_blocks_of_other_donors_stay() {
        let homes = guest(&[1, 1, 1, 1, 1, 1, 2, 2]);
        let lenders = [lender(1, 8, []), lender(3, 8, [5])];
        let moves = plan(&homes, lenders.to_vec());
        assert_eq!(moves.len(), 1);
        assert_eq!(moves[0].to.slot, 5);
        assert_eq!(after(&homes, &moves, &[1, 2, 3]), [5, 2, 1]);
        assert_eq!(plan(&homes, Vec::new()), []);
        assert_eq!(plan(&homes, vec![lender(1, 0, [])]), []);
    }
}
