//! Pages that are in use for longer than the deadline of a request.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::mesh::{ALL, config, nodes_with};
use crate::programs::word;

#[test]
fn no_node_is_blamed_for_a_request_that_it_answered() {
    let nodes = nodes_with(2, 2, |place| {
        let mut config = config(place, 2, 2, ALL);
        // A peer has half of this for its answer.
        config.transaction_time_max = Duration::from_secs(6);
        config
    });
    let until = Instant::now() + Duration::from_secs(8);
    // Nearly always a request of the page is in progress, also when the deadlines of earlier ones
    // pass. A failure of a node aborts.
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let threads = nodes.iter().map(|node| {
            let counter = word(node.memory(), 0);
            scope.spawn(move || {
                let mut count = 0;
                while Instant::now() < until {
                    counter.fetch_add(1, Ordering::SeqCst);
                    count += 1;
                }
                count
            })
        });
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|count| count.expect("no panic")).collect()
    });
    let total = word(nodes[0].memory(), 0).load(Ordering::SeqCst);
    assert_eq!(total, counts.iter().sum::<u64>());
    let requests = nodes.iter().map(|node| node.stats().from_member.get());
    assert!(requests.min() > Some(100), "the page does not travel");
}
