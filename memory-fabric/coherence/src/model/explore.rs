//! Every state that a small world can be in, and every order of events between them.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

use stateright::{Checker, Model, Property};

use super::world::{Step, World};
use crate::mutation::Mutation;

/// More steps than the accesses of an explored world can need.
const STEPS_MAX: usize = 1000;

/// A world to explore.
#[derive(Clone, Debug)]
pub(super) struct Explored<const P: usize> {
    pub(super) world: World<P>,
}

impl<const P: usize> Explored<P> {
    pub(super) fn new(nodes: usize, pages: usize, is_split: bool, budget: Budget) -> Self {
        Self {
            world: World::new(nodes, pages, budget, is_split),
        }
    }

    pub(super) fn mutate(mut self, mutation: Mutation) -> Self {
        self.world = self.world.mutate(Some(mutation));
        self
    }

    fn verdict(world: &World<P>) -> Result<(), String> {
        if let Some(failure) = &world.failure {
            return Err(failure.clone());
        }
        let mut steps = Vec::new();
        world.system_steps(&mut steps);
        if steps.is_empty() {
            world.check_quiescent()
        } else {
            Ok(())
        }
    }

    /// Explores with stateright. Returns the number of states, or the shortest way to a failure.
    pub(super) fn run(self) -> Result<usize, String> {
        Self::result(&self.checker().threads(2).spawn_bfs().join())
    }

    /// Like [`Self::run`], with less memory and longer ways.
    pub(super) fn run_deep(self) -> Result<usize, String> {
        Self::result(&self.checker().threads(2).spawn_dfs().join())
    }

    fn result(checker: &impl Checker<Self>) -> Result<usize, String> {
        match checker.discovery("every state is right") {
            None => Ok(checker.unique_state_count()),
            Some(path) => {
                let verdict = Self::verdict(path.last_state());
                let steps = path.into_actions();
                let steps: Vec<_> = steps.iter().map(|step| format!("{step:?}")).collect();
                let failure = verdict.expect_err("the property does not hold");
                Err(format!("{failure} after\n{}", steps.join("\n")))
            }
        }
    }

    /// Whether every run ends: the states are finitely many and none is reached again from itself. With
    /// the property that a state without a next step is quiescent: every request is served. Returns the
    /// number of states.
    pub(super) fn ends(&self) -> Result<usize, String> {
        let hasher = std::hash::RandomState::new();
        let key = |world: &World<P>| hasher.hash_one(world);
        // Whether a state is still on the path from the first one.
        let mut on_path = HashMap::from([(key(&self.world), true)]);
        let mut depth = 1;
        let mut path = vec![(self.world.clone(), self.steps(&self.world))];
        while let Some((world, steps)) = path.last_mut() {
            // Numbers only grow, so that a run without an end does not come back to a state.
            if depth > STEPS_MAX {
                return Err(format!("a run is longer than {STEPS_MAX} steps"));
            }
            let Some(step) = steps.pop() else {
                on_path.insert(key(world), false);
                path.pop();
                depth -= 1;
                continue;
            };
            let mut next = world.clone();
            next.apply(step);
            match on_path.get(&key(&next)) {
                Some(true) => {
                    return Err(format!("a run comes back to a state by {step:?}"));
                }
                Some(false) => {}
                None => {
                    on_path.insert(key(&next), true);
                    let steps = self.steps(&next);
                    path.push((next, steps));
                    depth += 1;
                }
            }
        }
        Ok(on_path.len())
    }

    fn steps(&self, world: &World<P>) -> Vec<Step> {
        let mut steps = Vec::new();
        self.actions(world, &mut steps);
        steps
    }
}

impl<const P: usize> Model for Explored<P>
where
    World<P>: Hash,
{
    type State = World<P>;
    type Action = Step;

    fn init_states(&self) -> Vec<Self::State> {
        vec![self.world.clone()]
    }

    fn actions(&self, world: &Self::State, steps: &mut Vec<Step>) {
        if world.failure.is_none() {
            world.system_steps(steps);
            world.outside_steps(steps);
        }
    }

    fn next_state(&self, world: &Self::State, step: Step) -> Option<Self::State> {
        let mut next = world.clone();
        next.apply(step);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("every state is right", |_, world| {
            Self::verdict(world).is_ok()
        })]
    }
}

/// What may still happen that no protocol asks for.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Budget {
    /// Accesses of each node.
    pub(super) accesses: u8,
    pub(super) evictions: u8,
    pub(super) duplicates: u8,
    pub(super) replayed_writes: u8,
    pub(super) crashes: u8,
    pub(super) early_releases: u8,
    pub(super) sweeps: u8,
    pub(super) prefetches: u8,
    /// Whether an access needs two pages at once, in either order.
    pub(super) pairs: bool,
    /// Whether nodes write zeroes, too.
    pub(super) zeroes: bool,
    /// Whether nodes without a directory, which are alike, begin in the order of their places: of runs
    /// that differ in nothing but these places, one is explored.
    pub(super) in_order: bool,
}

pub(super) const NOTHING: Budget = Budget {
    accesses: 0,
    evictions: 0,
    duplicates: 0,
    replayed_writes: 0,
    crashes: 0,
    early_releases: 0,
    sweeps: 0,
    prefetches: 0,
    pairs: false,
    zeroes: false,
    in_order: false,
};

fn explore<const P: usize>(name: &str, explored: Explored<P>) {
    match explored.run_deep() {
        Ok(states) => println!("{name}: {states} states"),
        Err(failure) => panic!("{name}: {failure}"),
    }
}

fn budget(accesses: u8, evictions: u8) -> Budget {
    Budget {
        accesses,
        evictions,
        ..NOTHING
    }
}

#[test]
fn two_nodes_and_a_page_with_repeated_messages() {
    let budget = Budget {
        duplicates: 1,
        ..budget(2, 0)
    };
    let explored = Explored::<1>::new(2, 1, true, budget);
    explore("2 nodes, 1 page, 2 accesses, repeated messages", explored);
}

#[test]
fn two_nodes_and_a_page_with_evictions_and_repeated_writes() {
    let budget = Budget {
        replayed_writes: 1,
        zeroes: true,
        ..budget(1, 2)
    };
    let explored = Explored::<1>::new(2, 1, true, budget);
    explore("2 nodes, 1 page, 2 evictions, repeated writes", explored);
}

#[test]
fn three_nodes_and_a_page() {
    let explored = Explored::<1>::new(3, 1, true, budget(1, 0));
    explore("3 nodes, 1 page", explored);
}

#[test]
fn two_nodes_and_two_pages_of_a_block() {
    let explored = Explored::<2>::new(2, 2, false, budget(1, 1));
    explore("2 nodes, 2 pages of one block, 1 eviction", explored);
}

#[test]
fn two_nodes_with_two_requests_each_for_a_block() {
    let budget = Budget {
        prefetches: 1,
        ..budget(1, 0)
    };
    let explored = Explored::<2>::new(2, 2, false, budget);
    explore("2 nodes, 2 pages of one block, 1 prefetch", explored);
}

#[test]
fn two_nodes_and_two_pages_of_two_directories() {
    let explored = Explored::<1>::new(2, 2, true, budget(1, 1));
    explore("2 nodes, 2 pages of two directories, 1 eviction", explored);
}

#[test]
fn a_block_is_granted_split_and_merged() {
    let budget = Budget {
        sweeps: 1,
        ..budget(1, 1)
    };
    let explored = Explored::<1>::new(2, 1, false, budget);
    explore("2 nodes, 1 block, 1 merge, 1 eviction", explored);
    let budget = Budget {
        evictions: 2,
        replayed_writes: 1,
        ..budget
    };
    let explored = Explored::<1>::new(2, 1, false, budget);
    explore(
        "2 nodes, 1 block, 1 merge, 2 evictions, repeated writes",
        explored,
    );
}

#[test]
fn a_crash_ends_everything_and_names_what_was_lost() {
    let crash = |accesses, evictions| Budget {
        crashes: 1,
        ..budget(accesses, evictions)
    };
    let explored = Explored::<1>::new(2, 1, true, crash(1, 1));
    explore("2 nodes, 1 page, 1 eviction, 1 crash", explored);
    let explored = Explored::<1>::new(2, 1, false, crash(2, 0));
    explore("2 nodes, 1 block, 1 crash", explored);
}

/// Repeated messages and a crash in the same run.
pub(super) fn disturbed(accesses: u8, duplicates: u8, crashes: u8) -> Budget {
    Budget {
        duplicates,
        crashes,
        ..budget(accesses, 0)
    }
}

/// Two nodes and two pages of a block, which is split from the start.
pub(super) fn two_by_two(budget: Budget) -> Explored<2> {
    Explored::new(2, 2, true, budget)
}

/// Two nodes and two pages, each with its directory at another node.
pub(super) fn two_directories(budget: Budget) -> Explored<1> {
    Explored::new(2, 2, true, budget)
}

/// Three nodes and a page.
pub(super) fn three_by_one(budget: Budget) -> Explored<1> {
    Explored::new(3, 1, true, budget)
}

#[test]
fn two_nodes_and_two_pages_with_a_repeated_message_and_a_crash() {
    let budget = disturbed(1, 1, 1);
    explore(
        "2 nodes, 2 pages of one block, a repeated message, 1 crash",
        two_by_two(budget),
    );
    explore(
        "2 nodes, 2 pages of two directories, a repeated message, 1 crash",
        two_directories(budget),
    );
}

/// Two nodes whose accesses need the same two pages at once, of two directories, and ask for the token
/// when they have lost one.
pub(super) fn pairs(accesses: u8, early_releases: u8) -> Explored<1> {
    let budget = Budget {
        pairs: true,
        early_releases,
        ..budget(accesses, 0)
    };
    let mut explored = Explored::<1>::new(2, 2, true, budget);
    explored.world.starves_after = 1;
    explored
}

#[test]
fn nodes_that_hold_what_the_other_one_needs_progress() {
    explore("2 nodes, 2 pages at once", pairs(1, 0));
    let states = pairs(1, 0).ends();
    println!("2 nodes, 2 pages at once: {states:?}, no cycle");
    assert!(states.is_ok(), "{states:?}");
}

#[test]
fn every_run_ends_with_every_request_served() {
    let ends = |name, budget, is_split| {
        let explored = Explored::<1>::new(2, 1, is_split, budget);
        match explored.ends() {
            Ok(states) => println!("{name}: {states} states, no cycle"),
            Err(failure) => panic!("{name}: {failure}"),
        }
    };
    ends("2 nodes, 1 page, 2 accesses", budget(2, 0), true);
    ends("2 nodes, 1 page, 1 eviction", budget(1, 1), true);
    ends("2 nodes, 1 block, 1 eviction", budget(1, 1), false);
    let early = Budget {
        early_releases: 1,
        ..budget(1, 0)
    };
    ends("2 nodes, 1 page, a hold that is too short", early, true);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn long_explorations() {
    let busy = Budget {
        replayed_writes: 1,
        ..budget(2, 1)
    };
    explore("2 nodes, 2 pages at once, a short hold", pairs(1, 1));
    let states = pairs(1, 1).ends();
    println!("2 nodes, 2 pages at once, a short hold: {states:?}, no cycle");
    assert!(states.is_ok(), "{states:?}");
    let explored = Explored::<1>::new(2, 1, true, busy);
    explore(
        "2 nodes, 1 page, 2 accesses, 1 eviction, repeated writes",
        explored,
    );
    let explored = Explored::<2>::new(2, 2, true, budget(2, 0));
    explore("2 nodes, 2 pages, 2 accesses", explored);
    let explored = Explored::<1>::new(3, 1, true, budget(1, 1));
    explore("3 nodes, 1 page, 1 eviction", explored);
    // A home refuses, late, what a node wrote back before the block became its own.
    let merged = Budget {
        sweeps: 1,
        ..budget(2, 2)
    };
    let explored = Explored::<1>::new(2, 1, false, merged);
    explore(
        "2 nodes, 1 block, 2 accesses, 1 merge, 2 evictions",
        explored,
    );
    let crash = Budget {
        crashes: 1,
        ..budget(1, 0)
    };
    let explored = Explored::<1>::new(3, 1, true, crash);
    explore("3 nodes, 1 page, 1 crash", explored);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn long_explorations_with_repeated_messages_and_a_crash() {
    let evicting = Budget {
        evictions: 1,
        ..disturbed(1, 1, 1)
    };
    explore(
        "2 nodes, 2 pages of one block, 1 eviction, a repeated message, 1 crash",
        two_by_two(evicting),
    );
    explore(
        "2 nodes, 2 pages of two directories, 1 eviction, a repeated message, 1 crash",
        two_directories(evicting),
    );
    explore(
        "3 nodes, 1 page, a repeated message",
        three_by_one(disturbed(1, 1, 0)),
    );
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn three_nodes_and_a_page_with_a_repeated_message_and_a_crash() {
    let in_order = Budget {
        in_order: true,
        ..disturbed(1, 1, 1)
    };
    explore(
        "3 nodes, 1 page, a repeated message, 1 crash",
        three_by_one(in_order),
    );
}
