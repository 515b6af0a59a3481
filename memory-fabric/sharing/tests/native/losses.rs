//! What a node names as lost when another one is.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use fabric_coherence::Member;
use fabric_peers::PeerError;
use fabric_sharing::{Failure, FailureObserver, Losses, PageRanges, SharedMemory};

use crate::mesh::{ALL, config, member, nodes_that_fail};
use crate::programs::word;

/// Longer than any wait of these tests, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A word of a page, in the guest view of a node.
fn at(node: &SharedMemory, page: usize) -> &AtomicU64 {
    word(node.memory(), page * 4096)
}

type Failed = (u8, Failure, Losses);

/// Two nodes, which are the homes of every second of four blocks, and their failures.
fn two_nodes() -> (Vec<SharedMemory>, mpsc::Receiver<Failed>) {
    let (sender, failures) = mpsc::channel();
    let nodes = nodes_that_fail(
        2,
        4,
        |place| config(place, 2, 4, ALL),
        |place| -> FailureObserver {
            let sender = sender.clone();
            Box::new(move |failure, losses| {
                // The test may have ended.
                let _ = sender.send((place, failure, losses));
            })
        },
    );
    (nodes, failures)
}

fn has(ranges: &PageRanges, page: u32) -> bool {
    ranges.iter().any(|range| range.contains(&page))
}

fn losses_of(failed: Failed, lost: Member) -> Losses {
    let (place, failure, losses) = failed;
    assert!(
        matches!(failure, Failure::Peer(PeerError::Lost { peer, .. }) if peer == lost),
        "{failure}"
    );
    assert_eq!((place, losses.node), (0, Some(lost)));
    losses
}

#[test]
fn a_node_that_is_asked_to_names_what_was_lost_with_another_one() {
    let (nodes, failures) = two_nodes();
    let write = |node: usize, page| at(&nodes[node], page).store(1, Ordering::SeqCst);
    // Of a block whose directory is here, each node has pages; another such block is the other's.
    write(1, 0);
    write(0, 200);
    write(1, 1024);
    // Of a block whose directory is there, too; of the last one nothing is here.
    write(0, 512 + 3);
    write(1, 512 + 300);
    write(1, 1536);
    nodes[0].fence(member(1));
    let failed = failures.recv_timeout(PATIENCE).expect("it is fenced");
    let losses = losses_of(failed, member(1));
    assert_eq!(losses.blocks, 1, "{losses:?}");
    let pages = [0, 200, 100, 1024, 1535, 515, 812, 1536];
    let only = pages.map(|page| has(&losses.only_copy, page));
    assert_eq!(
        only,
        [true, false, false, true, true, false, false, false],
        "{losses:?}"
    );
    let home = pages.map(|page| has(&losses.at_home, page));
    assert_eq!(
        home,
        [false, false, false, false, false, false, true, true],
        "{losses:?}"
    );
    assert_eq!(losses.in_transit.iter().count(), 0, "{losses:?}");
    // Once is enough.
    nodes[0].fence(member(1));
    drop(nodes);
    assert!(failures.try_recv().is_err(), "it fails twice");
}
