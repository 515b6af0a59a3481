//! Defects put into the protocol on purpose: each one has to be found.

use super::explore::{
    Budget, Explored, NOTHING, disturbed, three_by_one, two_by_two, two_directories,
};
use super::simulate::{Plan, Random, Simulation, contend, simulate};
use crate::mutation::Mutation;

/// Accesses and evictions of a small world.
fn budget(accesses: u8, evictions: u8) -> Budget {
    Budget {
        accesses,
        evictions,
        ..NOTHING
    }
}

/// Asserts that an exploration finds the mutation.
fn explore<const P: usize>(mutation: Mutation, explored: Explored<P>) {
    found(mutation, explored.mutate(mutation).run());
}

/// The same where the shortest way to the failure takes much memory.
fn explore_deep<const P: usize>(mutation: Mutation, explored: Explored<P>) {
    found(mutation, explored.mutate(mutation).run_deep());
}

fn found(mutation: Mutation, found: Result<usize, String>) {
    let failure = found.expect_err(&format!("{mutation:?} is not found"));
    let failure = failure.lines().next().unwrap_or_default();
    println!("{mutation:?}: {failure}");
}

/// Asserts that the simulations find the mutation.
fn find(mutation: Mutation) {
    let mut failures = (0..20_000).map(|seed| (seed, simulate(seed, Some(mutation))));
    match failures.find(|(_, result)| result.is_err()) {
        Some((seed, result)) => println!("{mutation:?}: seed {seed}: {result:?}"),
        None => panic!("{mutation:?} is not found"),
    }
}

/// Two nodes write the pages of one block, while memory is scarce.
const SCARCE: Plan = Plan {
    nodes: 2,
    blocks: 1,
    accesses: 200,
    pages_at_once: 1,
    only_writes: true,
    delay: 3,
    disturbs: true,
    crashes: false,
    has_policy: false,
    streams: false,
    is_scarce: true,
};

/// Asserts that some of the simulations of a plan find the mutation, and that they find nothing without
/// it.
fn find_in(plan: Plan, count: u64, mutation: Mutation) {
    let run = |seed, mutation| Simulation::new(plan, Random::new(seed), mutation).run();
    let found = |mutation| {
        let mut failures = (0..count).map(|seed| (seed, run(seed, mutation)));
        failures.find(|(_, result)| result.is_err())
    };
    assert_eq!(found(None), None);
    match found(Some(mutation)) {
        Some((seed, result)) => println!("{mutation:?}: seed {seed}: {result:?}"),
        None => panic!("{mutation:?} is not found"),
    }
}

#[test]
fn explorations_find_broken_transactions() {
    for mutation in [
        Mutation::SkipUnblock,
        Mutation::ReuseNumber,
        Mutation::ForgetSharer,
        Mutation::TrustUpgrade,
        Mutation::DropAck,
        Mutation::AckBeforeZap,
        Mutation::CopyBeforeZap,
        Mutation::KeepWritable,
        Mutation::IgnoreAcks,
        Mutation::NeverUnblock,
        Mutation::UnblockOnGrant,
    ] {
        explore(mutation, Explored::<1>::new(2, 1, true, budget(2, 0)));
    }
}

#[test]
fn explorations_of_more_pages_and_nodes_find_broken_transactions() {
    for mutation in [
        Mutation::DropAck,
        Mutation::CopyBeforeZap,
        Mutation::SkipUnblock,
        Mutation::ReuseNumber,
    ] {
        explore_deep(mutation, two_by_two(budget(2, 0)));
        explore_deep(mutation, two_directories(budget(2, 0)));
        explore_deep(mutation, three_by_one(budget(1, 0)));
        explore_deep(mutation, three_by_one(disturbed(1, 1, 1)));
    }
}

#[test]
fn explorations_find_broken_evictions() {
    for mutation in [
        Mutation::FreeOnPut,
        Mutation::ForgetWriteBack,
        Mutation::IgnoreTouch,
        Mutation::PutWhileBusy,
        Mutation::DropWithoutWait,
        Mutation::DropOwned,
    ] {
        explore(mutation, Explored::<1>::new(2, 1, true, budget(2, 1)));
    }
}

#[test]
fn explorations_find_broken_blocks() {
    let explored = Explored::<2>::new(2, 2, false, budget(2, 0));
    explore(Mutation::SplitForgetsOwner, explored);
    let prefetch = Budget {
        prefetches: 1,
        ..budget(1, 0)
    };
    let explored = Explored::<2>::new(2, 2, false, prefetch);
    explore(Mutation::ServeVoid, explored);
}

#[test]
fn explorations_find_mixed_write_backs() {
    let explored = Explored::<1>::new(1, 1, true, budget(3, 2));
    explore(Mutation::MixWriteBacks, explored);
}

#[test]
fn explorations_find_repeated_messages_and_forgotten_survivors() {
    let duplicates = Budget {
        duplicates: 1,
        ..budget(2, 0)
    };
    let explored = Explored::<1>::new(2, 1, true, duplicates);
    explore(Mutation::NoDuplicateFilter, explored);
    let crash = Budget {
        crashes: 1,
        ..budget(1, 0)
    };
    explore(Mutation::NoFence, Explored::<1>::new(2, 1, true, crash));
}

#[test]
fn simulations_find_broken_write_backs() {
    find(Mutation::CallItClean);
    // Rare: a home that is sent a write-back again after the page's next owner wrote its own. So few
    // nodes write much, and no policy delays that.
    let plan = Plan {
        nodes: 4,
        accesses: 30,
        delay: 30,
        is_scarce: false,
        ..SCARCE
    };
    find_in(plan, 2_000, Mutation::HomeTakesAll);
    // Rarer still: a write-back that is answered after the page was lost, written by another node, and
    // came back with its whole block.
    find_in(SCARCE, 1_000, Mutation::ForgetWritesOnWay);
}

#[test]
fn without_a_minimum_hold_two_nodes_take_a_page_from_each_other_for_ever() {
    let explored = Explored::<1>::new(2, 1, true, budget(1, 0)).mutate(Mutation::NoHold);
    let failure = explored.ends().expect_err("NoHold is not found");
    assert!(failure.contains("longer"), "{failure}");
}

#[test]
fn the_token_alone_lets_nodes_progress_that_need_the_same_eight_pages() {
    for seed in 0..5 {
        let result = contend(2, seed, Some(Mutation::NoHold));
        assert!(result.is_ok(), "seed {seed}: {result:?}");
    }
}
