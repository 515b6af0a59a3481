//! Sealed pages with a real pager: nothing of them can be read at a donor, and nothing that a
//! hostile donor sends instead is installed.

use fabric_homes::NodeId;
use fabric_test_support::hostile::{Forgery, Hostile, Slab};
use fabric_test_support::*;
use memory_fabric::fabric::{
    Compression, DonorAddress, DrainState, FabricConfig, FabricEvent, OnLostMemory, Redundancy,
    Sealing,
};
use memory_fabric::link::LinkEvent;
use memory_fabric::page::{PAGE_SIZE, PageIndex};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;
/// Forged answers of each kind.
const TRIES: u64 = 10_000;

fn at(address: SocketAddr) -> DonorAddress {
    DonorAddress {
        name: None,
        zone: None,
        address,
        fingerprint: None,
        bytes: None,
    }
}

fn sealed(donors: &[SocketAddr]) -> FabricConfig {
    let mut config = config(GUEST, LOCAL, donors);
    config.seal = Sealing::On;
    // Has no effect: sealed pages do not shrink.
    config.compression = Compression::On;
    config
}

/// What a VM leaves at a donor.
fn slab_of_a_vm(seal: Sealing) -> Slab {
    let donor = donor(GUEST);
    let hostile = Hostile::new(donor.address(), Slab::new());
    let mut config = sealed(&[hostile.address]);
    config.seal = seal;
    config.compression = Compression::Off;
    let running = start(&config);
    fill(Words::of(&running.fabric), 1);
    running.fabric.shutdown();
    hostile.slab()
}

/// Reads all pages until a donor has forged enough of them; each must have its bytes.
fn nothing_forged_is_installed(forgery: Forgery, prefetch: bool) {
    let foreign = match forgery {
        Forgery::OtherVm => slab_of_a_vm(Sealing::On),
        _ => Slab::new(),
    };
    let donor = donor(GUEST);
    let hostile = Hostile::new(donor.address(), foreign);
    let mut config = sealed(&[hostile.address]);
    config.prefetch = prefetch;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    // Twice, so that most pages have an old version.
    fill(words, 1);
    fill(words, 2);
    hostile.forge(forgery);
    wait_until("enough pages are forged", || {
        verify(words, 2);
        hostile.forgeries() >= TRIES
    });
    hostile.forge(Forgery::None);
    let stats = &running.fabric.stats().sealing;
    // Those that were forged last may be on their way.
    wait_until("all forged pages are rejected", || {
        stats.rejected.get() == hostile.forgeries()
    });
    verify(words, 2);
    println!(
        "{forgery:?}: {} forged, {} opened, {} sealed",
        hostile.forgeries(),
        stats.opened.get(),
        stats.sealed.get()
    );
    let events: Vec<_> = running.events.try_iter().collect();
    assert!(events.is_empty(), "{events:?}");
    running.fabric.shutdown();
}

#[test]
fn flipped_bits_are_detected() {
    nothing_forged_is_installed(Forgery::FlippedBit, false);
}

#[test]
fn swapped_pages_are_detected() {
    nothing_forged_is_installed(Forgery::OtherPage, false);
}

#[test]
fn pages_of_another_vm_are_detected() {
    nothing_forged_is_installed(Forgery::OtherVm, false);
}

#[test]
fn old_versions_are_detected() {
    nothing_forged_is_installed(Forgery::OldVersion, false);
}

#[test]
fn torn_pages_are_detected() {
    nothing_forged_is_installed(Forgery::Torn, false);
}

#[test]
fn forged_pages_of_prefetched_runs_are_detected() {
    nothing_forged_is_installed(Forgery::FlippedBit, true);
}

/// A page as the kernel reads it for a device.
pub(super) fn page(words: Words, page: usize) -> &'static [u8] {
    let start = std::ptr::from_ref(words.at(page, 0)).cast();
    // SAFETY: inside guest memory; only passed on to the kernel, which reports when the page is
    // inaccessible.
    unsafe { std::slice::from_raw_parts(start, PAGE_SIZE) }
}

#[test]
fn a_page_that_never_opens_ends_the_vm_and_reaches_no_device() {
    in_own_process(
        "sealed::a_page_that_never_opens_ends_the_vm_and_reaches_no_device",
        || {
            let donor = donor(GUEST);
            let hostile = Hostile::new(donor.address(), Slab::new());
            let mut config = sealed(&[hostile.address]);
            config.prefetch = false;
            let running = start(&config);
            let words = Words::of(&running.fabric);
            fill(words, 1);
            // The first page of the cache went home first.
            let wanted = running.fabric.plan().homes.ram_extents();
            let home = running.fabric.plan().homes.local();
            let extent = wanted.iter().find(|extent| extent.home != home);
            let first = extent.expect("memory on the donor").pages.first;
            hostile.forge_permanently(0);
            let number = first.number() as usize;
            let device = std::thread::spawn(move || {
                let file = tempfile::tempfile()?;
                file.write_at(page(words, number), 0)
            });
            let event = running.events.recv_timeout(PATIENCE).expect("an event");
            let FabricEvent::Link(LinkEvent::Lost { node, reason }) = event else {
                panic!("unexpected {event:?}");
            };
            assert_eq!(node.0, 1);
            assert!(
                reason.starts_with(&format!("{first} was received twice")),
                "{reason}"
            );
            assert_eq!(hostile.forgeries(), 2);
            // Everything else is served.
            for page in 64..words.pages() {
                verify_page(words, 1, page);
            }
            assert!(!device.is_finished());
            running.fabric.shutdown();
            let error = device.join().expect("no panic").expect_err("no page");
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
        },
    );
}

#[test]
fn a_page_that_never_opens_ends_the_vm_when_it_is_used_and_not_when_it_is_read_ahead() {
    in_own_process(
        "sealed::a_page_that_never_opens_ends_the_vm_when_it_is_used_and_not_when_it_is_read_ahead",
        || {
            const BAD: usize = 40;
            let donor = donor(GUEST);
            let hostile = Hostile::new(donor.address(), Slab::new());
            let running = start(&sealed(&[hostile.address]));
            let words = Words::of(&running.fabric);
            fill(words, 1);
            let homes = &running.fabric.plan().homes;
            let home = homes.local();
            let extent = homes.ram_extents().into_iter();
            let extent = { extent }.find(|extent| extent.home != home);
            let first = extent.expect("memory on the donor").pages.first;
            let first = first.number() as usize;
            hostile.forge_permanently((BAD * PAGE_SIZE) as u64);
            let rejected = &running.fabric.stats().sealing.rejected;
            // One after the other, so that those that follow are read ahead, unless there is no room for
            // them at that moment. What is read in between takes the place of all of them.
            let deadline = Instant::now() + PATIENCE;
            while rejected.get() < 2 {
                assert!(Instant::now() < deadline, "it was not read ahead");
                for page in (first..first + BAD).chain(first + 10 * BAD..words.pages()) {
                    verify_page(words, 1, page);
                }
            }
            for page in first + BAD + 1..first + 2 * BAD {
                verify_page(words, 1, page);
            }
            let events: Vec<_> = running.events.try_iter().collect();
            assert!(events.is_empty(), "{events:?}");
            let device = std::thread::spawn(move || {
                let file = tempfile::tempfile()?;
                file.write_at(page(words, first + BAD), 0)
            });
            let event = running.events.recv_timeout(PATIENCE).expect("an event");
            let FabricEvent::Link(LinkEvent::Lost { reason, .. }) = event else {
                panic!("unexpected {event:?}");
            };
            assert!(reason.contains("was received twice"), "{reason}");
            assert!(!device.is_finished());
            running.fabric.shutdown();
            device.join().expect("no panic").expect_err("no page");
        },
    );
}

#[test]
fn nothing_of_a_guest_can_be_read_at_its_donor() {
    let needle = pattern(1, 4097, 5).to_le_bytes();
    let shows = |slab: &Slab| {
        let mut pages = slab.values();
        pages.any(|page| page.windows(8).any(|part| part == needle))
    };
    let slab = slab_of_a_vm(Sealing::On);
    assert!(slab.len() > 8_000, "{} pages at the donor", slab.len());
    assert!(!shows(&slab), "a word of the guest is at the donor");
    assert!(shows(&slab_of_a_vm(Sealing::Off)), "the search finds it");
}

#[test]
fn a_hostile_donor_of_two_goes_out_of_use_and_the_guest_continues() {
    let (first, second) = (donor(GUEST), donor(GUEST));
    let hostile = Hostile::new(first.address(), Slab::new());
    // Reads go to the faster copy. Behind two proxies that forge nothing, the other donor is slower.
    let near = Hostile::new(second.address(), Slab::new());
    let far = Hostile::new(near.address, Slab::new());
    let mut config = sealed(&[hostile.address, far.address]);
    config.redundancy = Redundancy::Copies;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 1);
    hostile.forge_all();
    verify(words, 1);
    fill(words, 2);
    verify(words, 2);
    let event = running.events.recv_timeout(PATIENCE).expect("an event");
    let FabricEvent::Degraded { node, reason } = event else {
        panic!("unexpected {event:?}");
    };
    assert_eq!(node.0, 1);
    assert!(reason.contains("was received twice"), "{reason}");
    let replicas = running.fabric.view().replicas().expect("replicated");
    assert_eq!((replicas.losses, replicas.out.len()), (1, 1));
    assert!(hostile.forgeries() >= 2);
    let events: Vec<_> = running.events.try_iter().collect();
    assert!(events.is_empty(), "{events:?}");
    running.fabric.shutdown();
}

/// A second loss of a donor would have been reported within this time.
const REPORTED: Duration = Duration::from_secs(1);

#[test]
fn a_hostile_donor_without_which_the_guest_continues_is_lost_once() {
    let (first, second) = (donor(GUEST), donor(GUEST));
    let hostile = Hostile::new(first.address(), Slab::new());
    let mut config = sealed(&[hostile.address, second.address()]);
    config.on_lost_memory = OnLostMemory::Poison;
    config.grace = Duration::from_millis(100);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 1);
    hostile.forge_all();
    // The guest has its first half there. Each of these reads waits for a page that is forged twice, or
    // finds it here.
    std::thread::scope(|scope| {
        for part in 0..4 {
            let pages = words.pages() / 8;
            scope.spawn(move || {
                (part * pages..(part + 1) * pages).for_each(|page| drop(words.read(page)))
            });
        }
    });
    let event = running.events.recv_timeout(PATIENCE).expect("an event");
    let FabricEvent::Poisoned(lost) = event else {
        panic!("unexpected {event:?}");
    };
    assert!(lost.lost_pages > 0 && !lost.was_down, "{lost:?}");
    // Its lease ends, which nothing depends on any more.
    drop(first);
    let event = running.events.recv_timeout(REPORTED);
    assert!(event.is_err(), "{event:?}");
    let half = words.pages() / 2;
    for page in half..words.pages() {
        let found = words.read(page).expect("of the other donor");
        assert!(
            (0..WORDS_PER_PAGE).all(|word| found[word] == pattern(1, page, word)),
            "page {page}"
        );
    }
    running.fabric.shutdown();
}

#[test]
fn a_page_that_cannot_be_moved_stays_with_its_block_and_ends_nothing() {
    const BAD: usize = 40;
    let (first, second) = (donor(GUEST), donor(2 * GUEST));
    let hostile = Hostile::new(first.address(), Slab::new());
    let running = start(&sealed(&[hostile.address, second.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 1);
    let homes = &running.fabric.plan().homes;
    let home_of = |page: usize| {
        let page = PageIndex::new(u32::try_from(page).expect("a small guest"));
        homes.home_of(page).expect("assigned")
    };
    // Each of the first slots' pages with this number.
    hostile.forge_permanently((BAD * PAGE_SIZE) as u64);
    let bad = (0..words.pages()).find(|&page| {
        let home = home_of(page);
        home.node.0 == 1 && home.slot == 0 && page % 512 == BAD
    });
    let bad = bad.expect("a page of the donor");
    let drains = running.fabric.drains().expect("there are donors");
    drains.drain(NodeId(1), &[]).expect("there is room");
    let view = running.fabric.view();
    let state = || view.drain().expect("one has begun").state;
    wait_until("the drain ends", || {
        matches!(state(), DrainState::Done | DrainState::Failed(_))
    });
    let DrainState::Failed(why) = state() else {
        panic!("unexpected {:?}", state());
    };
    assert!(why.contains("with other bytes"), "{why}");
    assert_eq!(home_of(bad).node.0, 1);
    let others = |page: &usize| home_of(*page).node.0 == 1 && page / 512 != bad / 512;
    assert_eq!((0..words.pages()).filter(others).count(), 0);
    let events: Vec<_> = running.events.try_iter().collect();
    let is_end = |event: &FabricEvent| matches!(event, FabricEvent::Drained(_));
    assert!(events.iter().all(is_end), "{events:?}");
    for page in (0..words.pages()).filter(|&page| page != bad) {
        verify_page(words, 1, page);
    }
    running.fabric.shutdown();
}

#[test]
fn a_hostile_donor_that_joined_ends_the_guest_whose_added_memory_it_has() {
    in_own_process(
        "sealed::a_hostile_donor_that_joined_ends_the_guest_whose_added_memory_it_has",
        || {
            let (first, joins) = (donor(GUEST), donor(GUEST));
            let hostile = Hostile::new(joins.address(), Slab::new());
            let mut config = sealed(&[first.address()]);
            config.on_lost_memory = OnLostMemory::Poison;
            config.hotplug = Some(range(64 * 512, 32 * 512));
            let running = start(&config);
            let words = Words::of(&running.fabric);
            let added = join(&running, at(hostile.address));
            fill_some(words, added.clone());
            hostile.forge_all();
            let reader = std::thread::spawn(move || {
                let file = tempfile::tempfile()?;
                { added }.try_for_each(|number| file.write_at(page(words, number), 0).map(drop))
            });
            let event = running.events.recv_timeout(PATIENCE).expect("an event");
            let FabricEvent::Link(LinkEvent::Lost { node, reason }) = event else {
                panic!("unexpected {event:?}");
            };
            assert!(
                node.0 > 1 && reason.contains("was received twice"),
                "{node}: {reason}"
            );
            running.fabric.shutdown();
            reader.join().expect("no panic").expect_err("no page");
        },
    );
}

#[test]
fn a_donor_joins_sealed_and_returns_after_it_left() {
    let (first, joins) = (donor(GUEST), donor(GUEST));
    let mut config = sealed(&[first.address()]);
    config.hotplug = Some(range(64 * 512, 32 * 512));
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill_some(words, 0..(48 << 20) / PAGE_SIZE);
    let hotplug = running.fabric.hotplug().expect("it was asked for");
    for _ in 0..2 {
        let added = join(&running, at(joins.address()));
        fill_some(words, added.clone());
        for page in added.chain(0..4096) {
            verify_page(words, 1, page);
        }
        let nodes = running.fabric.nodes();
        assert!(nodes.iter().skip(1).all(|node| node.is_sealed), "{nodes:?}");
        assert!(joins.pool().status().pages_written > 100);
        hotplug.unplug(0..12).expect("unplugged");
        hotplug.request(0, None).expect("it leaves");
        wait_until("the donor left", || joins.pool().lent_bytes() == 0);
    }
    assert_eq!(running.fabric.stats().sealing.rejected.get(), 0);
    running.fabric.shutdown();
}

/// Adds 24 MiB from a donor that joins, and returns its pages.
fn join(running: &Running, donor: DonorAddress) -> std::ops::Range<usize> {
    let hotplug = running.fabric.hotplug().expect("it was asked for");
    hotplug.request(24 << 20, Some(donor)).expect("it joins");
    hotplug.plug(0..12).expect("memory");
    64 * 512..64 * 512 + 12 * 512
}

fn fill_some(words: Words, pages: std::ops::Range<usize>) {
    for page in pages {
        for word in 0..WORDS_PER_PAGE {
            let value = pattern(1, page, word);
            words.at(page, word).store(value, Ordering::Relaxed);
        }
    }
}
