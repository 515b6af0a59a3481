//! Pages that are given back while their directory is slow, or silent.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::unbounded;
use fabric_coherence::{Member, Message, Offence, Violation};
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::PageBytes;
use fabric_peers::{PeerError, PeerMessage, Peers, Receiver};
use fabric_sharing::{Config, Failure, SharedMemory};

use crate::mesh::{Mesh, config, member};
use crate::programs::word;

/// Blocks of the memory, and how many of them each of two nodes lends.
const BLOCKS: usize = 4;
const LENT: usize = 2;
const PAGES: usize = 512 * BLOCKS;

/// Longer than any deadline of these tests, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// What happens to a page that is given back.
enum Puts {
    /// It is on its way until this node answers the grant of a block: its `Taken` is behind the put on
    /// the lane of requests, and the grant was sent before the put arrives.
    Late(Vec<(Member, PeerMessage)>),
    /// The directory never confirms it.
    Unconfirmed,
}

struct SlowPuts {
    mesh: Mesh,
    puts: Puts,
}

impl Peers for SlowPuts {
    fn send(&mut self, to: Member, message: PeerMessage, bytes: Option<&PageBytes>) {
        let is_put = matches!(message, PeerMessage::Coherence(Message::Put { .. }));
        let is_taken = matches!(message, PeerMessage::Coherence(Message::Taken { .. }));
        if let Puts::Late(late) = &mut self.puts {
            if is_put {
                late.push((to, message));
                return;
            }
            if is_taken {
                for (to, put) in late.drain(..) {
                    self.mesh.send(to, put, None);
                }
            }
        }
        self.mesh.send(to, message, bytes);
    }

    fn flush(&mut self) {
        self.mesh.flush();
    }

    fn receive(&mut self, receiver: &mut Receiver<'_>) -> Result<bool, PeerError> {
        let is_silent = matches!(self.puts, Puts::Unconfirmed);
        self.mesh.receive(&mut |from, message, bytes| {
            let is_done = matches!(message, PeerMessage::Coherence(Message::PutDone { .. }));
            if !(is_silent && is_done) {
                receiver(from, message, bytes);
            }
        })
    }

    fn poll_fd(&self) -> RawFd {
        self.mesh.poll_fd()
    }
}

/// Two nodes, of which the second has slow puts, and the failures of both. The first one has written
/// a page of each block, so that the other one gets pages, not blocks.
fn nodes(
    puts: Puts,
    configure: impl Fn(&mut Config),
) -> (
    Vec<SharedMemory>,
    crossbeam_channel::Receiver<(u8, Failure)>,
) {
    let (failed, failures) = unbounded();
    let start = |place, peers| {
        let mut config = config(place, 2, BLOCKS, LENT);
        if place == 1 {
            configure(&mut config);
        }
        let memory = Arc::new(GuestMemory::new(BLOCKS << 21).expect("memory"));
        let failed = failed.clone();
        let failed = Box::new(move |failure, _| {
            // Nobody receives it when the test has ended.
            let _ = failed.send((place, failure));
        });
        SharedMemory::start(config, memory, peers, failed).expect("a node")
    };
    let puts = [Puts::Late(Vec::new()), puts];
    let peers = Mesh::new(2).into_iter().zip(puts);
    let peers = peers.map(|(mesh, puts)| SlowPuts { mesh, puts });
    let nodes: Vec<_> = (0..)
        .zip(peers)
        .map(|(place, peers)| start(place, peers))
        .collect();
    for block in 0..BLOCKS {
        word(nodes[0].memory(), block << 21).store(1, Ordering::SeqCst);
    }
    (nodes, failures)
}

/// A thread increments a counter of each of these pages. It waits for ever where the engine does, and
/// ends with the process then.
fn increment(
    memory: &Arc<GuestMemory>,
    pages: impl Iterator<Item = usize> + Send + 'static,
) -> crossbeam_channel::Receiver<()> {
    let memory = Arc::clone(memory);
    let (done, ended) = unbounded();
    std::thread::spawn(move || {
        for page in pages {
            word(&memory, page * 4096).fetch_add(1, Ordering::SeqCst);
        }
        // Nobody receives it when the test has ended.
        let _ = done.send(());
    });
    ended
}

#[test]
fn a_block_that_is_granted_while_its_pages_are_given_back_can_be_evicted() {
    let (nodes, failures) = nodes(Puts::Late(Vec::new()), |_| ());
    let ended = increment(nodes[1].memory(), 0..PAGES);
    let ended = ended.recv_timeout(PATIENCE);
    if let Ok((place, failure)) = failures.try_recv() {
        panic!("node {place}: {failure}");
    }
    let stats = nodes[1].stats();
    let counts = [&stats.evictions, &stats.blocks_taken].map(|counter| counter.get());
    ended.unwrap_or_else(|_| panic!("no page has room after {counts:?} evictions and blocks"));
    for page in 0..PAGES {
        let expected = if page % 512 == 0 { 2 } else { 1 };
        let found = word(nodes[0].memory(), page * 4096).load(Ordering::SeqCst);
        assert_eq!(found, expected, "page {page}");
    }
}

#[test]
fn a_directory_that_confirms_nothing_ends_the_node_and_is_named() {
    let (nodes, failures) = nodes(Puts::Unconfirmed, |config| {
        // A put is confirmed within 16 of these.
        config.transaction_time_max = Duration::from_millis(400);
    });
    // Not the pages of the first node: else the other one is alone, and gets the blocks.
    let _ended = increment(nodes[1].memory(), (0..PAGES).filter(|page| page % 512 > 0));
    let (place, failure) = failures.recv_timeout(PATIENCE).expect("it waits for ever");
    let Failure::Offence(Offence { peer, violation }) = failure else {
        panic!("{failure}");
    };
    assert_eq!((place, peer), (1, member(0)));
    assert!(matches!(violation, Violation::Silent(_)), "{violation}");
    // The thread still waits.
    std::mem::forget(nodes);
}
