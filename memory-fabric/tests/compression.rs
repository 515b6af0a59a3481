//! Pages that are compressed on their way: every byte is right, hostile peers gain nothing, and
//! it is done where it pays.

mod support;

use memory_fabric::fabric::Compression;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::stats::Traffic;
use memory_fabric::wire::{FrameKind, HEADER_BYTES, TrafficClass};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use support::proxy::{Mischief, Proxy};
use support::throttle::throttled;
use support::*;

const GUEST: u64 = 48 * MIB;
/// On a slow link.
const SMALL_GUEST: u64 = 32 * MIB;
const LOCAL: u64 = 16 * MIB;
const CLASSES: [TrafficClass; 3] = [
    TrafficClass::Urgent,
    TrafficClass::Bulk,
    TrafficClass::Prefetch,
];

/// So that no two threads touch the same pages in the same order.
static NEXT_SEED: AtomicU64 = AtomicU64::new(0);

fn traffic(running: &Running, class: TrafficClass) -> Arc<Traffic> {
    Arc::clone(running.fabric.stats().donors[0].traffic(class))
}

/// Touches random pages, and checks the word that it touches.
fn touch(words: Words, seed: u64, touches: usize) {
    let mut random = Random(NEXT_SEED.fetch_add(1, Ordering::Relaxed));
    for _ in 0..touches {
        let (page, word) = (random.below(words.pages()), random.below(WORDS_PER_PAGE));
        let found = words.at(page, word).load(Ordering::Relaxed);
        assert_eq!(found, pattern(seed, page, word), "page {page} word {word}");
    }
}

#[test]
fn memory_is_right_and_what_is_counted_too_under_every_setting() {
    for compression in [Compression::On, Compression::Off, Compression::Auto] {
        let donor = donor(GUEST);
        let mut config = config(GUEST, LOCAL, &[donor.address()]);
        config.compression = compression;
        let running = start(&config);
        let words = Words::of(&running.fabric);
        fill(words, 1);
        verify(words, 1);
        touch(words, 1, 5000);
        verify(words, 1);
        let [urgent, bulk, prefetch] = CLASSES.map(|class| traffic(&running, class));
        let nodes = running.fabric.shutdown();
        assert_eq!(bulk.pages.get(), nodes[1].pages_written_back);
        assert_eq!(
            urgent.pages.get() + prefetch.pages.get(),
            nodes[1].pages_fetched
        );
        for traffic in [urgent, bulk, prefetch] {
            let (plain, wire) = (traffic.plain_bytes(), traffic.wire_bytes.get());
            assert!(plain > MIB, "{compression:?} {plain} bytes");
            match compression {
                Compression::On => {
                    // Three of four pages get smaller.
                    let compressed = traffic.pages_compressed.get() * 4 / traffic.pages.get();
                    assert!((2..=3).contains(&compressed), "{compressed} of 4");
                    assert!(wire * 4 < plain * 3, "{wire} for {plain} bytes");
                    assert!(traffic.is_compressing());
                }
                Compression::Off => {
                    assert_eq!((wire, traffic.pages_compressed.get()), (plain, 0));
                    assert!(!traffic.is_compressing());
                }
                Compression::Auto => assert!(wire <= plain),
            }
        }
    }
}

/// Memory that is compressed goes through a network that does `mischief` to packed pages.
fn survives(kind: FrameKind, mischief: Mischief, checksum: bool) {
    let donor = donor(GUEST);
    let proxy = Proxy::on(kind, donor.address(), mischief, 3);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.compression = Compression::On;
    config.checksum = checksum;
    config.prefetch = kind == FrameKind::PagesData;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 2);
    for _ in 0..4 {
        verify(words, 2);
    }
    assert!(
        proxy.mischief_done() > 0,
        "{mischief:?}: nothing was put to the test"
    );
    running.fabric.shutdown();
}

const PAGES: [FrameKind; 2] = [FrameKind::PageData, FrameKind::PagesData];

#[test]
fn packed_pages_survive_flipped_bits_and_cuts() {
    for kind in PAGES {
        survives(kind, Mischief::FlipBit, true);
        survives(kind, Mischief::CutShort, false);
    }
}

#[test]
fn packed_pages_that_are_too_short_or_too_long_are_found_without_a_checksum() {
    for kind in PAGES {
        survives(kind, Mischief::PackedShorter, false);
        survives(kind, Mischief::PackedLonger, false);
        survives(kind, Mischief::PackedOverlong, false);
    }
}

#[test]
fn blocks_that_are_none_are_found_without_a_checksum() {
    for kind in PAGES {
        survives(kind, Mischief::PackedNonsense, false);
    }
}

#[test]
fn packed_pages_survive_repetition_another_order_and_silence() {
    for mischief in [Mischief::Twice, Mischief::Reordered, Mischief::Silence] {
        survives(FrameKind::PageData, mischief, false);
    }
}

#[test]
fn zeroes_that_a_vm_did_not_allow_are_not_taken_for_a_page() {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), Mischief::Zeroes, 3);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.compression = Compression::Off;
    config.prefetch = false;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 3);
    verify(words, 3);
    verify(words, 3);
    assert_eq!(proxy.mischief_done(), 3);
    running.fabric.shutdown();
}

#[test]
fn connections_that_break_lose_nothing_that_was_packed() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.compression = Compression::On;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 4);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2).map(|_| scope.spawn(|| verify(words, 4))).collect();
        while readers.iter().any(|reader| !reader.is_finished()) {
            let pages = traffic(&running, TrafficClass::Urgent).pages.get();
            donor.break_connections();
            // The next time when there was progress.
            wait_until("pages come again", || {
                traffic(&running, TrafficClass::Urgent).pages.get() > pages + 50
                    || readers.iter().all(|reader| reader.is_finished())
            });
        }
    });
    verify(words, 4);
    running.fabric.shutdown();
}

#[test]
fn on_loopback_hardly_a_page_is_compressed_by_itself() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 5);
    touch(words, 5, 60_000);
    for class in CLASSES {
        let traffic = traffic(&running, class);
        let (compressed, pages) = (traffic.pages_compressed.get(), traffic.pages.get());
        println!("{class:?}: {compressed} of {pages} pages compressed");
        assert!(!traffic.is_compressing(), "{class:?}");
    }
    let urgent = traffic(&running, TrafficClass::Urgent);
    let compressed = urgent.pages_compressed.get();
    assert!(compressed > 0, "it was never tried");
    assert!(
        compressed * 30 < urgent.pages.get(),
        "{compressed} compressed"
    );
    verify(words, 5);
    running.fabric.shutdown();
}

/// What the slow link carries, Mbit/s.
const SLOW_MBIT: f64 = 50.0;

/// Pages a second over a slow link: written all over, touched at random by several threads, and
/// read in order. There is time before to find out what pays, but for the last.
fn pages_a_second(compression: Compression) -> Vec<(f64, bool)> {
    let donor = donor(SMALL_GUEST);
    let link = throttled(donor.address(), SLOW_MBIT);
    let mut config = config(SMALL_GUEST, LOCAL, &[link]);
    config.compression = compression;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    let [urgent, bulk, prefetch] = CLASSES.map(|class| traffic(&running, class));
    let rate = |traffic: &Traffic, work: &dyn Fn()| {
        let (before, started) = (traffic.pages.get(), Instant::now());
        work();
        (traffic.pages.get() - before) as f64 / started.elapsed().as_secs_f64()
    };
    let touch_all = |seed: u64, touches| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || touch(words, seed, touches));
            }
        });
    };
    fill(words, 6);
    let written = rate(&bulk, &|| fill(words, 7));
    touch_all(7, 400);
    let touched = rate(&urgent, &|| touch_all(7, 800));
    let scanned = rate(&prefetch, &|| verify(words, 7));
    let rates = [written, touched, scanned];
    let compressing = [&bulk, &urgent, &prefetch].map(|traffic| traffic.is_compressing());
    println!("{compression:?}: pages/s written, touched, scanned: {rates:.0?} {compressing:?}");
    if compression == Compression::On {
        for traffic in [urgent, bulk, prefetch] {
            assert!(traffic.wire_bytes.get() * 4 < traffic.plain_bytes() * 3);
        }
    }
    running.fabric.shutdown();
    rates.into_iter().zip(compressing).collect()
}

#[test]
fn on_a_slow_link_pages_are_compressed_by_themselves_and_it_pays() {
    let off = pages_a_second(Compression::Off);
    let on = pages_a_second(Compression::On);
    let auto = pages_a_second(Compression::Auto);
    for (what, place) in [("written", 0), ("touched", 1), ("scanned", 2)] {
        let ((off, _), (on, _), (auto, compressing)) = (off[place], on[place], auto[place]);
        // Of what the link could carry.
        let part = off * (PAGE_SIZE + HEADER_BYTES) as f64 * 8.0 / (SLOW_MBIT * 1e6);
        if part < 0.3 {
            // Others keep the processors busy: then there is nothing that compressing could save.
            println!("{what}: the link carried {part:.2} of what it could, so nothing is compared");
            continue;
        }
        assert!(compressing, "{what}: off, where the link is what limits");
        assert!(on > off * 1.2, "{what}: {on} on, {off} off");
        assert!(auto > off * 1.1, "{what}: {auto} auto, {off} off");
    }
}
