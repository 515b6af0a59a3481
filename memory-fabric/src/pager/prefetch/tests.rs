//! The requests that the prefetcher sends.

use super::*;
use crate::homes::{BLOCK_BYTES, BLOCK_PAGES, Home, HomeTable, NodeId};
use crate::link::path::{PathStats, Selection};
use crate::page::PageBytes;
use crate::pager::mailbox::{EvictorInbox, FaultInbox};
use crate::pager::testing::{make_remote, shared};
use crate::policy::Tier;
use crate::transport::vacant::Vacant;
use crate::transport::{Full, Interest, PathKind};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Pages of the guest's start; some blocks that can be added follow.
const BOOT_PAGES: u32 = BLOCK_PAGES;
/// The first of these blocks.
const BLOCK: u32 = 1;
const CACHE_PAGES: u64 = 1024;

/// Called at each query of a transport's number of requests, which it returns.
type WhenAsked = Box<dyn FnMut() -> usize + Send>;

/// A donor that does not answer.
struct Silent {
    donor: usize,
    when_asked: Arc<Mutex<WhenAsked>>,
    /// Donor, offset and pages of each request.
    requests: Arc<Mutex<Vec<(usize, u64, u32)>>>,
    tickets: Vec<Ticket>,
    /// Whether requests end without the pages.
    refuses: Arc<AtomicBool>,
}

impl fmt::Debug for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Silent").finish_non_exhaustive()
    }
}

impl PageTransport for Silent {
    fn post_read(&mut self, _: Ticket, _: u64) -> Result<(), Full> {
        unreachable!("only runs are asked for")
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        self.tickets.push(ticket);
        let mut requests = self.requests.lock().expect("one thread");
        requests.push((self.donor, offset, pages));
        Ok(())
    }

    fn post_write(&mut self, _: Ticket, _: u64, _: &PageBytes) -> Result<(), Full> {
        unreachable!("only runs are asked for")
    }

    fn post_drop(&mut self, _: u64, _: u32) -> Result<(), Full> {
        unreachable!("only runs are asked for")
    }

    fn flush(&mut self) {}

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        if self.refuses.load(Ordering::Relaxed) {
            let tickets = self.tickets.drain(..);
            tickets.for_each(|ticket| complete(Completion::Unread(ticket)));
        }
    }

    fn in_flight(&self) -> usize {
        (self.when_asked.lock().expect("one thread"))()
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}

/// A prefetcher with two donors, each of which can be the home of the first block of added memory.
struct Bench {
    shared: Arc<Shared>,
    faults: FaultInbox,
    evictor: EvictorInbox,
    prefetcher: Prefetcher,
    when_asked: Arc<Mutex<WhenAsked>>,
    requests: Arc<Mutex<Vec<(usize, u64, u32)>>>,
    refuses: Arc<AtomicBool>,
}

impl Bench {
    fn new() -> Self {
        let boot = PageRange::new(PageIndex::new(0), BOOT_PAGES);
        let added = PageRange::new(PageIndex::new(BOOT_PAGES), 2 * BLOCK_PAGES);
        let homes = HomeTable::new(NodeId(0), &[boot], Some(added));
        let (shared, inboxes) = shared(homes, CACHE_PAGES, 2);
        let when_asked: Arc<Mutex<WhenAsked>> = Arc::new(Mutex::new(Box::new(|| 0)));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let refuses = Arc::new(AtomicBool::new(false));
        let donors = (0..2).map(|donor| -> Box<dyn PageTransport> {
            Box::new(Silent {
                donor,
                when_asked: Arc::clone(&when_asked),
                requests: Arc::clone(&requests),
                tickets: Vec::new(),
                refuses: Arc::clone(&refuses),
            })
        });
        let prefetcher = Prefetcher::new(
            Arc::clone(&shared),
            donors.collect(),
            inboxes.prefetcher,
            Vec::new(),
        );
        Self {
            shared,
            faults: inboxes.faults,
            evictor: inboxes.evictor,
            prefetcher,
            when_asked,
            requests,
            refuses,
        }
    }

    /// Gives the block a home in this slot of a donor, and writes these pages of it back.
    fn plug(shared: &Shared, donor: usize, slot: u32, pages: PageRange) {
        let node = shared.nodes.node_at(donor);
        shared.homes.assign(BLOCK, Home { node, slot });
        pages.iter().for_each(|page| make_remote(shared, page));
    }

    /// Discards the block's pages, and removes its home.
    fn unplug(shared: &Shared) {
        shared.homes.set_leaving(BLOCK, true);
        for page in shared.homes.pages_of(BLOCK).iter() {
            let entry = shared.map.entry(page);
            let seen = entry.state();
            assert!(seen.kind() == Kind::Untouched || entry.forget(seen));
        }
        shared.homes.unassign(BLOCK);
    }

    /// Sets the function that returns the number of requests.
    fn when_asked(&self, answer: impl FnMut() -> usize + Send + 'static) {
        *self.when_asked.lock().expect("one thread") = Box::new(answer);
    }

    fn requests(&self) -> Vec<(usize, u64, u32)> {
        self.requests.lock().expect("one thread").clone()
    }

    fn kind(&self, page: PageIndex) -> Kind {
        self.shared.map.entry(page).state().kind()
    }
}

/// Returns some pages of the first block.
fn wanted() -> PageRange {
    PageRange::new(PageIndex::new(BOOT_PAGES + 10), 8)
}

fn order(first: u32, stride: i32, count: u32) -> Order {
    Order {
        first,
        stride,
        count,
        chain: 1,
    }
}

#[test]
fn a_run_downwards_is_fetched_upwards_and_ends_at_the_first_page() {
    assert_eq!(ascending(order(100, -1, 10)), order(91, 1, 10));
    assert_eq!(ascending(order(3, -1, 10)), order(0, 1, 4));
    assert_eq!(ascending(order(100, -2, 10)), order(100, -2, 10));
}

#[test]
fn skipping_ends_with_the_order_or_with_memory() {
    assert_eq!(skip(order(10, 4, 3), 2), Some(order(18, 4, 1)));
    assert_eq!(skip(order(10, 4, 3), 3), None);
    assert_eq!(skip(order(10, -8, 3), 2), None);
    assert_eq!(skip(order(u32::MAX - 1, 4, 3), 1), None);
}

#[test]
fn nothing_is_asked_of_a_donor_whose_transport_was_removed() {
    let mut bench = Bench::new();
    Bench::plug(&bench.shared, 0, 3, wanted());
    bench.prefetcher.transports[0] = Box::new(Vacant);
    let asked = order(wanted().first.number(), 1, wanted().count);
    assert_eq!(bench.prefetcher.begin(asked), Some(asked));
    assert!(wanted().iter().all(|page| bench.kind(page) == Kind::Remote));
}

#[test]
fn a_run_is_asked_for_where_it_is_at_home_when_its_pages_are_held() {
    let mut bench = Bench::new();
    Bench::plug(&bench.shared, 0, 3, wanted());
    let shared = Arc::clone(&bench.shared);
    // Between the first lookup of the home and taking a page, the block is unplugged, and plugged
    // with another home, to which its pages are written back.
    let mut moves = true;
    bench.when_asked(move || {
        if std::mem::take(&mut moves) {
            Bench::unplug(&shared);
            Bench::plug(&shared, 1, 5, wanted());
        }
        0
    });
    let rest = bench
        .prefetcher
        .begin(order(wanted().first.number(), 1, wanted().count));
    assert_eq!(rest, None);
    let offset = 5 * BLOCK_BYTES + 10 * PAGE_SIZE as u64;
    assert_eq!(bench.requests(), [(1, offset, wanted().count)]);
    assert_eq!(bench.prefetcher.pages_in_flight, [0, wanted().count]);
    assert!(
        wanted()
            .iter()
            .all(|page| bench.kind(page) == Kind::Fetching)
    );
    assert_eq!(bench.shared.budget.used(), u64::from(wanted().count));
}

#[test]
fn a_page_whose_home_is_gone_when_it_is_held_is_given_back() {
    let mut bench = Bench::new();
    Bench::plug(&bench.shared, 0, 3, wanted());
    let shared = Arc::clone(&bench.shared);
    bench.when_asked(move || {
        shared.homes.unassign(BLOCK);
        0
    });
    let first = wanted().first;
    assert_eq!(bench.prefetcher.begin(order(first.number(), 1, 1)), None);
    assert_eq!(bench.requests(), []);
    assert_eq!(bench.kind(first), Kind::Remote);
    assert_eq!(bench.shared.budget.used(), 0);
    assert_eq!(bench.faults.next_retry(), None, "no fault waits for it");
}

#[test]
fn who_touches_a_page_before_it_is_given_back_is_not_forgotten() {
    let mut bench = Bench::new();
    Bench::plug(&bench.shared, 0, 3, wanted());
    let shared = Arc::clone(&bench.shared);
    let first = wanted().first;
    // There is room until the page is held; then it is touched, and there is none left.
    bench.when_asked(move || {
        let entry = shared.map.entry(first);
        match entry.state().kind() {
            Kind::Fetching => {
                assert!(entry.contend(entry.state()));
                IN_FLIGHT_MAX
            }
            _ => 0,
        }
    });
    assert_eq!(bench.prefetcher.begin(order(first.number(), 1, 1)), None);
    assert_eq!(bench.requests(), []);
    assert_eq!(bench.kind(first), Kind::Remote);
    assert_eq!(bench.faults.next_retry(), Some(first));
    assert_eq!(bench.shared.faults.port().event_fd().read().ok(), Some(1));
    assert_eq!(bench.shared.budget.used(), 0);
}

#[test]
fn pages_that_are_not_read_are_given_back_and_who_touches_one_reads_it_alone() {
    let mut bench = Bench::new();
    Bench::plug(&bench.shared, 0, 3, wanted());
    let first = wanted().first;
    let ordered = order(first.number(), 1, wanted().count);
    assert_eq!(bench.prefetcher.begin(ordered), None);
    let entry = bench.shared.map.entry(first);
    assert!(entry.contend(entry.state()));
    bench.refuses.store(true, Ordering::Relaxed);
    assert!(bench.prefetcher.complete().expect("no page is installed"));
    assert!(wanted().iter().all(|page| bench.kind(page) == Kind::Remote));
    assert_eq!(bench.faults.next_retry(), Some(first));
    assert_eq!(bench.faults.next_retry(), None);
    assert_eq!(bench.prefetcher.pages_in_flight, [0, 0]);
    assert_eq!(bench.shared.budget.used(), 0);
}

#[test]
fn the_evictor_is_told_that_memory_is_low_also_by_the_last_page_of_an_order() {
    let mut bench = Bench::new();
    Bench::plug(&bench.shared, 0, 3, wanted());
    let shared = Arc::clone(&bench.shared);
    while !shared.budget.is_low() {
        shared.budget.charge().expect("some is free");
    }
    shared.budget.release(1);
    let first = wanted().first;
    assert_eq!(bench.prefetcher.begin(order(first.number(), 1, 1)), None);
    assert_eq!(bench.requests().len(), 1);
    assert!(shared.budget.is_low());
    assert!(bench.evictor.is_notified());
}

#[test]
fn the_tier_of_a_link_sets_how_much_is_fetched_ahead_also_when_it_changes() {
    let latency = std::time::Duration::from_micros(150);
    let selection = Selection::all(PathKind::Tcp);
    let path = PathStats::new(selection, (PathKind::Tcp, None), None, latency);
    let path = Arc::new(path);
    let first_request = |tier, order_pages: u32| {
        let mut bench = Bench::new();
        path.set_tier(tier);
        bench.shared.policies.join(0, Some(Arc::clone(&path)));
        let pages = PageRange::new(PageIndex::new(BOOT_PAGES), order_pages);
        Bench::plug(&bench.shared, 0, 3, pages);
        bench.prefetcher.begin(order(BOOT_PAGES, 1, order_pages));
        bench.requests().first().map(|(_, _, pages)| *pages)
    };
    assert_eq!(first_request(Tier::Rdma, 128), Some(32));
    assert_eq!(first_request(Tier::FastTcp, 128), Some(32));
    assert_eq!(first_request(Tier::Slow, 128), Some(64));

    let bench = Bench::new();
    let mut observer = FaultObserver::new();
    path.set_tier(Tier::Rdma);
    bench.shared.policies.join(0, Some(Arc::clone(&path)));
    let mut window_at = |tier: Tier, from: u32| {
        path.set_tier(tier);
        bench.shared.policies.renew();
        for page in from..from + 64 {
            observer.note(1, PageIndex::new(page));
            observer.guess(&bench.shared);
        }
        observer.detector.window_limit()
    };
    assert_eq!(window_at(Tier::Rdma, 0), 64);
    assert_eq!(window_at(Tier::Slow, 64), 256);
    assert_eq!(window_at(Tier::FastTcp, 128), 128);
}
