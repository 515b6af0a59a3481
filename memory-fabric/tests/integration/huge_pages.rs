//! Huge pages for home memory of this node, and pages of 4 KiB for the rest.
//!
//! Where the host does not use huge pages for shared memory, the advice and the contents are
//! verified all the same.

use fabric_homes::NodeId;
use fabric_test_support::*;
use memory_fabric::fabric::Fabric;
use memory_fabric::guest_memory::{HUGE_PAGE_BYTES, huge_bytes};
use memory_fabric::page::PAGE_SIZE;
use std::sync::atomic::Ordering;

const HUGE: u64 = HUGE_PAGE_BYTES as u64;

/// Returns whether this host uses huge pages for shared memory on request.
fn host_gives_them() -> bool {
    let file = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let setting = std::fs::read_to_string(file).unwrap_or_default();
    ["[advise]", "[within_size]", "[always]"]
        .iter()
        .any(|chosen| setting.contains(chosen))
}

/// A mapping of a view: its range of guest-physical offsets, and its attributes.
struct Mapping {
    from: u64,
    to: u64,
    /// Whether huge pages are requested; otherwise they are forbidden.
    asked_for: bool,
    /// Bytes in huge pages.
    huge_bytes: u64,
}

/// Returns the mappings of a view, in order.
fn mappings(fabric: &Fabric) -> Vec<Mapping> {
    let view = fabric.memory().guest_view().addr() as u64;
    let end = view + fabric.memory().bytes() as u64;
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("readable");
    let mut found = Vec::new();
    let (mut range, mut huge_bytes) = (None, None);
    for line in smaps.lines() {
        if let Some((from, rest)) = line.split_once('-')
            && let Ok(from) = u64::from_str_radix(from, 16)
        {
            let to = rest.split(' ').next().expect("an address");
            let to = u64::from_str_radix(to, 16).expect("an address");
            range = (view <= from && to <= end).then(|| (from - view, to - view));
        }
        if let Some(huge) = line.strip_prefix("ShmemPmdMapped:") {
            let kib = huge.trim().strip_suffix(" kB").expect("its unit");
            huge_bytes = Some(kib.trim().parse::<u64>().expect("a number") << 10);
        }
        // The last line of each mapping.
        if let (Some(flags), Some((from, to))) = (line.strip_prefix("VmFlags:"), range) {
            let has = |flag| flags.split_whitespace().any(|found| found == flag);
            assert!(has("hg") != has("nh"), "{line}");
            found.push(Mapping {
                from,
                to,
                asked_for: has("hg"),
                huge_bytes: huge_bytes.take().expect("the kernel reports it"),
            });
        }
    }
    found
}

/// Returns the bytes with huge pages requested: whole ones, of home memory of this node.
fn asked_for(fabric: &Fabric) -> u64 {
    let mut asked_for = 0;
    for Mapping { from, to, .. } in mappings(fabric).iter().filter(|one| one.asked_for) {
        assert!(from % HUGE == 0 && to % HUGE == 0, "{from:#x} to {to:#x}");
        asked_for += to - from;
        let mut here = fabric.plan().homes.ram_extents_at(NodeId(0));
        let inside = here.any(|extent| {
            extent.pages.first.address() <= *from && *to <= extent.pages.end() * PAGE_SIZE as u64
        });
        assert!(inside, "{from:#x} to {to:#x} is not all at home here");
    }
    asked_for
}

/// Returns the bytes of a view in huge pages.
fn huge_bytes_of(fabric: &Fabric) -> u64 {
    mappings(fabric).iter().map(|one| one.huge_bytes).sum()
}

#[test]
fn huge_pages_are_asked_for_where_memory_is_at_home_here_and_nowhere_else() {
    let donor = donor(31 * MIB);
    // Neither the loan nor the budget is a multiple of 2 MiB.
    let running = start(&config(64 * MIB, 33 * MIB, &[donor.address()]));
    let fabric = &running.fabric;
    let asked_for = asked_for(fabric);
    assert!(asked_for >= 28 * MIB, "{asked_for}");

    let words = Words::of(fabric);
    fill(words, 1);
    verify(words, 1);
    if !host_gives_them() {
        assert_eq!((huge_bytes_of(fabric), huge_bytes()), (0, Some(0)));
    }
    // The rest is limited to its budget, page by page.
    let most = (fabric.plan().home_here_pages + fabric.plan().cache_pages) * PAGE_SIZE as u64;
    let resident = fabric.memory().resident_bytes().expect("fstat");
    assert!(resident <= most, "{resident} resident, {most} allowed");

    // Writers on both sides of each border while pages move.
    let borders: Vec<_> = fabric.plan().homes.ram_extents()[1..]
        .iter()
        .map(|extent| extent.pages.first.index())
        .collect();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let borders = &borders;
            scope.spawn(move || {
                let mut random = Random(thread as u64);
                for _ in 0..20_000 {
                    let border = borders[random.below(borders.len())];
                    let page = border - 8 + random.below(16);
                    words.at(page, thread).fetch_add(1, Ordering::Relaxed);
                    let far = random.below(words.pages());
                    words.at(far, 100 + thread).fetch_add(2, Ordering::Relaxed);
                }
            });
        }
    });
    let mut before = 0;
    let mut after = 0;
    for page in 0..words.pages() {
        for thread in 0..4 {
            for (word, step) in [(thread, 1_u64), (100 + thread, 2)] {
                let grown = words
                    .at(page, word)
                    .load(Ordering::Relaxed)
                    .wrapping_sub(pattern(1, page, word));
                assert!(grown.is_multiple_of(step), "page {page} word {word}");
                *if step == 1 { &mut before } else { &mut after } += grown / step;
            }
        }
    }
    assert_eq!((before, after), (80_000, 80_000), "increments were lost");
    running.fabric.shutdown();
}

#[test]
fn a_host_that_gives_huge_pages_has_them_where_memory_is_at_home_here() {
    if !host_gives_them() {
        println!("SKIPPED: shmem_enabled gives no huge pages here");
        return;
    }
    let donor = donor(31 * MIB);
    let running = start(&config(64 * MIB, 33 * MIB, &[donor.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 1);
    verify(words, 1);
    let (huge, asked_for) = (huge_bytes_of(&running.fabric), asked_for(&running.fabric));
    assert!((1..=asked_for).contains(&huge), "{huge} of {asked_for}");
    // Of this process, which other tests share.
    assert!(huge_bytes() > Some(0));
    running.fabric.shutdown();
}

#[test]
fn huge_pages_that_are_switched_off_are_not_asked_for() {
    let mut config = config(16 * MIB, 16 * MIB, &[]);
    config.huge_pages = false;
    let running = start(&config);
    assert!(mappings(&running.fabric).iter().all(|one| !one.asked_for));
    running.fabric.shutdown();
}
