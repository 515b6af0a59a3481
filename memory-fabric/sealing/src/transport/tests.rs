//! A hostile donor below a sealed transport.

mod verdicts;

use super::*;
use fabric_transport::IN_FLIGHT_MAX;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const TRIES: usize = 10_000;
const PAGES: usize = 8;
const SLAB_BYTES: u64 = (PAGES * PAGE_SIZE) as u64;

/// What a donor has, and what it sends next instead.
#[derive(Debug, Default)]
struct Donor {
    pages: Vec<PageBytes>,
    posted: VecDeque<(Ticket, u64, Option<u32>)>,
    written: VecDeque<Ticket>,
    /// Sent instead of the page at this offset, so many times.
    forged: Option<(u64, Box<PageBytes>, usize)>,
    /// Accepts no more requests than that.
    room: usize,
    /// Requests for what did not open.
    rereads: usize,
}

/// A transport to it.
#[derive(Clone, Debug)]
struct Wire(Arc<Mutex<Donor>>);

impl Wire {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Donor {
            pages: vec![[0; PAGE_SIZE]; PAGES],
            room: IN_FLIGHT_MAX,
            ..Donor::default()
        })))
    }

    fn stored(&self, offset: u64) -> PageBytes {
        self.0.lock().unwrap().pages[page_at(offset)]
    }

    fn forge(&self, offset: u64, page: PageBytes, times: usize) {
        self.0.lock().unwrap().forged = Some((offset, Box::new(page), times));
    }

    fn post(&self, ticket: Ticket, offset: u64, run: Option<u32>) -> Result<(), Full> {
        let mut donor = self.0.lock().unwrap();
        if donor.posted.len() >= donor.room {
            return Err(Full);
        }
        donor.posted.push_back((ticket, offset, run));
        Ok(())
    }
}

fn page_at(offset: u64) -> usize {
    usize::try_from(offset).expect("a small slab") / PAGE_SIZE
}

impl PageTransport for Wire {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post(ticket, offset, None)
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        self.post(ticket, offset, Some(pages))
    }

    fn post_reread(&mut self, ticket: Ticket, offset: u64, run: Option<u32>) -> Result<(), Full> {
        self.post(ticket, offset, run)?;
        self.0.lock().unwrap().rereads += 1;
        Ok(())
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        let mut donor = self.0.lock().unwrap();
        if donor.room == 0 {
            return Err(Full);
        }
        donor.pages[page_at(offset)] = *page;
        donor.written.push_back(ticket);
        Ok(())
    }

    fn post_drop(&mut self, _: u64, _: u32) -> Result<(), Full> {
        Ok(())
    }

    fn flush(&mut self) {}

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        let mut donor = self.0.lock().unwrap();
        while let Some(ticket) = donor.written.pop_front() {
            complete(Completion::Written(ticket));
        }
        while let Some((ticket, offset, run)) = donor.posted.pop_front() {
            let first = page_at(offset);
            let count = run.map_or(1, |pages| pages as usize);
            let mut pages = donor.pages[first..first + count].to_vec();
            if let Some((at, forged, times)) = &mut donor.forged
                && (first..first + count).contains(&page_at(*at))
                && *times > 0
            {
                *times -= 1;
                pages[page_at(*at) - first] = **forged;
            }
            complete(match run {
                Some(_) => Completion::ReadRun(ticket, pages.as_flattened()),
                None => Completion::Read(ticket, &pages[0]),
            });
        }
    }

    fn in_flight(&self) -> usize {
        let donor = self.0.lock().unwrap();
        donor.posted.len() + donor.written.len()
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}

/// Records faults; says that another donor has a copy, or that there is time, if it is made so.
#[derive(Debug, Default)]
struct Bench {
    faults: Mutex<Vec<Fault>>,
    has_copy: AtomicBool,
    has_time: AtomicBool,
}

impl Judge for Bench {
    fn judge(&self, fault: Fault) -> Verdict {
        self.faults.lock().unwrap().push(fault);
        let [has_copy, has_time] =
            [&self.has_copy, &self.has_time].map(|flag| flag.load(Ordering::Relaxed));
        match (has_copy, has_time) {
            (true, _) => Verdict::ReadAgain,
            (false, true) => Verdict::Later,
            (false, false) => Verdict::Lost,
        }
    }
}

/// A VM with its sealed transport to a donor.
struct Vm {
    transport: SealedTransport,
    stats: Arc<SealStats>,
    bench: Arc<Bench>,
}

impl Vm {
    fn new(wire: &Wire) -> Self {
        let (stats, bench) = (Arc::<SealStats>::default(), Arc::<Bench>::default());
        let key = Arc::new(VmKey::random().expect("a key"));
        let judge = Arc::clone(&bench) as Arc<dyn Judge>;
        let seal = LinkSeal::new(key, 1, SLAB_BYTES, Arc::clone(&stats), judge);
        let seal = Arc::new(seal.expect("a table"));
        let inner = Box::new(wire.clone());
        let class = TrafficClass::Prefetch;
        Self {
            transport: SealedTransport::new(inner, seal, class, IN_FLIGHT_MAX),
            stats,
            bench,
        }
    }

    fn write(&mut self, offset: u64, page: &PageBytes) {
        let posted = self.transport.post_write(Ticket(9), offset, page);
        posted.expect("room");
        let mut written = 0;
        self.transport.poll(&mut |completion| {
            assert!(matches!(completion, Completion::Written(Ticket(9))));
            written += 1;
        });
        assert_eq!(written, 1);
    }

    /// Polls until nothing more happens; returns the pages that the pager gets.
    fn pages(&mut self) -> Vec<(u32, Vec<u8>)> {
        let mut pages = Vec::new();
        for _ in 0..4 {
            self.transport.poll(&mut |completion| match completion {
                Completion::Read(Ticket(ticket), page) => pages.push((ticket, page.to_vec())),
                Completion::ReadRun(Ticket(ticket), run) => pages.push((ticket, run.to_vec())),
                other => panic!("{other:?}"),
            });
        }
        pages
    }

    fn faults(&self) -> Vec<Fault> {
        std::mem::take(&mut *self.bench.faults.lock().unwrap())
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }

    /// Few bytes differ between pages: what is swapped would go unnoticed by its looks.
    fn page(&mut self) -> PageBytes {
        let mut page = [0x11; PAGE_SIZE];
        page[..8].copy_from_slice(&self.next().to_le_bytes());
        page
    }

    fn offset(&mut self) -> u64 {
        (self.below(PAGES) * PAGE_SIZE) as u64
    }
}

/// What a donor has to choose from.
struct Choice {
    /// What was written last.
    now: PageBytes,
    /// What was written there before.
    before: PageBytes,
    /// What is written at another place.
    elsewhere: PageBytes,
    /// What another VM wrote at the same place.
    foreign: PageBytes,
}

/// Has a donor send `forge` once, [`TRIES`] times, and permanently a hundred times.
fn none_is_given_to_the_pager(forge: impl Fn(&mut Random, &Choice) -> PageBytes) {
    let (wire, foreign_wire) = (Wire::new(), Wire::new());
    let (mut vm, mut other) = (Vm::new(&wire), Vm::new(&foreign_wire));
    let mut random = Random(7);
    for attempt in 0..TRIES + 100 {
        let is_permanent = attempt >= TRIES;
        let at = random.offset();
        let other_at = (at + PAGE_SIZE as u64) % SLAB_BYTES;
        vm.write(at, &random.page());
        let before = wire.stored(at);
        vm.write(other_at, &random.page());
        let plain = random.page();
        vm.write(at, &plain);
        other.write(at, &plain);
        let choice = Choice {
            now: wire.stored(at),
            before,
            elsewhere: wire.stored(other_at),
            foreign: foreign_wire.stored(at),
        };
        let forged = forge(&mut random, &choice);
        wire.forge(at, forged, if is_permanent { usize::MAX } else { 1 });
        let rejected = vm.stats.rejected.get();
        let ticket = u32::try_from(attempt).expect("few");
        if attempt % 2 == 0 {
            vm.transport.post_read(Ticket(ticket), at).expect("room");
        } else {
            let run = vm.transport.post_read_run(Ticket(ticket), at, 1);
            run.expect("room");
        }
        let came = vm.pages();
        if is_permanent {
            assert_eq!(
                came,
                [],
                "try {attempt}: a forged page was given to the pager"
            );
            assert_eq!(vm.stats.rejected.get(), rejected + 2);
            let (donor, offset, is_ahead) = (None, at, attempt % 2 != 0);
            let fault = Fault::NotGenuine {
                donor,
                offset,
                is_ahead,
            };
            assert_eq!(vm.faults(), [fault]);
            // What was lost counts as outstanding, so each needs a new transport.
            assert_eq!(vm.transport.in_flight(), 1);
            vm = Vm::new(&wire);
            other = Vm::new(&foreign_wire);
        } else {
            assert_eq!(came, [(ticket, plain.to_vec())], "try {attempt}");
            assert_eq!(vm.stats.rejected.get(), rejected + 1, "try {attempt}");
            assert_eq!(vm.faults(), []);
            assert_eq!(vm.transport.in_flight(), 0);
        }
    }
}

#[test]
fn a_flipped_bit_is_detected() {
    none_is_given_to_the_pager(|random, choice| {
        let mut page = choice.now;
        page[random.below(PAGE_SIZE)] ^= 1 << random.below(8);
        page
    });
}

#[test]
fn a_page_of_another_place_is_detected() {
    none_is_given_to_the_pager(|_, choice| choice.elsewhere);
}

#[test]
fn the_same_page_of_another_vm_is_detected() {
    none_is_given_to_the_pager(|_, choice| choice.foreign);
}

#[test]
fn an_old_version_is_detected() {
    none_is_given_to_the_pager(|_, choice| choice.before);
}

#[test]
fn a_torn_page_is_detected() {
    none_is_given_to_the_pager(|random, choice| {
        let mut page = choice.now;
        let boundary = 1 + random.below(PAGE_SIZE - 1);
        page[boundary..].copy_from_slice(&choice.before[boundary..]);
        page
    });
}

#[test]
fn zeroes_are_detected() {
    none_is_given_to_the_pager(|_, _| [0; PAGE_SIZE]);
}

#[test]
fn a_run_with_one_bad_page_is_read_again_as_a_whole() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    let mut random = Random(1);
    let plain: Vec<PageBytes> = (0..PAGES).map(|_| random.page()).collect();
    for (page, bytes) in plain.iter().enumerate() {
        vm.write((page * PAGE_SIZE) as u64, bytes);
    }
    let bad = 5 * PAGE_SIZE as u64;
    wire.forge(bad, [1; PAGE_SIZE], 1);
    let pages = u32::try_from(PAGES).expect("few");
    let run = |vm: &mut Vm| vm.transport.post_read_run(Ticket(3), 0, pages);
    run(&mut vm).expect("room");
    assert_eq!(vm.pages(), [(3, plain.as_flattened().to_vec())]);
    assert_eq!(vm.stats.rejected.get(), 1);
    wire.forge(bad, [1; PAGE_SIZE], 2);
    run(&mut vm).expect("room");
    assert_eq!(vm.pages(), []);
    let fault = Fault::NotGenuine {
        donor: None,
        offset: bad,
        is_ahead: true,
    };
    assert_eq!(vm.faults(), [fault]);
}

#[test]
fn a_write_back_for_which_there_is_no_room_changes_nothing() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    let plain = Random(3).page();
    vm.write(0, &plain);
    wire.0.lock().unwrap().room = 0;
    let posted = vm.transport.post_write(Ticket(1), 0, &[9; PAGE_SIZE]);
    assert_eq!(posted, Err(Full));
    wire.0.lock().unwrap().room = IN_FLIGHT_MAX;
    vm.transport.post_read(Ticket(2), 0).expect("room");
    assert_eq!(vm.pages(), [(2, plain.to_vec())]);
    assert_eq!(vm.stats.rejected.get(), 0);
}

#[test]
fn a_second_attempt_waits_for_room() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    let plain = Random(4).page();
    vm.write(0, &plain);
    wire.forge(0, [1; PAGE_SIZE], 1);
    vm.transport.post_read(Ticket(2), 0).expect("room");
    wire.0.lock().unwrap().room = 0;
    assert_eq!(vm.pages(), []);
    assert_eq!(vm.transport.in_flight(), 1);
    wire.0.lock().unwrap().room = IN_FLIGHT_MAX;
    assert_eq!(vm.pages(), [(2, plain.to_vec())]);
}

#[test]
fn what_is_known_of_a_page_ends_when_it_is_dropped() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    let mut random = Random(5);
    vm.write(0, &random.page());
    vm.write(4096, &random.page());
    let seal = Arc::clone(&vm.transport.reads.seal);
    let check = |offset: u64, mut page: PageBytes| seal.is_genuine(offset, &mut page);
    assert_eq!(check(0, wire.stored(0)), Some(true));
    assert_eq!(check(0, wire.stored(4096)), Some(false));
    assert_eq!(check(8192, wire.stored(8192)), None);
    vm.transport.post_drop(0, 1).expect("room");
    assert_eq!(check(0, wire.stored(0)), None);
    assert_eq!(check(4096, wire.stored(4096)), Some(true));
    vm.write(0, &random.page());
    assert_eq!(check(0, wire.stored(0)), Some(true));
    let counts = [&vm.stats.opened, &vm.stats.rejected].map(|count| count.get());
    assert_eq!(counts, [0, 0]);
}

#[test]
fn a_page_that_was_never_written_back_is_not_accepted() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    vm.transport.post_read(Ticket(2), 0).expect("room");
    assert_eq!(vm.pages(), []);
    assert_eq!(vm.faults().len(), 1);
}

#[test]
fn the_slab_holds_nothing_of_what_was_written() {
    let wire = Wire::new();
    let mut vm = Vm::new(&wire);
    let marker = *b"a marker that no one may read...";
    let mut page = [0; PAGE_SIZE];
    for part in page.chunks_exact_mut(marker.len()) {
        part.copy_from_slice(&marker);
    }
    for number in 0..PAGES {
        vm.write((number * PAGE_SIZE) as u64, &page);
    }
    for number in 0..PAGES {
        let stored = wire.stored((number * PAGE_SIZE) as u64);
        let found = stored.windows(8).any(|part| part == &marker[..8]);
        assert!(!found, "page {number} can be read");
    }
}
