//! Which worlds are explored, and which defects are found in them.

use stateright::{Checker, Model, Property};

use super::world::{ABOVE, BELOW, Op, Step, W, World};
use crate::mutation::Mutation;

#[derive(Clone)]
struct Explored {
    world: World,
    /// The bytes of a table that was freed, and is ordinary memory at the end.
    freed: Option<[u64; W]>,
}

impl Model for Explored {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![self.world.clone()]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Step>) {
        if world.failure.is_none() {
            actions.extend(world.steps());
        }
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut world = world.clone();
        world.take(step);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("right", |explored: &Self, world| {
            explored.verdict(world).is_ok()
        })]
    }
}

impl Explored {
    fn verdict(&self, world: &World) -> Result<(), String> {
        if let Some(failure) = &world.failure {
            return Err(failure.clone());
        }
        if world.steps().is_empty() {
            world.check_end(self.freed)
        } else {
            Ok(())
        }
    }

    /// Returns the number of states, or the shortest way to a failure.
    fn run(self) -> Result<usize, String> {
        let model = self.clone();
        let checker = self.checker().threads(1).spawn_bfs().join();
        let Some(path) = checker.discovery("right") else {
            return Ok(checker.unique_state_count());
        };
        let verdict = model.verdict(path.last_state());
        let steps = path.into_actions();
        Err(format!("{verdict:?} after {steps:?}"))
    }
}

const SEVEN: Op = Op::Store(ABOVE, 1, 7);
const UNLINK: Op = Op::Store(ABOVE, 0, 0);

/// A store into a table is seen by one who got an interrupt afterwards.
fn messages(homes: [usize; 2], mutation: Option<Mutation>) -> Result<usize, String> {
    let world = World::new(
        homes,
        &[
            &[SEVEN, Op::Signal(1)],
            &[Op::Wait, Op::Expect(ABOVE, 1, 7), Op::Signal(2)],
            &[Op::Wait, Op::Expect(ABOVE, 1, 7)],
        ],
        mutation,
    );
    let holders: Vec<usize> = (0..3).filter(|node| *node != homes[0]).collect();
    let world = world.joined(ABOVE, &holders);
    Explored { world, freed: None }.run()
}

/// What one node has seen, the next one sees, too.
fn seen(mutation: Option<Mutation>) -> Result<usize, String> {
    let world = World::new(
        [0, 0],
        &[
            &[SEVEN, Op::Signal(0)],
            &[Op::If(ABOVE, 1, 7), Op::Signal(2)],
            &[Op::Wait, Op::Expect(ABOVE, 1, 7)],
        ],
        mutation,
    );
    let world = world.joined(ABOVE, &[1, 2]);
    Explored { world, freed: None }.run()
}

/// Two nodes change one entry, and another one each.
fn conflict(mutation: Option<Mutation>) -> Result<usize, String> {
    let world = World::new(
        [0, 0],
        &[
            &[SEVEN, Op::Signal(1), Op::Store(ABOVE, 1, 9), Op::Signal(1)],
            &[Op::Store(ABOVE, 1, 8), Op::Signal(0)],
        ],
        mutation,
    );
    let world = world.joined(ABOVE, &[1]);
    Explored { world, freed: None }.run()
}

/// A node unlinks a table, says so, and all use it as ordinary memory.
fn freed(homes: [usize; 2], by: usize, mutation: Option<Mutation>) -> Result<usize, String> {
    let other = 1 - by;
    let freeing = [
        UNLINK,
        Op::Increment(BELOW),
        Op::Signal(other),
        Op::Increment(BELOW),
    ];
    let using = [Op::Store(BELOW, 0, 3), Op::Wait, Op::Increment(BELOW)];
    let mut programs: [&[Op]; 2] = [&freeing, &using];
    if by == 1 {
        programs.swap(0, 1);
    }
    let above = 1 - homes[0];
    let world = World::new(homes, &programs, mutation).joined(ABOVE, &[above]);
    Explored {
        world,
        freed: Some([3, 3]),
    }
    .run()
}

/// The same with a third node, which walks through the table or joins it late.
fn freed_beside(homes: [usize; 2], mutation: Option<Mutation>) -> Result<usize, String> {
    let world = World::new(
        homes,
        &[
            &[UNLINK, Op::Signal(1), Op::Increment(BELOW)],
            &[Op::Wait, Op::Increment(BELOW)],
            &[
                Op::If(ABOVE, 0, super::world::LINK),
                Op::Expect(BELOW, 0, 0),
            ],
        ],
        mutation,
    );
    let holders: Vec<usize> = (0..3).filter(|node| *node != homes[0]).collect();
    let world = world.joined(ABOVE, &holders);
    Explored {
        world,
        freed: Some([0, 2]),
    }
    .run()
}

#[test]
fn stores_into_merged_tables_are_seen_before_what_follows_them() {
    for homes in [[0, 0], [1, 1], [2, 2]] {
        let states = messages(homes, None).expect("messages");
        eprintln!(
            "message passing over three nodes, home {}: {states} states",
            homes[0]
        );
    }
    eprintln!("what was seen: {} states", seen(None).expect("seen"));
    eprintln!("conflict: {} states", conflict(None).expect("conflict"));
}

#[test]
fn a_table_that_is_freed_is_ordinary_memory_for_all() {
    for homes in [[0, 0], [0, 1], [1, 0], [1, 1]] {
        for by in [0, 1] {
            let states = freed(homes, by, None);
            let states = states.unwrap_or_else(|failure| panic!("{homes:?} {by}: {failure}"));
            eprintln!("freed by {by}, homes {homes:?}: {states} states");
        }
    }
    for homes in [[0, 0], [0, 1], [1, 0], [2, 1], [1, 2]] {
        let states = freed_beside(homes, None);
        let states = states.unwrap_or_else(|failure| panic!("{homes:?}: {failure}"));
        eprintln!("freed beside a third node, homes {homes:?}: {states} states");
    }
}

#[test]
fn each_defect_is_found() {
    let finds = |mutation: Mutation, found: &[Result<usize, String>]| {
        assert!(
            found.iter().any(Result::is_err),
            "{mutation:?} is not found"
        );
    };
    for mutation in [Mutation::NoSettling, Mutation::NoFenceOfTables] {
        finds(mutation, &[messages([0, 0], Some(mutation))]);
    }
    let settling = Some(Mutation::NoSettling);
    assert!(seen(settling).is_err(), "what was seen does not count");
    for mutation in [
        Mutation::KeepUnlinked,
        Mutation::ConfirmEarly,
        Mutation::ForgetLastChanges,
    ] {
        let all = [[0, 0], [0, 1], [1, 0]];
        let found: Vec<_> = all
            .into_iter()
            .flat_map(|homes| [0, 1].map(|by| freed(homes, by, Some(mutation))))
            .chain(all.map(|homes| freed_beside(homes, Some(mutation))))
            .collect();
        finds(mutation, &found);
    }
}
