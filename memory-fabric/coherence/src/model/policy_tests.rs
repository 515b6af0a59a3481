//! Worlds whose nodes hold pages by the policy of a runtime.

use super::explore::pairs;
use super::simulate::{Plan, Random, Simulation};
use crate::mutation::Mutation;

/// Nodes that need the same pages at once, or one after the other without a rest.
fn plan(nodes: usize, streams: bool) -> Plan {
    Plan {
        nodes,
        blocks: 2,
        accesses: if streams { 250 } else { 200 },
        pages_at_once: 8,
        only_writes: true,
        delay: 20,
        disturbs: false,
        crashes: false,
        has_policy: true,
        streams,
        is_scarce: false,
    }
}

/// What a simulation showed.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    /// Pages that came, and accesses for which pages had to come.
    came: u64,
    turns: u64,
    tokens: u64,
    /// Pages that were requested ahead.
    ahead: u64,
}

fn simulate(plan: Plan, seed: u64, mutation: Option<Mutation>) -> Result<Shown, String> {
    let mut simulation = Simulation::new(plan, Random::new(seed), mutation);
    simulation.run_to_the_end()?;
    let mut shown = Shown {
        tokens: simulation.world.keeper.granted(),
        ..Shown::default()
    };
    for policy in simulation
        .world
        .nodes
        .iter()
        .filter_map(|node| node.policy.as_ref())
    {
        shown.came += policy.came;
        shown.turns += policy.turns;
        shown.ahead += policy.ahead;
    }
    Ok(shown)
}

/// Simulations of each plan.
const SEEDS: u64 = 20;

/// Simulates a plan with many seeds, up to the first failure.
fn all(plan: Plan, mutation: Option<Mutation>) -> Result<Shown, String> {
    (0..SEEDS).try_fold(Shown::default(), |sum, seed| {
        let shown = simulate(plan, seed, mutation);
        let shown = shown.map_err(|failure| format!("seed {seed}: {failure}"))?;
        Ok(Shown {
            came: sum.came + shown.came,
            turns: sum.turns + shown.turns,
            tokens: sum.tokens + shown.tokens,
            ahead: sum.ahead + shown.ahead,
        })
    })
}

/// Pages that come for a turn of 8 pages where 4 nodes need them, at most.
const CAME_MAX: u64 = 12;

/// 4 nodes that need the same 8 pages at once move few of them for each turn.
fn few_pages_move(mutation: Option<Mutation>) -> Result<Shown, String> {
    let shown = all(plan(4, false), mutation)?;
    if shown.came > CAME_MAX * shown.turns {
        return Err(format!("too many pages move: {shown:?}"));
    }
    Ok(shown)
}

#[test]
fn nodes_progress_and_end_their_holds_with_the_policy() {
    let mut tokens = 0;
    for nodes in [2, 3, 4, 8] {
        for streams in [false, true] {
            let shown = all(plan(nodes, streams), None);
            println!("{nodes} nodes, streams {streams}: {shown:?}");
            tokens += shown.map(|shown| shown.tokens).expect("nothing fails");
        }
    }
    assert!(tokens > 0, "the token was never needed");
    few_pages_move(None).expect("few pages move");
}

#[test]
fn simulations_find_a_broken_policy() {
    for mutation in [
        Mutation::NeverEndHold,
        Mutation::UnboundedGang,
        Mutation::KeepToken,
        Mutation::NoGang,
        Mutation::NoPatience,
        Mutation::NoHold,
    ] {
        let found = few_pages_move(Some(mutation));
        let failure = found.expect_err(&format!("{mutation:?} is not found"));
        println!("{mutation:?}: {failure}");
    }
}

#[test]
fn explorations_find_a_broken_policy() {
    for mutation in [Mutation::NeverEndHold, Mutation::KeepToken] {
        let found = pairs(1, 1).mutate(mutation).run();
        let failure = found.expect_err(&format!("{mutation:?} is not found"));
        println!(
            "{mutation:?}: {}",
            failure.lines().next().unwrap_or_default()
        );
    }
}
