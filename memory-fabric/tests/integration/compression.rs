//! Pages that travel compressed: every byte is right, and hostile peers gain nothing.

use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::traffic::{CLASSES, touch, traffic};
use fabric_test_support::*;
use fabric_wire::{FrameKind, TrafficClass};
use memory_fabric::fabric::Compression;

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;

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
                    // Three of four pages are compressible.
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

/// Compressed memory survives a network that injects `mischief` into packed pages.
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
            // Breaks the connections again only after progress.
            wait_until("pages come again", || {
                traffic(&running, TrafficClass::Urgent).pages.get() > pages + 50
                    || readers.iter().all(|reader| reader.is_finished())
            });
        }
    });
    verify(words, 4);
    running.fabric.shutdown();
}
