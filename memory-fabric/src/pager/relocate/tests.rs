//! Blocks that move between simulated donors, while a pager without memory fetches their pages and
//! writes them back, and checks the version of each page that it reads.

#[path = "../../../replicas/src/transport/tests/fake.rs"]
mod fake;

use super::*;
use crate::homes::{BLOCK_BYTES, NodeId};
use crate::page::PageRange;
use crate::transport::vacant::Vacant;
use crate::transport::{Completion, Full};
use crossbeam_channel::{Receiver, TryRecvError, bounded};
use fake::{FakeDonor, FakeTransport, page_with, version_of};
use std::sync::Mutex;
use std::time::Duration;

/// State of a page, as in the page map; the number is its current version.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Page {
    Untouched,
    Local(u64),
    /// Being written back; the flag says that it was touched since, so that it stays.
    Writing(u64, bool),
    Remote(u64),
    Fetching(u64),
}

const BLOCKS: u32 = 4;
/// The pages in use: some of each block, so that they meet often.
const PAGES_PER_BLOCK: u32 = 24;
const DONORS: usize = 3;

fn node(link: usize) -> NodeId {
    NodeId(u8::try_from(link + 1).expect("few"))
}

/// A guest whose blocks have their homes on the first donor; the last block is cut short.
fn table() -> HomeTable {
    let ram = PageRange::new(PageIndex::new(0), BLOCKS * BLOCK_PAGES - 100);
    let homes = HomeTable::new(NodeId(0), &[ram], None);
    let homes = homes.with_links(&[node(0), node(1), node(2)]);
    for block in 0..BLOCKS {
        let home = Home {
            node: node(0),
            slot: block,
        };
        homes.assign(block, home);
    }
    homes
}

fn index_of(page: PageIndex) -> usize {
    let (block, page) = (page.number() / BLOCK_PAGES, page.number() % BLOCK_PAGES);
    (block * PAGES_PER_BLOCK + page) as usize
}

fn page_at(index: usize) -> PageIndex {
    let index = u32::try_from(index).expect("few");
    PageIndex::new(index / PAGES_PER_BLOCK * BLOCK_PAGES + index % PAGES_PER_BLOCK)
}

struct States<'a>(&'a [Page]);

impl Pages for States<'_> {
    fn is_being_written(&self, block: u32) -> bool {
        let first = (block * PAGES_PER_BLOCK) as usize;
        let pages = &self.0[first..first + PAGES_PER_BLOCK as usize];
        pages.iter().any(|page| matches!(page, Page::Writing(..)))
    }

    fn at_home(&self, page: PageIndex) -> AtHome {
        if page.number() % BLOCK_PAGES >= PAGES_PER_BLOCK
            || self.0[index_of(page)] == Page::Untouched
        {
            AtHome::No
        } else {
            AtHome::Yes
        }
    }

    fn has_moved(&self, _: u32, _: Home) {}
}

struct World {
    homes: HomeTable,
    donors: Vec<Arc<Mutex<FakeDonor>>>,
    down: Vec<bool>,
    /// The next slot of each donor that was never used.
    slots: Vec<u32>,
    evictor: Vec<Box<dyn PageTransport>>,
    reader: Vec<Box<dyn PageTransport>>,
    relocation: Relocation,
    ends: Vec<Receiver<()>>,
    pages: Vec<Page>,
    runs: Vec<(usize, usize)>,
    version: u64,
    moved: u32,
    random: u64,
    seed: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let donors: Vec<_> = (0..DONORS).map(|_| Arc::default()).collect();
        let transports = || {
            let made = donors.iter().map(|donor| {
                let transport: Box<dyn PageTransport> = Box::new(FakeTransport::new(donor));
                transport
            });
            made.collect()
        };
        let mut relocation = Relocation::new();
        // The simulation has no time.
        relocation.allowance = Allowance::new(u64::MAX >> 20, u64::MAX);
        Self {
            homes: table(),
            down: vec![false; DONORS],
            slots: vec![BLOCKS, 0, 0],
            evictor: transports(),
            reader: transports(),
            relocation,
            ends: Vec::new(),
            pages: vec![Page::Untouched; (BLOCKS * PAGES_PER_BLOCK) as usize],
            runs: Vec::new(),
            version: 0,
            moved: 0,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            donors,
            seed,
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).expect("31 bits") % limit
    }

    fn run(mut self, steps: usize) -> u32 {
        for _ in 0..steps {
            match self.below(60) {
                0..16 => self.use_page(),
                16..20 => self.fetch_run(),
                20..30 => self.poll_reader(),
                30..56 => self.poll_evictor(),
                56..58 => self.move_some(),
                _ => self.disturb(),
            }
        }
        self.settle();
        self.moved
    }

    /// Moves a random page on: from local to its home, or back.
    fn use_page(&mut self) {
        let index = self.below(self.pages.len());
        let page = page_at(index);
        let ticket = Ticket(u32::try_from(index).expect("small"));
        let home = self.homes.home_of(page).expect("assigned");
        let link = self.homes.link_to_home(home);
        self.pages[index] = match self.pages[index] {
            Page::Untouched | Page::Local(_) => {
                self.version += 1;
                let is_held = self.relocation.holds(HomeTable::block_of(page));
                let bytes = page_with(self.version);
                let offset = home.offset_of(page);
                if is_held
                    || self.evictor[link]
                        .post_write(ticket, offset, &bytes)
                        .is_err()
                {
                    Page::Local(self.version)
                } else {
                    Page::Writing(self.version, false)
                }
            }
            Page::Writing(version, _) => Page::Writing(version, true),
            Page::Remote(version) => {
                match self.reader[link].post_read(ticket, home.offset_of(page)) {
                    Ok(()) => Page::Fetching(version),
                    Err(Full) => Page::Remote(version),
                }
            }
            Page::Fetching(version) => Page::Fetching(version),
        };
    }

    /// Fetches the remote pages from a random one on, in its block.
    fn fetch_run(&mut self) {
        let first = self.below(self.pages.len());
        let end = (first / PAGES_PER_BLOCK as usize + 1) * PAGES_PER_BLOCK as usize;
        let is_remote = |page: &&Page| matches!(page, Page::Remote(_));
        let count = self.pages[first..end].iter().take_while(is_remote).count();
        if count == 0 {
            return;
        }
        let page = page_at(first);
        let home = self.homes.home_of(page).expect("assigned");
        let link = self.homes.link_to_home(home);
        let number = self.pages.len() + self.runs.len();
        let ticket = Ticket(u32::try_from(number).expect("small"));
        let pages = u32::try_from(count).expect("small");
        let posted = self.reader[link].post_read_run(ticket, home.offset_of(page), pages);
        if posted.is_ok() {
            self.runs.push((first, count));
            for page in &mut self.pages[first..first + count] {
                if let Page::Remote(version) = *page {
                    *page = Page::Fetching(version);
                }
            }
        }
    }

    fn poll_reader(&mut self) {
        let (pages, runs, seed) = (&mut self.pages, &self.runs, self.seed);
        let arrived = |pages: &mut [Page], index: usize, found: u64| {
            let Page::Fetching(version) = pages[index] else {
                let page = pages[index];
                panic!("seed {seed}: page {index} was not fetched: {page:?}");
            };
            assert_eq!(found, version, "seed {seed}: page {index} is stale");
            pages[index] = Page::Local(version);
        };
        for transport in &mut self.reader {
            transport.poll(&mut |completion| match completion {
                Completion::Read(Ticket(ticket), page) => {
                    arrived(pages, ticket as usize, version_of(page));
                }
                Completion::ReadRun(Ticket(ticket), bytes) => {
                    let (first, count) = runs[ticket as usize - pages.len()];
                    assert_eq!(bytes.len(), count * PAGE_SIZE);
                    for (index, page) in (first..).zip(bytes.chunks(PAGE_SIZE)) {
                        arrived(pages, index, version_of(page));
                    }
                }
                other => panic!("seed {seed}: unexpected {other:?}"),
            });
        }
    }

    fn poll_evictor(&mut self) {
        let (pages, seed, relocation) = (&mut self.pages, self.seed, &mut self.relocation);
        for transport in &mut self.evictor {
            transport.poll(&mut |completion| match completion {
                Completion::Written(ticket) if Relocation::is_for_move(ticket) => {
                    relocation.written(ticket);
                }
                Completion::Read(ticket, bytes) => relocation.read(ticket, bytes),
                Completion::Written(Ticket(index)) => {
                    let page = &mut pages[index as usize];
                    *page = match *page {
                        Page::Writing(version, false) => Page::Remote(version),
                        Page::Writing(version, true) => Page::Local(version),
                        other => panic!("seed {seed}: page {index} was not written: {other:?}"),
                    };
                }
                other => panic!("seed {seed}: unexpected {other:?}"),
            });
        }
        relocation.step(&self.homes, &mut self.evictor, &States(pages));
    }

    /// Orders the blocks of a random donor to another one, if nothing is ordered.
    fn move_some(&mut self) {
        if self.relocation.order.is_some() || self.relocation.current.is_some() {
            return;
        }
        let (from, step) = (self.below(DONORS), 1 + self.below(DONORS - 1));
        let to = (from + step) % DONORS;
        let blocks: Vec<_> = self.homes.ram_blocks_at(node(from)).collect();
        let moves = blocks.into_iter().map(|(block, from)| {
            let slot = self.slots[to];
            self.slots[to] += 1;
            let to = Home {
                node: node(to),
                slot,
            };
            BlockMove { block, from, to }
        });
        let (end, ended) = bounded(1);
        self.relocation.take(MoveOrder {
            moves: moves.collect(),
            progress: Arc::default(),
            end,
        });
        self.ends.push(ended);
    }

    /// A donor's connections break, it is cut off, returns, or is lost while it holds nothing.
    fn disturb(&mut self) {
        let link = self.below(DONORS);
        if self.down[link] {
            self.restore(link);
            return;
        }
        let is_idle = self.reader[link].in_flight() == 0;
        match self.below(8) {
            // Outstanding requests are sent again.
            0..4 => self.restore(link),
            4 if is_idle && self.homes.pages_at(node(link)) == 0 => {
                self.evictor[link] = Box::new(Vacant);
                self.relocation.leave(link, &self.homes);
                // It joins again, with nothing.
                self.donors[link] = Arc::default();
                self.slots[link] = 0;
                self.evictor[link] = Box::new(FakeTransport::new(&self.donors[link]));
                self.reader[link] = Box::new(FakeTransport::new(&self.donors[link]));
            }
            _ => {
                self.down[link] = true;
                self.donors[link].lock().expect("no panic").cut = true;
            }
        }
    }

    fn restore(&mut self, link: usize) {
        self.down[link] = false;
        let mut donor = self.donors[link].lock().expect("no panic");
        donor.cut = false;
        donor.connection += 1;
    }

    /// All donors return; every request is answered, every order ends, and the bytes at home are
    /// checked.
    fn settle(&mut self) {
        (0..DONORS).for_each(|link| self.restore(link));
        let deadline = Instant::now() + Duration::from_secs(30);
        let seed = self.seed;
        let is_moving = |page: &Page| matches!(page, Page::Writing(..) | Page::Fetching(_));
        while self.pages.iter().any(is_moving)
            || self
                .ends
                .iter()
                .any(|end| end.try_recv() == Err(TryRecvError::Empty))
        {
            self.poll_reader();
            self.poll_evictor();
            assert!(Instant::now() < deadline, "seed {seed} hangs");
        }
        for (index, page) in self.pages.iter().enumerate() {
            let home = self.homes.home_of(page_at(index)).expect("assigned");
            let Page::Remote(version) = *page else {
                continue;
            };
            let donor = self.donors[self.homes.link_to_home(home)].lock();
            let found = donor
                .expect("no panic")
                .version_at(home.offset_of(page_at(index)));
            assert_eq!(found, version, "seed {seed}: page {index} at {home:?}");
        }
        let at_first = self.homes.pages_at(node(0));
        self.moved = u32::from(at_first < u64::from(BLOCKS * BLOCK_PAGES - 100));
    }
}

/// Every page that is read has the version that was written last, whatever moves and whatever
/// happens to donors; in the end the homes have it.
#[test]
fn no_stale_page_is_read_in_any_of_many_random_histories() {
    let moved: u32 = (0..300).map(|seed| World::new(seed).run(4_000)).sum();
    assert!(moved > 100, "blocks moved in {moved} of 300 histories only");
}

#[test]
fn a_block_is_not_written_back_while_it_moves_and_untouched_pages_are_not_copied() {
    let mut world = World::new(1);
    world.pages[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8].map(Page::Remote));
    for (offset, version) in (0..8_u64).map(|page| (page * PAGE_SIZE as u64, page + 1)) {
        let mut setup = FakeTransport::new(&world.donors[0]);
        setup
            .post_write(Ticket(0), offset, &page_with(version))
            .expect("room");
        while setup.in_flight() > 0 {
            setup.poll(&mut |_| {});
        }
    }
    // The write-back of page 9 is outstanding.
    let page = PageIndex::new(9);
    let home = world.homes.home_of(page).expect("assigned");
    let posted = world.evictor[0].post_write(Ticket(9), home.offset_of(page), &page_with(30));
    posted.expect("room");
    world.pages[9] = Page::Writing(30, false);
    let (end, ended) = bounded(1);
    let to = Home {
        node: node(1),
        slot: 5,
    };
    let from = home;
    world.relocation.take(MoveOrder {
        moves: [BlockMove { block: 0, from, to }].into(),
        progress: Arc::default(),
        end,
    });
    world.donors[0].lock().expect("no panic").cut = true;
    world.poll_evictor();
    assert!(world.relocation.holds(0) && !world.relocation.holds(1));
    assert_eq!(
        world.evictor[0].in_flight(),
        1,
        "it waits for the write-back"
    );
    world.restore(0);
    let deadline = Instant::now() + Duration::from_secs(30);
    while ended.try_recv() == Err(TryRecvError::Empty) {
        assert!(Instant::now() < deadline);
        world.poll_evictor();
    }
    assert_eq!(world.homes.home(0), Some(to));
    assert!(!world.relocation.holds(0));
    let donor = world.donors[1].lock().expect("no panic");
    let version_at = |page: u64| donor.version_at(5 * BLOCK_BYTES + page * PAGE_SIZE as u64);
    let versions: Vec<_> = (0..12).map(version_at).collect();
    assert_eq!(versions, [1, 2, 3, 4, 5, 6, 7, 8, 0, 30, 0, 0]);
}

/// Orders the first block to the second donor; returns its home.
fn order_first(world: &mut World) -> Home {
    let from = world.homes.home(0).expect("assigned");
    let to = Home {
        node: node(1),
        slot: 5,
    };
    world.relocation.take(MoveOrder {
        moves: [BlockMove { block: 0, from, to }].into(),
        progress: Arc::default(),
        end: bounded(1).0,
    });
    from
}

#[test]
fn a_block_moves_while_as_much_as_possible_is_written_back() {
    let mut world = World::new(1);
    world.pages[..24].fill(Page::Remote(1));
    let of_others = world.homes.home(1).expect("assigned");
    order_first(&mut world);
    let step = |world: &mut World| {
        let pages = States(&world.pages);
        let transports = &mut world.evictor;
        world.relocation.step(&world.homes, transports, &pages)
    };
    // From the beginning of the move on, write-backs take all the room that they may.
    world.donors[0].lock().expect("no panic").cut = true;
    assert_eq!(world.relocation.in_flight_for_write_backs(), IN_FLIGHT_MAX);
    world.relocation.current = world.relocation.begin(&world.homes);
    let most = world.relocation.in_flight_for_write_backs();
    for page in 0..most {
        let offset = of_others.offset_of(PageIndex::new(BLOCK_PAGES)) + (page * PAGE_SIZE) as u64;
        let posted = world.evictor[0].post_write(Ticket(0), offset, &page_with(1));
        posted.expect("room");
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    while world.evictor[0].in_flight() == most {
        assert!(Instant::now() < deadline, "nothing of the block is read");
        step(&mut world);
    }
    while step(&mut world) {}
    assert_eq!(world.evictor[0].in_flight(), most + IN_FLIGHT_KEPT);
}

#[test]
fn a_block_whose_move_is_given_up_is_held_until_its_reads_are_answered() {
    let mut world = World::new(1);
    world.pages[..24].fill(Page::Remote(1));
    let from = order_first(&mut world);
    world.donors[0].lock().expect("no panic").cut = true;
    let deadline = Instant::now() + Duration::from_secs(30);
    while world.evictor[0].in_flight() == 0 {
        assert!(Instant::now() < deadline);
        world.poll_evictor();
    }
    // The other donor is lost.
    world.relocation.leave(1, &world.homes);
    assert!(world.relocation.holds(0) && !world.relocation.holds(1));
    world.restore(0);
    while world.evictor[0].in_flight() > 0 {
        assert!(Instant::now() < deadline);
        world.poll_evictor();
    }
    assert!(!world.relocation.holds(0));
    assert_eq!(world.homes.home(0), Some(from));
}
