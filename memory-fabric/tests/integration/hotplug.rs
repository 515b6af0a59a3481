//! Memory that is added at run time: zeroes at first, then what was written, never the contents of
//! another block; and donors that join for it, and leave.

use fabric_homes::{BLOCK_BYTES, BLOCK_PAGES, NodeId};
use fabric_test_support::*;
use memory_fabric::fabric::{
    DonorAddress, DrainError, FabricConfig, FabricEvent, Hotplug, HotplugError, PlugError,
};
use memory_fabric::page::{PAGE_SHIFT, PageIndex, PageRange};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

const GUEST: u64 = 32 * MIB;
const LOCAL: u64 = 16 * MIB;
const BLOCKS: u32 = 32;
/// First page of the region; a hole precedes it.
const FIRST: u32 = 64 * BLOCK_PAGES;

fn growing(local: u64, donors: &[SocketAddr]) -> FabricConfig {
    FabricConfig {
        hotplug: Some(PageRange::new(PageIndex::new(FIRST), BLOCKS * BLOCK_PAGES)),
        ..config(GUEST, local, donors)
    }
}

fn at(address: SocketAddr) -> Option<DonorAddress> {
    Some(DonorAddress {
        name: None,
        zone: None,
        address,
        fingerprint: None,
        bytes: None,
    })
}

fn pages(blocks: Range<u32>) -> Range<usize> {
    let page = |block| (FIRST + block * BLOCK_PAGES) as usize;
    page(blocks.start)..page(blocks.end)
}

fn write(words: Words, blocks: Range<u32>, seed: u64) {
    for page in pages(blocks) {
        for word in 0..WORDS_PER_PAGE {
            let value = pattern(seed, page, word);
            words.at(page, word).store(value, Ordering::Relaxed);
        }
    }
}

fn check(words: Words, blocks: Range<u32>, seed: u64) {
    for page in pages(blocks) {
        verify_page(words, seed, page);
    }
}

fn hotplug(running: &Running) -> Hotplug {
    running.fabric.hotplug().expect("it was asked for")
}

#[test]
fn memory_of_this_node_is_added_and_taken_back() {
    let running = start(&growing(GUEST, &[]));
    let words = Words::of(&running.fabric);
    let hotplug = hotplug(&running);
    assert!(matches!(hotplug.plug(0..1), Err(PlugError::NoMemory)));
    assert_eq!(hotplug.missing_bytes(24 * BLOCK_BYTES), 24 * BLOCK_BYTES);
    hotplug
        .request(24 * BLOCK_BYTES, None)
        .expect("there is room");
    hotplug.plug(4..20).expect("memory");
    hotplug.plug(22..30).expect("memory");
    assert!(matches!(hotplug.plug(0..1), Err(PlugError::NoMemory)));
    // More than the cache can hold; all of it stays local.
    write(words, 4..20, 1);
    write(words, 22..30, 2);
    check(words, 4..20, 1);
    check(words, 22..30, 2);
    assert_eq!(running.fabric.stats().remote.summary().count, 0);
    let nodes = running.fabric.nodes();
    assert_eq!(nodes[0].memory_bytes, GUEST + 24 * BLOCK_BYTES);
    let resident = || running.fabric.memory().resident_bytes().expect("fstat");
    assert!(resident() >= 24 * BLOCK_BYTES);
    hotplug.unplug(10..20).expect("unplugged");
    assert!(resident() <= 14 * BLOCK_BYTES, "its memory is free again");
    check(words, 4..10, 1);
    check(words, 22..30, 2);
    hotplug.plug(10..12).expect("memory");
    assert_all(words, pages(10..12), 0);
    hotplug.request(0, None).expect("less is asked for");
    hotplug.unplug(4..12).expect("unplugged");
    hotplug.unplug(22..30).expect("unplugged");
    assert_eq!((resident(), hotplug.homes().added_blocks()), (0, 0));
    assert!(matches!(hotplug.plug(0..1), Err(PlugError::NoMemory)));
}

#[test]
fn a_guest_that_touches_what_is_not_plugged_finds_zeroes_and_takes_no_more_than_the_budget() {
    let running = start(&growing(GUEST, &[]));
    let words = Words::of(&running.fabric);
    let hotplug = hotplug(&running);
    assert_all(words, pages(0..1), 0);
    for _ in 0..2 {
        write(words, 0..BLOCKS, 7);
    }
    wait_until("no more than the cache is here", || {
        running.fabric.memory().resident_bytes().expect("fstat") <= LOCAL
    });
    // Its own bytes, or zeroes.
    for page in pages(0..BLOCKS) {
        let found = words.at(page, 5).load(Ordering::Relaxed);
        assert!(found == 0 || found == pattern(7, page, 5), "page {page}");
    }
    hotplug
        .request(u64::from(BLOCKS) * BLOCK_BYTES, None)
        .expect("room");
    hotplug.plug(0..BLOCKS).expect("memory");
    assert_all(words, pages(0..BLOCKS), 0);
    write(words, 0..BLOCKS, 8);
    check(words, 0..BLOCKS, 8);
}

#[test]
fn a_donor_joins_gets_pages_and_leaves() {
    let (first, second, third) = (donor(GUEST), donor(64 * MIB), donor(64 * MIB));
    let running = start(&growing(LOCAL, &[first.address()]));
    let words = Words::of(&running.fabric);
    let hotplug = hotplug(&running);
    hotplug
        .request(10 * BLOCK_BYTES, at(second.address()))
        .expect("it joins");
    assert_eq!(second.pool().lent_bytes(), 10 * BLOCK_BYTES);
    hotplug.plug(0..10).expect("memory");
    hotplug
        .request(25 * BLOCK_BYTES, at(third.address()))
        .expect("it joins");
    hotplug.plug(17..32).expect("memory");
    assert_eq!(third.pool().lent_bytes(), 15 * BLOCK_BYTES);
    for round in 0..3 {
        write(words, 0..10, round);
        write(words, 17..32, 100 + round);
        check(words, 0..10, round);
        check(words, 17..32, 100 + round);
    }
    let nodes = running.fabric.nodes();
    let homes: Vec<_> = nodes.iter().map(|node| node.memory_bytes).collect();
    assert_eq!(homes[2..], [10 * BLOCK_BYTES, 15 * BLOCK_BYTES]);
    assert!(
        nodes[2].pages_fetched > 500 && nodes[3].pages_written_back > 500,
        "{nodes:?}"
    );
    // Most blocks of both donors are removed; then all of the third's.
    hotplug
        .request(4 * BLOCK_BYTES, None)
        .expect("less is asked for");
    hotplug.unplug(4..10).expect("unplugged");
    hotplug.unplug(20..32).expect("unplugged");
    check(words, 0..4, 2);
    check(words, 17..20, 102);
    assert_eq!(third.pool().leases(), 1);
    hotplug.unplug(17..20).expect("unplugged");
    wait_until("the third has left", || {
        running.fabric.nodes()[3].own_count.is_some() && third.pool().lent_bytes() == 0
    });
    check(words, 0..4, 2);
    // The donor joins again, for blocks that were removed from others.
    hotplug
        .request(14 * BLOCK_BYTES, at(third.address()))
        .expect("it joins again");
    hotplug.plug(18..28).expect("memory");
    assert_all(words, pages(18..28), 0);
    write(words, 18..28, 9);
    check(words, 18..28, 9);
    check(words, 0..4, 2);
    assert_eq!(
        running.fabric.nodes().len(),
        4,
        "under the number that it had"
    );
    let nodes = running.fabric.shutdown();
    assert!(nodes[3].own_count.is_some());
    for donor in [&first, &second, &third] {
        wait_until("all leases have ended", || donor.pool().leases() == 0);
    }
}

#[test]
fn a_donor_whose_memory_is_not_plugged_yet_is_not_drained() {
    let (first, second) = (donor(GUEST), donor(16 * MIB));
    let running = start(&growing(LOCAL, &[first.address()]));
    hotplug(&running)
        .request(4 * BLOCK_BYTES, at(second.address()))
        .expect("it joins");
    let joined = running.fabric.nodes()[2].id;
    let drains = running.fabric.drains().expect("donors");
    let refused = drains.drain(joined, &[]).expect_err("it is to be used");
    assert!(matches!(refused, DrainError::Empty(_)), "{refused}");
    assert_eq!(second.pool().leases(), 1);
}

#[test]
fn a_donor_that_does_not_come_changes_nothing() {
    let (here, small) = (donor(GUEST), donor(4 * MIB));
    let running = start(&growing(LOCAL, &[here.address()]));
    let words = Words::of(&running.fabric);
    let hotplug = hotplug(&running);
    let gone = donor(MIB).address();
    for (address, why) in [(small.address(), "refuses"), (gone, "connect")] {
        let error = hotplug
            .request(8 * BLOCK_BYTES, at(address))
            .expect_err("refused");
        let HotplugError::Donor(error) = error else {
            panic!("{error}");
        };
        let mut text = error.to_string();
        if let Some(cause) = std::error::Error::source(&error) {
            text = format!("{text}: {cause}");
        }
        assert!(text.contains(why), "{text}");
        assert!(matches!(hotplug.plug(0..1), Err(PlugError::NoMemory)));
    }
    assert_eq!(small.pool().leases(), 0);
    assert!(matches!(
        hotplug.request(u64::from(BLOCKS + 1) * BLOCK_BYTES, None),
        Err(HotplugError::TooMuch { .. })
    ));
    assert!(matches!(
        hotplug.request(BLOCK_BYTES - 1, None),
        Err(HotplugError::NotBlocks(_))
    ));
    hotplug
        .request(2 * BLOCK_BYTES, at(small.address()))
        .expect("that much it has");
    assert!(matches!(
        hotplug.request(2 * BLOCK_BYTES, at(small.address())),
        Err(HotplugError::Needless(_))
    ));
    hotplug.plug(0..2).expect("memory");
    write(words, 0..2, 3);
    check(words, 0..2, 3);
}

#[test]
fn a_donor_that_is_lost_while_nothing_of_it_is_plugged_disturbs_nobody() {
    let here = donor(GUEST);
    let config = FabricConfig {
        grace: std::time::Duration::from_millis(200),
        ..growing(LOCAL, &[here.address()])
    };
    let running = start(&config);
    let words = Words::of(&running.fabric);
    let hotplug = hotplug(&running);
    let joins = donor(64 * MIB);
    let address = joins.address();
    hotplug
        .request(4 * BLOCK_BYTES, at(address))
        .expect("it joins");
    assert_eq!(hotplug.missing_bytes(4 * BLOCK_BYTES), 0);
    drop(joins);
    wait_until("it is given up", || {
        hotplug.missing_bytes(4 * BLOCK_BYTES) > 0
    });
    assert!(matches!(hotplug.plug(0..1), Err(PlugError::NoMemory)));
    for page in 0..usize::try_from(GUEST >> PAGE_SHIFT).expect("small") {
        words.at(page, 0).store(page as u64, Ordering::Relaxed);
    }
    let reported: Vec<_> = running.events.try_iter().collect();
    let link = |event: &FabricEvent| matches!(event, FabricEvent::Link(_));
    assert!(!reported.iter().any(link), "{reported:?}");
    // This node can provide the memory instead.
    hotplug.request(4 * BLOCK_BYTES, None).expect("here");
    hotplug.plug(0..4).expect("memory");
    assert_eq!(hotplug.homes().added_blocks_at(NodeId(0)), 4);
}

/// Blocks are added and removed on donors and here, while their owners verify them, other threads
/// access unplugged memory, and connections break.
#[test]
fn blocks_that_come_and_go_never_have_anothers_bytes() {
    let (first, second) = (donor(GUEST), donor(24 * MIB));
    let running = start(&growing(LOCAL, &[first.address()]));
    let words = Words::of(&running.fabric);
    let hotplug = hotplug(&running);
    hotplug
        .request(12 * BLOCK_BYTES, at(second.address()))
        .expect("it joins");
    hotplug
        .request(20 * BLOCK_BYTES, None)
        .expect("the rest is here");
    let finished = AtomicBool::new(false);
    let donors = [second];
    let breaker = Breaker::new(&donors, BREAK_INTERVAL);
    let busy = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (finished, busy, hotplug, breaker) = (&finished, &busy, &hotplug, &breaker);
        let owners: Vec<_> = (0..2_u32)
            .map(|owner| {
                scope.spawn(move || {
                    let mut random = Random(u64::from(owner) + 5);
                    let mut plugged: Vec<Option<u64>> = vec![None; 10];
                    for round in 1..400_u64 {
                        let index = random.below(10);
                        let block = owner * 16 + u32::try_from(index).expect("few");
                        let seed = u64::from(owner) << 32 | round;
                        match plugged[index] {
                            None => match hotplug.plug(block..block + 1) {
                                Ok(()) => {
                                    assert_all(words, pages(block..block + 1), 0);
                                    write(words, block..block + 1, seed);
                                    plugged[index] = Some(seed);
                                }
                                Err(_) => {
                                    busy.fetch_add(1, Ordering::Relaxed);
                                }
                            },
                            Some(seed) => {
                                check(words, block..block + 1, seed);
                                if random.below(2) == 0 {
                                    // A failed unplug changes no byte.
                                    if hotplug.unplug(block..block + 1).is_ok() {
                                        plugged[index] = None;
                                    }
                                }
                            }
                        }
                    }
                })
            })
            .collect();
        scope.spawn(move || {
            // Blocks 10 to 15 and 26 to 31 are never plugged.
            let mut random = Random(99);
            while !finished.load(Ordering::Relaxed) {
                let block = 10 + 16 * u32::try_from(random.below(2)).expect("few");
                let page = pages(block..block + 6).start + random.below(6 * 512);
                let word = words.at(page, 1);
                let found = word.swap(page as u64, Ordering::Relaxed);
                assert!(
                    found == 0 || found == page as u64,
                    "page {page}: {found:#x}"
                );
                breaker.tick();
            }
        });
        let results: Vec<_> = owners.into_iter().map(|owner| owner.join()).collect();
        finished.store(true, Ordering::Relaxed);
        for result in results {
            result.expect("owner");
        }
    });
    breaker.assert_broke();
    let stats = running.fabric.stats();
    println!(
        "{} evictions, {} remote faults, {} times busy",
        stats.evictions.get(),
        stats.remote.summary().count,
        busy.load(Ordering::Relaxed)
    );
    assert!(stats.evictions.get() > 1000, "too few evictions");
}
