//! The effect of a fault on other donors.

use super::*;
use crate::homes::{BLOCK_PAGES, Home, HomeTable, NodeId};
use crate::page::PAGE_SIZE;
use crate::page_map::Kind;
use crate::pager::testing::{make_remote, shared};
use crate::transport::{Full, Interest};
use std::sync::atomic::{AtomicUsize, Ordering};

const DONORS: usize = 3;

/// Accepts requests, and counts flushes.
#[derive(Debug)]
struct Counting(Arc<AtomicUsize>);

impl PageTransport for Counting {
    fn post_read(&mut self, _: Ticket, _: u64) -> Result<(), Full> {
        Ok(())
    }

    fn post_read_run(&mut self, _: Ticket, _: u64, _: u32) -> Result<(), Full> {
        unreachable!("only pages are asked for")
    }

    fn post_write(&mut self, _: Ticket, _: u64, _: &PageBytes) -> Result<(), Full> {
        unreachable!("only pages are asked for")
    }

    fn post_drop(&mut self, _: u64, _: u32) -> Result<(), Full> {
        unreachable!("only pages are asked for")
    }

    fn flush(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn poll(&mut self, _: &mut dyn FnMut(Completion<'_>)) {}

    fn in_flight(&self) -> usize {
        0
    }

    fn interests(&self, _: &mut dyn FnMut(Interest)) {}
}

#[test]
fn a_fault_flushes_the_transport_to_its_home_and_no_other() {
    let blocks = u32::try_from(DONORS).expect("a few");
    let boot = PageRange::new(PageIndex::new(0), blocks * BLOCK_PAGES);
    let homes = HomeTable::new(NodeId(0), &[boot], None);
    let (shared, inboxes) = shared(homes, 64, DONORS);
    let flushes: Vec<Arc<AtomicUsize>> = (0..DONORS).map(|_| Arc::default()).collect();
    let transports = flushes
        .iter()
        .map(|count| -> Box<dyn PageTransport> { Box::new(Counting(Arc::clone(count))) });
    let (transports, inbox) = (transports.collect(), inboxes.faults);
    let mut thread = FaultThread::new(Arc::clone(&shared), transports, inbox, None);
    let fault_on = |page: PageIndex| Fault {
        address: shared.memory.guest_page(page).addr(),
        write: false,
        write_protected: false,
        thread: 0,
    };
    let counts = || -> Vec<usize> {
        let counts = flushes.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).collect()
    };
    for (block, donor) in (0..).zip(0..DONORS) {
        let (node, slot) = (shared.nodes.node_at(donor), 0);
        shared.homes.assign(block, Home { node, slot });
        make_remote(&shared, PageIndex::new(block * BLOCK_PAGES));
    }
    for (block, wanted) in [(1, [0, 1, 0]), (2, [0, 1, 1])] {
        let fault = fault_on(PageIndex::new(block * BLOCK_PAGES));
        thread.begin(fault, Instant::now()).expect("served");
        assert_eq!(counts(), wanted);
    }
    // The page is in transit: nothing is posted.
    let fault = fault_on(PageIndex::new(BLOCK_PAGES));
    thread.begin(fault, Instant::now()).expect("served");
    assert_eq!(counts(), [0, 1, 1]);
}

#[test]
fn a_page_whose_block_was_unplugged_while_it_was_held_is_one_of_zeroes() {
    let boot = PageRange::new(PageIndex::new(0), BLOCK_PAGES);
    let homes = HomeTable::new(NodeId(0), &[boot], None);
    let (shared, inboxes) = shared(homes, 64, 1);
    let page = PageIndex::new(40);
    let address = shared.memory.guest_page(page).addr();
    let bytes = BLOCK_PAGES as usize * PAGE_SIZE;
    let first = shared.memory.guest_page(boot.first);
    shared.uffd.register(first, bytes).expect("registered");
    let node = shared.nodes.node_at(0);
    shared.homes.assign(0, Home { node, slot: 0 });
    make_remote(&shared, page);
    shared.homes.unassign(0).expect("it had a home");
    let flushes = Arc::new(AtomicUsize::new(0));
    let transports: Vec<Box<dyn PageTransport>> = vec![Box::new(Counting(Arc::clone(&flushes)))];
    let mut thread = FaultThread::new(Arc::clone(&shared), transports, inboxes.faults, None);
    let fault = Fault {
        address,
        write: true,
        write_protected: false,
        thread: 0,
    };
    thread.begin(fault, Instant::now()).expect("served");
    assert_eq!(shared.map.entry(page).state().kind(), Kind::Resident);
    assert_eq!(flushes.load(Ordering::Relaxed), 0, "nothing is requested");
    let mut found = [1; PAGE_SIZE];
    shared.memory.read(page, &mut found);
    assert_eq!(found, [0; PAGE_SIZE]);
}
