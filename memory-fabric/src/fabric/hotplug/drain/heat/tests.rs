//! Simulated donors and heats.

use super::*;
use std::collections::HashSet;

/// Donors with a time for a page and slots, and blocks with faults.
struct World {
    policy: HeatPolicy,
    /// Time for a page in us, and slots.
    donors: Vec<(NodeId, u64, u32)>,
    /// The home and the faults of each block.
    blocks: Vec<(Home, u32)>,
}

impl World {
    /// Each donor has these blocks from its first slot on.
    fn new(donors: &[(u64, u32)], blocks: &[u8]) -> Self {
        let mut used = [0; 8];
        let home = |&node: &u8| {
            let slot = used[usize::from(node)];
            used[usize::from(node)] += 1;
            let node = NodeId(node);
            (Home { node, slot }, 0)
        };
        let blocks = blocks.iter().map(home).collect();
        let donors = (1..).zip(donors);
        let donors = donors.map(|(node, &(us, slots))| (NodeId(node), us, slots));
        Self {
            policy: HeatPolicy::default(),
            donors: donors.collect(),
            blocks,
        }
    }

    /// One round; the moves are made.
    fn round(&mut self) -> Vec<BlockMove> {
        let taken: HashSet<Home> = self.blocks.iter().map(|&(home, _)| home).collect();
        let donors = self.donors.iter().map(|&(node, us, slots)| Donor {
            node,
            tier: match us {
                ..=200 => Tier::FastTcp,
                _ => Tier::Slow,
            },
            page: Duration::from_micros(us),
            free: (0..slots)
                .filter(|&slot| !taken.contains(&Home { node, slot }))
                .collect(),
        });
        let numbered = (0..).zip(&self.blocks);
        let blocks = numbered.map(|(block, &(home, faults))| Block {
            block,
            home,
            faults,
        });
        let blocks: Vec<_> = blocks.collect();
        let moves = self.policy.look(donors.collect(), &blocks);
        assert!(moves.len() <= MOVES_MAX);
        for one in &moves {
            let all = self.blocks.iter();
            assert!(all.into_iter().all(|&(home, _)| home != one.to), "{one:?}");
            let block = &mut self.blocks[one.block as usize];
            assert_eq!(block.0, one.from);
            block.0 = one.to;
        }
        moves
    }

    /// So many rounds; returns the number of moves.
    fn rounds(&mut self, count: u32) -> usize {
        (0..count).map(|_| self.round().len()).sum()
    }

    fn heat(&mut self, block: usize, faults: u32) {
        self.blocks[block].1 = faults;
    }

    fn node_of(&self, block: usize) -> u8 {
        self.blocks[block].0.node.0
    }
}

#[test]
fn a_hot_block_moves_to_the_fast_donor_after_several_rounds_and_rests_there() {
    let mut world = World::new(&[(50, 4), (5000, 8)], &[1, 2, 2, 2]);
    world.heat(2, 100);
    assert_eq!(world.rounds(u32::from(ROUNDS_MIN) - 1), 0);
    assert_eq!(world.round().len(), 1);
    assert_eq!(world.node_of(2), 1);
    assert_eq!(world.rounds(50), 0, "nothing returns without a need");
}

#[test]
fn a_cold_block_makes_room_for_a_hot_one_and_a_warm_one_does_not() {
    // The fast donor is full; the slow one has one slot left.
    let mut world = World::new(&[(50, 2), (5000, 4)], &[1, 1, 2, 2, 2]);
    world.heat(0, 90);
    world.heat(1, 2);
    world.heat(4, 100);
    assert_eq!(world.rounds(3), 1, "the cold one first");
    assert_eq!(world.node_of(1), 2);
    assert_eq!(world.rounds(1), 1);
    assert_eq!((world.node_of(0), world.node_of(4)), (1, 1));
    // Another that becomes hot finds no colder one there.
    world.heat(2, 120);
    assert_eq!(world.rounds(50), 0);
    // Without any free slot nothing can be exchanged.
    let mut full = World::new(&[(50, 2), (5000, 2)], &[1, 1, 2, 2]);
    full.heat(2, 100);
    assert_eq!(full.rounds(20), 0);
}

#[test]
fn the_hottest_blocks_move_first_and_few_in_a_round() {
    let blocks = [2; 100];
    let mut world = World::new(&[(50, 60), (900, 200)], &blocks);
    for block in 0..100 {
        world.heat(block, 20 + u32::try_from(block).expect("small"));
    }
    world.rounds(2);
    let first = world.round();
    assert_eq!(first.len(), MOVES_MAX);
    assert!(first.iter().all(|one| one.block >= 100 - 32), "{first:?}");
    world.rounds(20);
    let at_fast: Vec<_> = (0..100)
        .filter(|&block| world.node_of(block) == 1)
        .collect();
    assert_eq!(at_fast, (40..100).collect::<Vec<_>>());
}

#[test]
fn nothing_moves_between_donors_of_one_tier_or_while_one_is_slow_for_a_moment() {
    let mut equal = World::new(&[(50, 8), (180, 8)], &[1, 2, 2]);
    equal.heat(1, 1000);
    assert_eq!(equal.rounds(30), 0);
    let mut world = World::new(&[(50, 8), (60, 8)], &[1, 2, 2]);
    world.heat(1, 1000);
    for round in 0..60 {
        // Slow in two of three rounds.
        world.donors[1].1 = if round % 3 == 0 { 60 } else { 9000 };
        assert_eq!(world.round().len(), 0, "round {round}");
    }
    // Within the slowest tier, a donor at home and one far away.
    let mut far = World::new(&[(300, 8), (30_000, 8)], &[1, 2, 2]);
    far.heat(1, 1000);
    assert_eq!(far.rounds(3), 1);
}

#[test]
fn heat_that_comes_and_goes_moves_nothing_and_no_block_moves_again_soon() {
    let mut world = World::new(&[(50, 1), (5000, 8)], &[1, 2, 2, 2]);
    for round in 0..60 {
        world.heat(2, if round % 3 == 2 { 0 } else { 500 });
        assert_eq!(world.round().len(), 0, "round {round}");
    }
    // Two blocks are hot in turns, for 5 rounds each: the moves are bounded by the rests.
    let mut world = World::new(&[(50, 1), (5000, 8)], &[2, 2]);
    let mut moves = 0;
    for round in 0..240 {
        let hot = usize::from(round / 5 % 2 == 1);
        world.heat(hot, 400);
        world.heat(1 - hot, 0);
        moves += world.round().len();
    }
    assert!(moves <= 240 / usize::from(REST_ROUNDS) * 2 + 1, "{moves}");
}

#[test]
fn after_an_interruption_all_is_counted_anew() {
    let mut world = World::new(&[(50, 4), (5000, 8)], &[2, 2]);
    world.heat(0, 100);
    assert_eq!(world.rounds(2), 0);
    world.policy.interrupt();
    assert_eq!(world.rounds(2), 0);
    assert_eq!(world.rounds(1), 1);
    assert!(HeatPolicy::default().look(Vec::new(), &[]).is_empty());
}
