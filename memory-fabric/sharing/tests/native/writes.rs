//! Write-backs to a home that does not answer for a while, of pages that are touched as they leave.

use std::collections::HashSet;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fabric_coherence::Member;
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::{PageBytes, PageIndex};
use fabric_peers::{HomeMessage, PeerError, PeerMessage, Peers, Receiver};
use fabric_sharing::SharedMemory;

use crate::mesh::{Mesh, config};
use crate::programs::word;

/// Blocks of the memory, and how many of them each of two nodes lends.
const BLOCKS: usize = 4;
const LENT: usize = 2;
const PAGES: usize = 512 * BLOCKS;

/// Twice the pages that leave ahead of need.
const WRITES_MAX: usize = 128;

/// Longer than the test takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a node has on its way to homes.
#[derive(Default)]
struct Seen {
    /// The homes answer.
    is_open: AtomicBool,
    writes: AtomicUsize,
    writes_max: AtomicUsize,
    /// Pages that were written while an earlier write of them was not answered.
    twice: AtomicUsize,
}

/// Connections on which answers to write-backs are held back at first.
struct Held {
    mesh: Mesh,
    answers: Vec<(Member, PeerMessage)>,
    written: HashSet<PageIndex>,
    seen: Arc<Seen>,
}

impl Peers for Held {
    fn send(&mut self, to: Member, message: PeerMessage, bytes: Option<&PageBytes>) {
        if let PeerMessage::Home(HomeMessage::Write { page, .. }) = message {
            let seen = &self.seen;
            let now = 1 + seen.writes.fetch_add(1, Ordering::SeqCst);
            seen.writes_max.fetch_max(now, Ordering::SeqCst);
            let is_first = self.written.insert(page);
            seen.twice
                .fetch_add(usize::from(!is_first), Ordering::SeqCst);
        }
        self.mesh.send(to, message, bytes);
    }

    fn flush(&mut self) {
        self.mesh.flush();
    }

    fn receive(&mut self, receiver: &mut Receiver<'_>) -> Result<bool, PeerError> {
        let (answers, written, seen) = (&mut self.answers, &mut self.written, &self.seen);
        let is_open = seen.is_open.load(Ordering::SeqCst);
        let mut pass = |from, message: PeerMessage, bytes: Option<&PageBytes>| {
            if let PeerMessage::Home(HomeMessage::Written { page, .. }) = &message {
                if !is_open {
                    answers.push((from, message));
                    return;
                }
                written.remove(page);
                seen.writes.fetch_sub(1, Ordering::SeqCst);
            }
            receiver(from, message, bytes);
        };
        let mut any = self.mesh.receive(&mut pass)?;
        if is_open {
            for (from, answer) in std::mem::take(&mut self.answers) {
                if let PeerMessage::Home(HomeMessage::Written { page, .. }) = &answer {
                    self.written.remove(page);
                    self.seen.writes.fetch_sub(1, Ordering::SeqCst);
                }
                receiver(from, answer, None);
                any = true;
            }
        }
        Ok(any)
    }

    fn poll_fd(&self) -> RawFd {
        self.mesh.poll_fd()
    }
}

/// Two nodes, and what the second has on its way. The first has written a page of each block, so that
/// the second gets pages, not blocks.
fn nodes() -> (Vec<SharedMemory>, Arc<Seen>) {
    let open = Arc::new(Seen::default());
    open.is_open.store(true, Ordering::SeqCst);
    let held = Arc::new(Seen::default());
    let seen = [open, Arc::clone(&held)];
    let places = (0..).zip(Mesh::new(2)).zip(seen);
    let nodes: Vec<_> = places
        .map(|((place, mesh), seen)| {
            let peers = Held {
                mesh,
                answers: Vec::new(),
                written: HashSet::new(),
                seen,
            };
            let mut config = config(place, 2, BLOCKS, LENT);
            config.transaction_time_max = PATIENCE;
            let memory = Arc::new(GuestMemory::new(BLOCKS << 21).expect("memory"));
            let failed = Box::new(move |failure: fabric_sharing::Failure, _| {
                eprintln!("node {place}: {failure}");
                // Threads that wait for a page would wait for ever.
                std::process::abort();
            });
            SharedMemory::start(config, memory, peers, failed).expect("a node")
        })
        .collect();
    for block in 0..BLOCKS {
        word(nodes[0].memory(), block << 21).store(1, Ordering::SeqCst);
    }
    (nodes, held)
}

#[test]
fn pages_that_are_touched_as_they_leave_are_not_written_without_limit() {
    let (nodes, seen) = nodes();
    let [home, node] = &nodes[..] else {
        panic!("two nodes")
    };
    let until = Instant::now() + PATIENCE;
    let (written, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let touches: Vec<_> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let touch = |page: usize| {
        word(node.memory(), page * 4096).fetch_add(1, Ordering::SeqCst);
        touches[page].fetch_add(1, Ordering::SeqCst);
    };
    let cycles = AtomicUsize::new(0);
    let soon = |is_so: &dyn Fn() -> bool| {
        while !is_so() && Instant::now() < until {
            std::thread::yield_now();
        }
        is_so()
    };
    let (has_stalled, has_cycled, has_ended) = std::thread::scope(|scope| {
        // Waits for memory soon, until the homes answer.
        scope.spawn(|| {
            for page in 0..PAGES {
                touch(page);
                written.store(page, Ordering::SeqCst);
            }
        });
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                (0..=written.load(Ordering::SeqCst)).for_each(touch);
                cycles.fetch_add(1, Ordering::SeqCst);
            }
        });
        let has_stalled = soon(&|| node.stats().stalled_for_memory.get() > 0);
        let before = cycles.load(Ordering::SeqCst);
        let has_cycled = soon(&|| cycles.load(Ordering::SeqCst) >= before + 30);
        // Whatever comes next is received with the answers.
        seen.is_open.store(true, Ordering::SeqCst);
        let has_ended = soon(&|| written.load(Ordering::SeqCst) == PAGES - 1);
        is_over.store(true, Ordering::SeqCst);
        (has_stalled, has_cycled, has_ended)
    });
    assert!(has_stalled, "there is room");
    assert!(has_cycled, "touches wait for an answer");
    assert!(has_ended, "it still waits for memory");
    let most = seen.writes_max.load(Ordering::SeqCst);
    assert!(
        (WRITES_MAX / 2..=WRITES_MAX).contains(&most),
        "{most} writes at once"
    );
    assert_eq!(seen.twice.load(Ordering::SeqCst), 0);
    for (page, touches) in touches.iter().enumerate() {
        let first = u64::from(page % 512 == 0);
        let found = word(home.memory(), page * 4096).load(Ordering::SeqCst);
        assert_eq!(found, first + touches.load(Ordering::SeqCst), "page {page}");
    }
}
