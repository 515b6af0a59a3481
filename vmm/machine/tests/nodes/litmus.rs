//! Litmus tests of a guest whose two vCPUs are on two nodes.

use std::time::Instant;

use ssi_hv_machine::Outcome;
use tiny_guests::nodes::litmus_on_two_nodes;

use super::support::kvm_is_there;
use super::{LIMIT, Running};

#[test]
fn no_outcome_is_forbidden_and_no_store_lost() {
    if !kvm_is_there() {
        return;
    }
    // One lap: some rounds of each test.
    let running = Running::start(litmus_on_two_nodes::code(), true, 1);
    let begin = Instant::now();
    let nodes = running.nodes.iter();
    let stats: Vec<_> = nodes.map(|node| node.stats().clone()).collect();
    let (primary, secondary, said) = running.finish(LIMIT);
    println!("{:?}", begin.elapsed());
    // A letter before `!` would be that of the test with a forbidden outcome.
    assert_eq!(said, "k");
    assert_eq!((primary, secondary), (Outcome::Shutdown, Outcome::Shutdown));
    for stats in stats {
        let pages = stats.from_member.get();
        assert!(pages >= 100, "only {pages} pages came from the other node");
    }
}
