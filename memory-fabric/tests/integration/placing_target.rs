//! The donor to which memory with one copy moves by its heat is lost in the midst of a move. Its
//! confirmations stop at the first page that is written after a moment which the test chooses, so
//! that no block that begins to move later is ever there.

use super::drain_replicas::joins;
use super::placing::{DELAY_US, LOCAL};
use super::rebalance::{donors, held, running};
use super::replicas::GUEST;
use fabric_test_support::delay::{Snare, delayed, snared};
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    DrainState, FabricConfig, FabricEvent, HeatPolicy, LostMemory, OnLostMemory, Sealing,
    TransportKind,
};
use memory_fabric::link::LinkEvent;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Threads that write and read pages.
const WRITERS: usize = 4;

/// Two donors with room for all memory. Blocks move from the second one, the source, to the first.
struct Pair {
    donors: [Option<Donor>; 2],
    /// Of the target.
    snare: Arc<Snare>,
    fabric: Running,
}

impl Pair {
    fn start(seal: Sealing) -> Self {
        let donors = donors::<2>();
        let snare = Arc::<Snare>::default();
        let at = [0, 1].map(|at| running(&donors[at]).address());
        let target = snared(at[0], Arc::default(), Arc::clone(&snare));
        let source = delayed(at[1], Arc::new(AtomicU64::new(DELAY_US)));
        let mut config = FabricConfig {
            transport: TransportKind::Tcp,
            seal,
            checksum: true,
            grace: Duration::from_millis(300),
            on_lost_memory: OnLostMemory::Poison,
            ..config(GUEST, LOCAL, &[target, source])
        };
        for one in &mut config.donors {
            one.bytes = Some(GUEST);
        }
        Self {
            donors,
            snare,
            fabric: start(&config),
        }
    }
}

/// Returns the words of a page in one of its versions.
fn version(page: usize, version: u64) -> Vec<u64> {
    let words = 0..WORDS_PER_PAGE;
    words.map(|word| pattern(version, page, word)).collect()
}

/// Writes and reads the pages of one thread in random order until `finished`. Returns the version
/// that each page has; `None` if it was found to be lost.
fn write_and_read(
    words: Words,
    seed: u64,
    thread: usize,
    finished: &AtomicBool,
) -> Vec<(usize, Option<u64>)> {
    let mut random = Random(seed * 10 + thread as u64);
    let own = (thread..words.pages()).step_by(WRITERS);
    let mut pages: Vec<_> = own.map(|page| (page, Some(seed << 32))).collect();
    let mut next = seed << 32;
    while !finished.load(Ordering::Relaxed) {
        let (page, known) = &mut pages[random.below(words.pages() / WRITERS)];
        let found = words.read(*page);
        if let (Some(found), Some(known)) = (&found, *known) {
            assert!(*found == version(*page, known), "page {page}");
        }
        next += 1;
        let is_written = found.is_some() && words.write(*page, &version(*page, next));
        assert!(known.is_some() || !is_written, "page {page} is back");
        *known = is_written.then_some(next);
    }
    pages
}

/// Has blocks begin to move, and kills the target when some have, and another is on its way there.
/// Returns how many bytes were to move.
fn kill_target(pair: &mut Pair, deadline: Instant) -> u64 {
    let view = pair.fabric.fabric.view().clone();
    let drains = pair.fabric.fabric.drains().expect("donors");
    let mut policy = HeatPolicy::default();
    let in_time = |what: &str| {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    };
    let blocks = loop {
        in_time("enough is hot");
        match drains.place_by_heat(&mut policy).expect("one copy") {
            0 => {}
            blocks => break blocks,
        }
    };
    while view.placement().moved_by_heat_bytes == 0 {
        in_time("a block moves");
    }
    pair.snare.arm();
    while !pair.snare.has_sprung() {
        in_time("pages are written");
    }
    drop(pair.donors[0].take());
    (blocks as u64) * (2 * MIB)
}

/// The event of the loss, after the link is down.
fn loss(fabric: &Running, deadline: Instant) -> FabricEvent {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match fabric.events.recv_timeout(left).expect("its loss") {
            FabricEvent::Link(LinkEvent::Down { .. }) => {}
            other => return other,
        }
    }
}

fn used_target_is_lost(seal: Sealing, seed: u64) {
    let mut pair = Pair::start(seal);
    let words = Words::of(&pair.fabric.fabric);
    for page in 0..words.pages() {
        assert!(words.write(page, &version(page, seed << 32)));
    }
    let deadline = Instant::now() + PATIENCE;
    let finished = AtomicBool::new(false);
    let (event, ordered, pages) = std::thread::scope(|scope| {
        let finished = &finished;
        let threads = [0, 1, 2, 3]
            .map(|thread| scope.spawn(move || write_and_read(words, seed, thread, finished)));
        let ordered = kill_target(&mut pair, deadline);
        let event = loss(&pair.fabric, deadline);
        finished.store(true, Ordering::Relaxed);
        let pages = threads.map(|thread| thread.join().expect("every byte right"));
        (event, ordered, pages.concat())
    });
    let FabricEvent::Poisoned(lost) = event else {
        panic!("{event:?}");
    };
    all_else_is_there(&pair, words, &pages, &lost);
    let view = pair.fabric.fabric.view().clone();
    let moved = view.placement().moved_by_heat_bytes;
    assert!((2 * MIB..ordered).contains(&moved), "{moved} of {ordered}");
    assert_eq!(held(&view), [GUEST / 2 + moved, GUEST / 2 - moved]);
    // The order has ended: what is at the source can leave it.
    let drains = pair.fabric.fabric.drains().expect("donors");
    let source = view.nodes()[2].id;
    let [third] = donors::<1>();
    let to = joins(running(&third).address(), None);
    let begun = drains.drain(source, &[to]).expect("it joins");
    assert_eq!(begun.bytes, GUEST / 2 - moved);
    wait_until("drained", || {
        view.drain().is_some_and(|drain| drain.is_over())
    });
    assert_eq!(view.drain().expect("one").state, DrainState::Done);
    all_else_is_there(&pair, words, &pages, &lost);
    assert_eq!(pair.fabric.fabric.stats().sealing.rejected.get(), 0);
    pair.fabric.fabric.shutdown();
}

/// Checks that as many pages are lost as was reported, and all others as they were written last.
fn all_else_is_there(pair: &Pair, words: Words, pages: &[(usize, Option<u64>)], lost: &LostMemory) {
    let mut found_lost = 0;
    assert_eq!(pages.len(), words.pages());
    for &(page, known) in pages {
        match (words.read(page), known) {
            (Some(found), Some(known)) => assert!(found == version(page, known), "page {page}"),
            (Some(_), None) => panic!("page {page} is back"),
            (None, _) => found_lost += 1,
        }
    }
    assert_eq!(found_lost, lost.lost_pages, "{lost:?}");
    let at_target = held(pair.fabric.fabric.view())[0];
    assert!((1..=at_target).contains(&(found_lost << 12)), "{lost:?}");
}

#[test]
fn when_the_target_of_moves_is_lost_what_has_not_moved_is_there() {
    used_target_is_lost(Sealing::Off, 30);
    used_target_is_lost(Sealing::On, 31);
}
