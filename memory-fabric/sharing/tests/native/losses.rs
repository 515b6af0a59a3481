//! What a node names as lost when another one is.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use fabric_pages::page::{PAGE_SIZE, PageIndex};
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

/// A thread that was woken would have written within this time.
const WRITTEN: Duration = Duration::from_millis(300);

/// A call that reads a page of the guest view, as a device does which writes to a disk.
fn write_out(file: &File, page: *const u8) -> Result<isize, Option<i32>> {
    // SAFETY: the kernel checks the range, and only reads it.
    match unsafe { libc::write(file.as_raw_fd(), page.cast(), PAGE_SIZE) } {
        -1 => Err(io::Error::last_os_error().raw_os_error()),
        count => Ok(count),
    }
}

#[test]
fn no_byte_of_a_lost_page_gets_into_a_file() {
    let (mut nodes, failures) = two_nodes();
    at(&nodes[1], 0).store(1, Ordering::SeqCst);
    // With the only copy.
    drop(nodes.pop());
    let node = nodes.pop().expect("the other one");
    let file = tempfile::tempfile().expect("a file");
    let (to, memory) = (file.try_clone(), Arc::clone(node.memory()));
    let to = to.expect("a descriptor");
    let faults = node.stats().faults.get();
    let (sender, written) = mpsc::channel();
    let disk = std::thread::spawn(move || {
        // The test may have failed.
        let _ = sender.send(write_out(&to, memory.guest_page(PageIndex::new(0))));
    });
    let until = Instant::now() + PATIENCE;
    while node.stats().faults.get() == faults {
        assert!(Instant::now() < until, "it does not wait for the page");
        std::thread::yield_now();
    }
    node.fence(member(1));
    let failed = failures.recv_timeout(PATIENCE).expect("it is fenced");
    assert!(has(&losses_of(failed, member(1)).only_copy, 0));
    let early = written.recv_timeout(WRITTEN);
    assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout), "it waits");
    drop(node);
    let ended = written.recv_timeout(PATIENCE);
    assert_eq!(ended, Ok(Err(Some(libc::EFAULT))));
    assert_eq!(file.metadata().expect("fstat").len(), 0);
    disk.join().expect("it has ended");
}
