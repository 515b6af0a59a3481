//! Which blocks of memory with one copy move because of their heat: hot ones to fast donors, and cold
//! ones away from there to make room. A policy without clocks and threads; one look is a round.
//!
//! Heat is the number of faults in a block in the last 10 to 20 s, as the pager counts them: what is
//! cached all the time and never faults costs no donor anything. What a fast donor saves is the time
//! of faults, so only those count.
//!
//! Nothing moves to and fro: a donor is faster only by a factor and for several rounds, a block is hot
//! or cold only for several rounds, makes way only for one with several times its faults, and rests
//! after a move.

use crate::homes::{Home, NodeId};
use crate::pager::relocate::BlockMove;
use crate::policy::Tier;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

/// Faults in the last 10 to 20 s from which on a block is hot, and below which it is cold.
pub(crate) const HOT_FAULTS_MIN: u32 = 16;

/// A block makes way for one with this many times its faults.
const COLDER_BY: u32 = 4;

/// Rounds in a row for which a block has to be hot or cold, and a donor faster, before a block moves.
const ROUNDS_MIN: u8 = 3;

/// Rounds for which a block stays after a move.
const REST_ROUNDS: u8 = 12;

/// Limit of moves in a round: half a second at the limit of the rate of moves.
const MOVES_MAX: usize = 32;

/// A donor of a better tier is faster if a page takes at most 1 / so much of the time.
const FASTER_BY: u32 = 2;

/// Any other one: the slowest tier has no limit, so that two donors of it may differ by much.
const FASTER_BY_ALONE: u32 = 4;

/// A donor that can give and get blocks.
#[derive(Clone, Debug)]
pub(super) struct Donor {
    pub node: NodeId,
    pub tier: Tier,
    /// Time to fetch a page, as measured.
    pub page: Duration,
    /// Free slots of its loan, in order.
    pub free: Vec<u32>,
}

impl Donor {
    fn is_faster_than(&self, other: &Self) -> bool {
        let factor = match self.tier < other.tier {
            true => FASTER_BY,
            false => FASTER_BY_ALONE,
        };
        self.page.saturating_mul(factor) <= other.page
    }
}

/// A block with its home on one of these donors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub block: u32,
    pub home: Home,
    pub faults: u32,
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Rounds in a row in which it was hot, or cold.
    hot: u8,
    cold: u8,
    /// Rounds for which it rests.
    rests: u8,
}

/// Decides which blocks move, from what it saw in the last rounds.
#[derive(Debug, Default)]
pub struct HeatPolicy {
    blocks: Vec<Record>,
    /// For a fast and a slow donor, the rounds in a row in which they were that.
    faster: HashMap<(NodeId, NodeId), u8>,
}

impl HeatPolicy {
    /// Forgets all rounds, but not which blocks rest: the donors are not as they were.
    pub(super) fn interrupt(&mut self) {
        self.faster.clear();
        for record in &mut self.blocks {
            (record.hot, record.cold) = (0, 0);
        }
    }

    /// Takes what is seen in a round. Returns the moves that follow from it, which are to be made before
    /// the next round; each to a free slot.
    pub(super) fn look(&mut self, donors: Vec<Donor>, blocks: &[Block]) -> Vec<BlockMove> {
        self.note_donors(&donors);
        self.note_blocks(blocks);
        let mut donors = donors;
        donors.sort_by_key(|donor| (donor.tier, donor.page));
        donors.iter_mut().for_each(|donor| donor.free.reverse());
        let mut hot = self.settled(blocks, |record| record.hot);
        hot.sort_by_key(|one| Reverse(one.faults));
        let mut cold = self.settled(blocks, |record| record.cold);
        cold.sort_by_key(|one| Reverse(one.faults));
        let mut moves = Vec::new();
        for one in hot {
            if moves.len() == MOVES_MAX {
                break;
            }
            let from = one.home.node;
            let faster = |fast: &&mut Donor| self.is_faster(fast.node, from);
            let room = donors
                .iter_mut()
                .filter(faster)
                .find(|fast| !fast.free.is_empty());
            if let Some(fast) = room {
                moves.extend(self.take(one, fast));
                continue;
            }
            // It moves in a later round, when a cold one has made room.
            let is_colder = |other: &&Block| other.faults.saturating_mul(COLDER_BY) <= one.faults;
            let makes_room = |other: &&Block| self.is_faster(other.home.node, from);
            let coldest = cold
                .iter()
                .rev()
                .filter(is_colder)
                .find(makes_room)
                .copied();
            let Some(other) = coldest else {
                continue;
            };
            let is_slower = |slow: &&mut Donor| self.is_faster(other.home.node, slow.node);
            let mut slower = donors.iter_mut().rev().filter(is_slower);
            if let Some(slow) = slower.find(|slow| !slow.free.is_empty()) {
                moves.extend(self.take(other, slow));
                cold.retain(|one| one.block != other.block);
            }
        }
        moves
    }

    fn note_donors(&mut self, donors: &[Donor]) {
        let before = std::mem::take(&mut self.faster);
        for fast in donors {
            for slow in donors.iter().filter(|slow| fast.is_faster_than(slow)) {
                let pair = (fast.node, slow.node);
                let rounds = before.get(&pair).copied().unwrap_or(0);
                self.faster.insert(pair, rounds.saturating_add(1));
            }
        }
    }

    fn is_faster(&self, fast: NodeId, slow: NodeId) -> bool {
        let rounds = self.faster.get(&(fast, slow));
        rounds.is_some_and(|&rounds| rounds >= ROUNDS_MIN)
    }

    fn note_blocks(&mut self, blocks: &[Block]) {
        let end = blocks.iter().map(|one| one.block as usize + 1).max();
        let end = end.unwrap_or(0).max(self.blocks.len());
        self.blocks.resize(end, Record::default());
        for one in blocks {
            let record = &mut self.blocks[one.block as usize];
            record.rests = record.rests.saturating_sub(1);
            (record.hot, record.cold) = match one.faults >= HOT_FAULTS_MIN {
                true => (record.hot.saturating_add(1), 0),
                false => (0, record.cold.saturating_add(1)),
            };
        }
    }

    /// Returns the blocks that may move, since they were hot or cold for several rounds.
    fn settled(&self, blocks: &[Block], rounds: impl Fn(&Record) -> u8) -> Vec<Block> {
        let all = blocks.iter().copied();
        let settled = all.filter(|one| {
            let record = &self.blocks[one.block as usize];
            record.rests == 0 && rounds(record) >= ROUNDS_MIN
        });
        settled.collect()
    }

    /// Moves a block to a free slot of a donor.
    fn take(&mut self, one: Block, donor: &mut Donor) -> Option<BlockMove> {
        let slot = donor.free.pop()?;
        self.blocks[one.block as usize].rests = REST_ROUNDS;
        let node = donor.node;
        Some(BlockMove {
            block: one.block,
            from: one.home,
            to: Home { node, slot },
        })
    }
}

#[cfg(test)]
mod tests;
