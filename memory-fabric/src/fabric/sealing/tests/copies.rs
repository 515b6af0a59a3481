//! Sealed pages of two donors, of which each has a copy that was made without another page.

use super::*;
use crate::page::{PAGE_SIZE, PageBytes};
use crate::transport::{Completion, Full, Interest, Ticket};
use fabric_replicas::{ReplicatedTransport, Role, Traffic};
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

const PAGES: u64 = 8;
const PAGE: u64 = PAGE_SIZE as u64;

/// A donor.
#[derive(Debug, Default)]
struct Donor {
    pages: HashMap<u64, Box<PageBytes>>,
    /// The pages of which other bytes are sent.
    wrong: HashSet<u64>,
    is_cut: bool,
}

impl Donor {
    fn read(&self, offset: u64, pages: u32) -> Vec<u8> {
        let offsets = (0..u64::from(pages)).map(|page| offset + page * PAGE);
        let read = offsets.flat_map(|at| {
            let mut page = self.pages.get(&at).map_or([0; PAGE_SIZE], |page| **page);
            page[5] ^= u8::from(self.wrong.contains(&(at / PAGE)));
            page
        });
        read.collect()
    }
}

#[derive(Debug)]
enum Posted {
    Read(Ticket, u64, Option<u32>),
    Written(Ticket, u64, Box<PageBytes>),
    Dropped(u32),
}

/// A connection to it.
#[derive(Debug)]
struct Wire(Arc<Mutex<Donor>>, VecDeque<Posted>);

impl Wire {
    fn post(&mut self, posted: Posted) -> Result<(), Full> {
        if self.1.len() == IN_FLIGHT_MAX {
            return Err(Full);
        }
        self.1.push_back(posted);
        Ok(())
    }
}

impl PageTransport for Wire {
    fn post_read(&mut self, ticket: Ticket, offset: u64) -> Result<(), Full> {
        self.post(Posted::Read(ticket, offset, None))
    }

    fn post_read_run(&mut self, ticket: Ticket, offset: u64, pages: u32) -> Result<(), Full> {
        self.post(Posted::Read(ticket, offset, Some(pages)))
    }

    fn post_write(&mut self, ticket: Ticket, offset: u64, page: &PageBytes) -> Result<(), Full> {
        self.post(Posted::Written(ticket, offset, Box::new(*page)))
    }

    fn post_drop(&mut self, _: u64, pages: u32) -> Result<(), Full> {
        self.post(Posted::Dropped(pages))
    }

    fn flush(&mut self) {}

    fn poll(&mut self, complete: &mut dyn FnMut(Completion<'_>)) {
        let mut donor = self.0.lock().expect("no panic");
        if donor.is_cut {
            return;
        }
        for posted in self.1.drain(..) {
            match posted {
                Posted::Read(ticket, offset, Some(pages)) => {
                    complete(Completion::ReadRun(ticket, &donor.read(offset, pages)));
                }
                Posted::Read(ticket, offset, None) => {
                    let bytes = donor.read(offset, 1);
                    let page = bytes.as_slice().try_into().expect("a page");
                    complete(Completion::Read(ticket, page));
                }
                Posted::Written(ticket, offset, page) => {
                    donor.pages.insert(offset, page);
                    complete(Completion::Written(ticket));
                }
                Posted::Dropped(pages) => complete(Completion::Dropped(pages)),
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.1.len()
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}

struct Uncounted;

impl Traffic for Uncounted {
    fn wrote(&self, _: usize) {}
    fn fetched(&self, _: usize, _: u32) {}
}

/// The threads of a VM, as far as they use its donors.
struct Vm {
    court: Court,
    set: Arc<ReplicaSet>,
    donors: [Arc<Mutex<Donor>>; 2],
    seal: Arc<LinkSeal>,
    stats: Arc<SealStats>,
    evictor: Box<dyn PageTransport>,
}

/// What came for a request.
#[derive(Debug, Eq, PartialEq)]
enum Came {
    Page(Vec<u8>),
    Unread,
    Other,
}

impl Vm {
    fn new() -> Self {
        let places = [0, 1].map(|donor| Place { donor, slot: 0 });
        let court = Court::new(Some(Copies::new(&[places], &[1; 2], &[1; 2], &[0, 1])));
        let set = court.set.clone().expect("copies");
        let donors: [Arc<Mutex<Donor>>; 2] = Default::default();
        let (key, stats) = (VmKey::random().expect("a key"), Arc::<SealStats>::default());
        let judge = Arc::clone(&court.judge);
        let seal = LinkSeal::new(Arc::new(key), 2, BLOCK_BYTES, Arc::clone(&stats), judge);
        let seal = Arc::new(seal.expect("address space"));
        let weak = Arc::downgrade(&seal);
        set.set_check(Box::new(move |offset, page| {
            weak.upgrade()?.is_genuine(offset, page)
        }));
        let evictor = transport(&set, &donors, &seal, TrafficClass::Bulk);
        Self {
            court,
            set,
            donors,
            seal,
            stats,
            evictor,
        }
    }

    fn transport(&self, class: TrafficClass) -> Box<dyn PageTransport> {
        transport(&self.set, &self.donors, &self.seal, class)
    }

    fn write(&mut self, page: u64, bytes: &PageBytes) {
        let posted = self.evictor.post_write(Ticket(0), page * PAGE, bytes);
        posted.expect("room");
        assert_eq!(came(&mut *self.evictor), Came::Other);
    }

    fn send_wrong(&self, donor: usize, pages: &[u64]) {
        let mut donor = self.donors[donor].lock().expect("no panic");
        donor.wrong = pages.iter().copied().collect();
    }

    /// Changes a page in the memory of a donor.
    fn change(&self, donor: usize, page: u64) {
        let mut donor = self.donors[donor].lock().expect("no panic");
        donor.pages.get_mut(&(page * PAGE)).expect("written")[7] ^= 1;
    }

    fn cut(&self, donor: usize, is_cut: bool) {
        self.donors[donor].lock().expect("no panic").is_cut = is_cut;
    }

    /// Polls until each block has two copies.
    fn repair(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.set.copies().degraded() > 0 {
            assert!(Instant::now() < deadline, "no copy is made again");
            self.evictor.poll(&mut |_| {});
        }
    }
}

fn transport(
    set: &Arc<ReplicaSet>,
    donors: &[Arc<Mutex<Donor>>; 2],
    seal: &Arc<LinkSeal>,
    class: TrafficClass,
) -> Box<dyn PageTransport> {
    let role = match class {
        TrafficClass::Bulk => Role::Evictor,
        _ => Role::Reader,
    };
    let wires = donors.iter().map(|donor| -> Box<dyn PageTransport> {
        Box::new(Wire(Arc::clone(donor), VecDeque::new()))
    });
    let (set, traffic) = (Arc::clone(set), Arc::new(Uncounted));
    let copies = ReplicatedTransport::new(set, role, wires.collect(), traffic);
    let layer = Layer {
        seal: Arc::clone(seal),
        requests_max: 4 * IN_FLIGHT_MAX,
    };
    layer.over(Box::new(copies), class)
}

/// Polls until something has come.
fn came(transport: &mut dyn PageTransport) -> Came {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut found = None;
    while found.is_none() {
        assert!(Instant::now() < deadline, "nothing comes");
        transport.poll(&mut |completion| {
            found = Some(match completion {
                Completion::ReadFrom(_, _, page) => Came::Page(page.to_vec()),
                Completion::Unread(_) => Came::Unread,
                _ => Came::Other,
            });
        });
    }
    found.expect("it came")
}

#[test]
fn a_run_of_which_each_copy_lacks_another_page_ends_and_its_pages_are_read_one_by_one() {
    let mut vm = Vm::new();
    let bytes = |page: u64| [u8::try_from(page + 1).expect("small"); PAGE_SIZE];
    (0..PAGES).for_each(|page| vm.write(page, &bytes(page)));
    // The second donor misses a write-back, and the first one sends other bytes when its copy is made
    // again.
    vm.cut(1, true);
    assert!(!vm.set.down(1, "cut"));
    vm.write(7, &[99; PAGE_SIZE]);
    vm.cut(1, false);
    vm.send_wrong(0, &[7]);
    vm.set.up(1);
    vm.repair();
    // A page of the copy of the first donor changes, and so does what the second one sends of it.
    vm.change(0, 3);
    vm.send_wrong(0, &[]);
    vm.send_wrong(1, &[3]);
    assert!(vm.set.read_elsewhere(0, 0), "it is needed for page 7");
    vm.repair();
    vm.send_wrong(1, &[]);
    for (donor, missing) in [(0, 3), (1, 7)] {
        let mut pages = 0..PAGES;
        assert!(pages.all(|page| vm.set.lacks(donor, page * PAGE) == (page == missing)));
    }
    let rejected = vm.stats.rejected.get();
    let mut prefetcher = vm.transport(TrafficClass::Prefetch);
    let pages = u32::try_from(PAGES).expect("few");
    prefetcher.post_read_run(Ticket(1), 0, pages).expect("room");
    assert_eq!(came(&mut *prefetcher), Came::Unread);
    assert_eq!(vm.stats.rejected.get() - rejected, 2, "one verdict");
    assert_eq!(prefetcher.in_flight(), 0);
    let mut reader = vm.transport(TrafficClass::Urgent);
    for page in 0..PAGES {
        reader.post_read(Ticket(2), page * PAGE).expect("room");
        let wanted = match page {
            7 => [99; PAGE_SIZE],
            page => bytes(page),
        };
        assert_eq!(came(&mut *reader), Came::Page(wanted.to_vec()), "{page}");
    }
    assert_eq!(vm.stats.rejected.get() - rejected, 2);
    let events = vm.court.events.lock().expect("no panic");
    let ends =
        |event: &&FabricEvent| matches!(event, FabricEvent::Failed(_) | FabricEvent::Link(_));
    assert!(events.iter().find(ends).is_none(), "{events:?}");
}
