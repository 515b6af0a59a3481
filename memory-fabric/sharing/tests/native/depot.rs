//! A node that lends less memory than its home has pages, and stores the rest in a depot.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fabric_coherence::MemberSet;
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::{PageBytes, PageIndex};
use fabric_sharing::{
    Config, Depot, Failure, Homes, LOCAL_PAGES_MIN, Layout, SharedMemory, SharingStats, Stored,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::mesh::{Mesh, member};
use crate::programs::word;

/// Blocks of the memory.
const BLOCKS: usize = 8;
const PAGES: usize = BLOCKS * 512;
/// Blocks that node 0 lends of its own memory, and that its depot takes, and those of the others.
const LENT: usize = 1;
const PLACES: usize = 5;
const LENT_BY_OTHERS: usize = 2;

/// Requests that a depot takes at once.
const REQUESTS_MAX: usize = 48;

enum Request {
    Read(PageIndex),
    Write(PageIndex, Box<PageBytes>),
}

/// Completes requests late and in a random order.
struct Late {
    has_place: Vec<bool>,
    stored: HashMap<PageIndex, Box<PageBytes>>,
    requests: Vec<Request>,
    random: u64,
    /// Requests so far, and one of how many is refused although there is room; 0 for none.
    posted: usize,
    refuses: usize,
    /// Least time between two completions, and the time of the next one.
    pace: Duration,
    next: Instant,
    /// Wakes the engine, as a connection does.
    wake: EventFd,
    most: Arc<AtomicU64>,
}

impl Late {
    fn below(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005) + 1;
        usize::try_from(self.random >> 33).expect("31 bits") % limit
    }

    /// Whether one more request may be completed now.
    fn is_time(&mut self) -> bool {
        let now = Instant::now();
        let is_time = now >= self.next;
        if is_time {
            self.next = now + self.pace;
        }
        is_time
    }

    fn post(&mut self, request: Request) -> bool {
        self.posted += 1;
        if self.requests.len() == REQUESTS_MAX {
            return false;
        }
        if self.refuses > 0 && self.posted.is_multiple_of(self.refuses) {
            // There is room now.
            self.wake.write(1).expect("an eventfd");
            return false;
        }
        self.requests.push(request);
        self.wake.write(1).expect("an eventfd");
        true
    }
}

impl Depot for Late {
    fn pages(&self) -> usize {
        self.has_place.iter().filter(|has| **has).count()
    }

    fn has_place(&self, page: PageIndex) -> bool {
        self.has_place[page.index()]
    }

    fn read(&mut self, page: PageIndex) -> bool {
        self.post(Request::Read(page))
    }

    fn write(&mut self, page: PageIndex, bytes: &PageBytes) -> bool {
        assert!(self.has_place(page), "{page} has no place");
        self.post(Request::Write(page, Box::new(*bytes)))
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut dyn FnMut(Stored<'_>)) {
        while !self.requests.is_empty() && self.below(3) > 0 && self.is_time() {
            let place = self.below(self.requests.len());
            match self.requests.swap_remove(place) {
                Request::Read(page) => done(Stored::Read(page, &self.stored[&page])),
                Request::Write(page, bytes) => {
                    self.stored.insert(page, bytes);
                    self.most
                        .fetch_max(self.stored.len() as u64, Ordering::Relaxed);
                    done(Stored::Written(page));
                }
            }
        }
        if !self.requests.is_empty() && self.pace.is_zero() {
            self.wake.write(1).expect("an eventfd");
        }
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn wake_by(&mut self) -> Option<Instant> {
        let is_paced = !self.requests.is_empty() && !self.pace.is_zero();
        is_paced.then_some(self.next)
    }

    fn watch(&self, watch: &mut dyn FnMut(RawFd, bool)) {
        watch(self.wake.as_raw_fd(), false);
    }

    fn slept(&mut self) {
        let _ = self.wake.read();
    }
}

fn homes(count: u8) -> Homes {
    let mut lent = vec![LENT_BY_OTHERS as u64; count.into()];
    lent[0] = (LENT + PLACES) as u64;
    Homes::in_proportion(&lent, std::slice::from_ref(&(0..BLOCKS)), Layout::Mixed).expect("enough")
}

/// Starts `count` nodes, of which the first has a depot; returns them with what that stores at most.
fn nodes(count: u8, seed: u64, pace: Duration) -> (Vec<SharedMemory>, Arc<AtomicU64>) {
    nodes_with(count, seed, pace, 0)
}

/// The same; the depot refuses one of `refuses` requests.
fn nodes_with(
    count: u8,
    seed: u64,
    pace: Duration,
    refuses: usize,
) -> (Vec<SharedMemory>, Arc<AtomicU64>) {
    let homes = homes(count);
    let most = Arc::new(AtomicU64::new(0));
    // Those blocks of the first node that its own memory cannot keep.
    let mut has_place = vec![false; PAGES];
    let kept = homes.pages_at(member(0)) / 512;
    let kept = kept.saturating_sub(PLACES);
    for block in homes.blocks_at(member(0)).skip(kept) {
        has_place[block * 512..(block + 1) * 512].fill(true);
    }
    let mut depot = Some(Box::new(Late {
        has_place,
        stored: HashMap::new(),
        requests: Vec::new(),
        random: seed,
        posted: 0,
        refuses,
        pace,
        next: Instant::now(),
        wake: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).expect("an eventfd"),
        most: Arc::clone(&most),
    }) as Box<dyn Depot>);
    let nodes = (0..count).zip(Mesh::new(count)).map(|(place, mesh)| {
        let memory = Arc::new(GuestMemory::new(BLOCKS << 21).expect("memory"));
        let config = Config {
            homes: Some(homes.clone()),
            local_pages: limit(place),
            ..Config::new(member(place), members(count))
        };
        let failed = Box::new(move |failure: Failure, losses| {
            eprintln!("node {place}: {failure}, {losses:?}");
            // Threads that wait for a page would wait for ever.
            std::process::abort();
        });
        let depot = if place == 0 { depot.take() } else { None };
        SharedMemory::start_with(config, memory, mesh, depot, failed).expect("a node")
    });
    (nodes.collect(), most)
}

fn members(count: u8) -> MemberSet {
    let members = (0..count).map(member);
    members.fold(MemberSet::EMPTY, MemberSet::with)
}

fn limit(place: u8) -> usize {
    let lent = if place == 0 { LENT } else { LENT_BY_OTHERS };
    lent * 512 + LOCAL_PAGES_MIN
}

/// A node never had more than its limit, and what may be on its way to a home: 64 pages of each node.
fn is_within_budget(place: u8, count: u8, stats: &SharingStats) {
    // Those that each node writes back, and the page that each of its two threads waits for.
    let most = limit(place) + usize::from(count) * (64 + 2);
    let peak = stats.local_pages_max.get();
    assert!(peak <= most as u64, "node {place}: {peak} of {most} pages");
}

/// Two threads of each node increment a word of each page, which both ends of the memory's homes share.
fn increments(count: u8, rounds: u64, seed: u64) {
    let (nodes, most) = nodes(count, seed, Duration::ZERO);
    std::thread::scope(|scope| {
        for node in &nodes {
            for thread in 0..2 {
                scope.spawn(move || {
                    for _ in 0..rounds {
                        for page in 0..PAGES {
                            let page = if thread == 0 { page } else { PAGES - 1 - page };
                            let word = word(node.memory(), page * 4096);
                            word.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        }
    });
    for node in &nodes {
        for page in 0..PAGES {
            let found = word(node.memory(), page * 4096).load(Ordering::Relaxed);
            assert_eq!(found, u64::from(count) * 2 * rounds, "page {page}");
        }
    }
    for (place, node) in (0..).zip(&nodes) {
        println!("{:?}", node.stats());
        is_within_budget(place, count, node.stats());
    }
    let stats = nodes[0].stats();
    assert!(stats.sent_away.get() > 1000 && stats.from_depot.get() > 1000);
    assert!(most.load(Ordering::Relaxed) > 1000);
}

#[test]
fn pages_go_to_the_depot_of_their_home_and_come_back() {
    increments(2, 4, 1);
}

#[test]
fn three_nodes_share_what_one_of_them_stores_elsewhere() {
    increments(3, 2, 2);
}

/// Counts in each page, three times over all of them.
fn count_alone(memory: &GuestMemory) {
    count_alone_from(memory, 0);
}

/// The same in pages with this count.
fn count_alone_from(memory: &GuestMemory, first: u64) {
    for round in first..first + 3 {
        for page in 0..PAGES {
            let found = word(memory, page * 4096).fetch_add(1, Ordering::Relaxed);
            assert_eq!(found, round, "page {page}");
        }
    }
}

/// Only the node with the depot touches memory: whole blocks are its own.
#[test]
fn blocks_that_one_node_owns_go_to_its_depot() {
    let (nodes, _) = nodes(2, 3, Duration::ZERO);
    let memory = nodes[0].memory();
    count_alone(memory);
    let stats = nodes[0].stats();
    is_within_budget(0, 2, stats);
    let sent_away = stats.sent_away.get();
    assert!(sent_away > 3000, "{sent_away}");
    assert_eq!(stats.blocks_split.get(), 0);
}

/// Only another node touches memory, so that the home stores what it has never seen.
#[test]
fn a_home_stores_for_another_node_what_it_has_no_room_for() {
    let (nodes, _) = nodes(2, 4, Duration::ZERO);
    let memory = nodes[1].memory();
    count_alone(memory);
    let stats = nodes[0].stats();
    is_within_budget(0, 2, stats);
    assert!(stats.from_depot.get() > 1000, "{stats:?}");
}

/// A depot such as one with two copies may have no room although nothing is outstanding for its home.
#[test]
fn requests_that_a_depot_refuses_are_made_again_when_it_wakes() {
    let (nodes, _) = nodes_with(2, 6, Duration::ZERO, 2);
    for (place, node) in nodes.iter().enumerate().rev() {
        count_alone_from(node.memory(), 3 * (1 - place as u64));
    }
    let stats = nodes[0].stats();
    is_within_budget(0, 2, stats);
    assert!(stats.from_depot.get() > 1000, "{stats:?}");
}

/// Another node writes faster than the depot takes pages: the home keeps its budget nevertheless.
#[test]
fn a_full_home_takes_no_more_than_its_depot() {
    let (nodes, _) = nodes(2, 5, Duration::from_millis(2));
    let memory = nodes[1].memory();
    for page in 0..PAGES {
        word(memory, page * 4096).store(1, Ordering::Relaxed);
    }
    is_within_budget(0, 2, nodes[0].stats());
    assert!(
        nodes[0].stats().sent_away.get() > 500,
        "{:?}",
        nodes[0].stats()
    );
}

#[test]
fn what_fits_neither_the_node_nor_its_depot_is_refused() {
    let memory = Arc::new(GuestMemory::new(BLOCKS << 21).expect("memory"));
    let config = Config {
        homes: Some(homes(2)),
        local_pages: limit(0),
        ..Config::new(member(0), members(2))
    };
    let mesh = Mesh::new(2).remove(0);
    let failed = Box::new(|_, _| ());
    let refused = SharedMemory::start(config, memory, mesh, failed).expect_err("too much");
    let text = refused.to_string();
    assert!(text.contains("768") && text.contains("depot"), "{text}");
}
