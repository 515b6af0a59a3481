//! The donor to which memory with one copy moves by its heat is lost in the midst of a move, when
//! it has blocks, and when it has none. Its confirmations stop at the first page that is written
//! after a moment which the test chooses, so that no block that begins to move later is ever there.

use super::drain_replicas::joins;
use super::placing::{DELAY_US, LOCAL};
use super::rebalance::{donors, held, running};
use super::replicas::GUEST;
use fabric_test_support::delay::{Snare, delayed, snared};
use fabric_test_support::*;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{
    DonorUse, DrainError, DrainState, FabricConfig, FabricEvent, HeatPolicy, LostMemory,
    OnLostMemory, Sealing, TransportKind,
};
use memory_fabric::link::LinkEvent;
use memory_fabric::view::FabricView;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Threads that write and read pages.
const WRITERS: usize = 4;

/// Delay of the answers of a donor that gets slow: a quarter of it is far above what threads on a
/// busy machine take to be scheduled, so that one without this delay is always much faster.
const SLOW_US: u64 = 40_000;

/// Two donors with room for all memory. Blocks move from the second one, the source, to the first.
struct Pair {
    donors: [Option<Donor>; 2],
    /// Of their answers.
    delays_us: [Arc<AtomicU64>; 2],
    /// Of the target.
    snare: Arc<Snare>,
    fabric: Running,
}

impl Pair {
    fn start(seal: Sealing, on_lost_memory: OnLostMemory, delays_us: [u64; 2]) -> Self {
        let donors = donors::<2>();
        let delays_us = delays_us.map(|delay_us| Arc::new(AtomicU64::new(delay_us)));
        let snare = Arc::<Snare>::default();
        let at = [0, 1].map(|at| running(&donors[at]).address());
        let target = snared(at[0], Arc::clone(&delays_us[0]), Arc::clone(&snare));
        let source = delayed(at[1], Arc::clone(&delays_us[1]));
        let mut config = FabricConfig {
            transport: TransportKind::Tcp,
            seal,
            checksum: true,
            // Long enough for a busy host to connect again after a break that is not of the test.
            grace: Duration::from_secs(2),
            on_lost_memory,
            ..config(GUEST, LOCAL, &[target, source])
        };
        for one in &mut config.donors {
            one.bytes = Some(GUEST);
        }
        Self {
            donors,
            delays_us,
            snare,
            fabric: start(&config),
        }
    }

    fn set_delays(&self, delays_us: [u64; 2]) {
        for (delay, delay_us) in self.delays_us.iter().zip(delays_us) {
            delay.store(delay_us, Ordering::SeqCst);
        }
    }
}

/// Returns the words of a page in one of its versions.
fn version(page: usize, version: u64) -> Vec<u64> {
    let words = 0..WORDS_PER_PAGE;
    words.map(|word| pattern(version, page, word)).collect()
}

/// Writes the first version of each page.
fn filled(pair: &Pair, seed: u64) -> Words {
    let words = Words::of(&pair.fabric.fabric);
    for page in 0..words.pages() {
        assert!(words.write(page, &version(page, seed << 32)));
    }
    words
}

/// Writes and reads the pages of one thread in random order until `ended`. Returns the version
/// that each page has; `None` if it was found to be lost.
fn write_and_read(
    words: Words,
    seed: u64,
    thread: usize,
    ended: &AtomicBool,
) -> Vec<(usize, Option<u64>)> {
    let mut random = Random(seed * 10 + thread as u64);
    let own = (thread..words.pages()).step_by(WRITERS);
    let mut pages: Vec<_> = own.map(|page| (page, Some(seed << 32))).collect();
    let mut next = seed << 32;
    while !ended.load(Ordering::Relaxed) {
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

/// Lets others go on before a condition is looked at again.
fn pause(what: &str, deadline: Instant, ended: &AtomicBool, view: &FabricView) {
    let is_over = ended.load(Ordering::Relaxed);
    assert!(!is_over, "{what}: another thread has ended");
    let in_time = Instant::now() < deadline;
    assert!(in_time, "{what}: {:?}", view.placement());
    std::thread::yield_now();
}

/// Has blocks begin to move, and kills the target when some have, and another is on its way there.
/// Returns how many bytes were to move.
fn kill_target(pair: &mut Pair, deadline: Instant, ended: &AtomicBool) -> u64 {
    let view = pair.fabric.fabric.view().clone();
    let drains = pair.fabric.fabric.drains().expect("donors");
    let mut policy = HeatPolicy::default();
    let in_time = |what: &str| pause(what, deadline, ended, &view);
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
        match pair.fabric.events.try_recv() {
            // A break, after which it is connected again.
            Ok(FabricEvent::Link(_)) | Err(_) => {}
            Ok(event) => panic!("lost before it is killed: {event:?}"),
        }
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
    let mut pair = Pair::start(seal, OnLostMemory::Poison, [0, DELAY_US]);
    let words = filled(&pair, seed);
    let deadline = Instant::now() + PATIENCE;
    let write = |thread: usize, ended: &AtomicBool| write_and_read(words, seed, thread, ended);
    let (pages, (event, ordered)) = run_beside(WRITERS, write, |ended| {
        let ordered = kill_target(&mut pair, deadline, ended);
        (loss(&pair.fabric, deadline), ordered)
    });
    let pages = pages.concat();
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

/// Has heat empty the target, and then blocks begin to move back there. Kills it when the first one
/// is on its way. Nothing is lost with it, and the source can be drained then.
fn kill_empty_target(pair: &mut Pair, deadline: Instant, ended: &AtomicBool) {
    let view = pair.fabric.fabric.view().clone();
    let drains = pair.fabric.fabric.drains().expect("donors");
    let [target, source] = [1, 2].map(|at| view.nodes()[at].id);
    let mut policy = HeatPolicy::default();
    let mut place = || drains.place_by_heat(&mut policy).expect("one copy");
    let in_time = |what: &str| pause(what, deadline, ended, &view);
    while held(&view) != [0, GUEST] {
        in_time("it is emptied");
        place();
    }
    pair.set_delays([0, SLOW_US]);
    pair.snare.arm();
    while place() == 0 {
        in_time("blocks move back");
    }
    while !pair.snare.has_sprung() {
        in_time("the first block moves");
    }
    assert_eq!(held(&view), [0, GUEST], "nothing is there yet");
    drop(pair.donors[0].take());
    while view.placement().donors[0].usage != DonorUse::Left {
        in_time("it leaves");
    }
    assert_eq!(held(&view)[1], GUEST, "all blocks stayed");
    pair.set_delays([0, 0]);
    for _ in 0..8 {
        assert_eq!(place(), 0, "there is no other donor");
    }
    let gone = drains.drain(target, &[]).expect_err("it has left");
    assert!(matches!(gone, DrainError::NoDonor(_)), "{gone}");
    // The order has ended.
    let [third] = donors::<1>();
    let to = joins(running(&third).address(), None);
    let begun = drains.drain(source, &[to]).expect("it joins");
    assert_eq!(begun.bytes, GUEST);
    while !view.drain().is_some_and(|drain| drain.is_over()) {
        in_time("it is drained");
    }
    assert_eq!(view.drain().expect("one").state, DrainState::Done);
    pair.donors = [None, Some(third.expect("running"))];
}

fn empty_target_is_lost(seal: Sealing, seed: u64) {
    let mut pair = Pair::start(seal, OnLostMemory::End, [DELAY_US, 0]);
    let words = filled(&pair, seed);
    let deadline = Instant::now() + PATIENCE;
    let write = |thread: usize, ended: &AtomicBool| write_and_read(words, seed, thread, ended);
    let (pages, ()) = run_beside(WRITERS, write, |ended| {
        kill_empty_target(&mut pair, deadline, ended);
    });
    let pages = pages.concat();
    assert_eq!(pages.len(), words.pages());
    for (page, known) in pages {
        let known = known.expect("nothing is lost");
        let found = words.read(page).expect("nothing is lost");
        assert!(found == version(page, known), "page {page}");
    }
    let events: Vec<_> = pair.fabric.events.try_iter().collect();
    let is_end = |event: &FabricEvent| matches!(event, FabricEvent::Drained(_));
    assert!(events.iter().all(is_end), "the guest ran on: {events:?}");
    assert_eq!(pair.fabric.fabric.stats().sealing.rejected.get(), 0);
    pair.fabric.fabric.shutdown();
}

#[test]
fn an_empty_target_that_is_lost_while_the_first_block_moves_there_costs_nothing() {
    empty_target_is_lost(Sealing::Off, 40);
    empty_target_is_lost(Sealing::On, 41);
}
