//! Compression turns itself on only where it pays. This is measured, so nothing runs in parallel.

use fabric_test_support::throttle::throttled;
use fabric_test_support::traffic::{CLASSES, touch, traffic};
use fabric_test_support::*;
use fabric_wire::{HEADER_BYTES, TrafficClass};
use memory_fabric::fabric::Compression;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::stats::Traffic;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const GUEST: u64 = 48 * MIB;
/// Size of the guest on a slow link.
const SMALL_GUEST: u64 = 32 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Held by the test that may use the CPUs.
static PROCESSORS: Mutex<()> = Mutex::new(());

/// Attempts on loopback: some trials of compression are won by chance.
const CHANCES: usize = 3;

#[test]
fn on_loopback_hardly_a_page_is_compressed_by_itself() {
    let _all = PROCESSORS.lock().unwrap_or_else(PoisonError::into_inner);
    let found: Vec<_> = (0..CHANCES)
        .map_while(|_| compressed_on_loopback())
        .collect();
    assert!(found.len() < CHANCES, "each time it was on: {found:?}");
}

/// Returns where compression was on at the end, or on for longer than a trial, if anywhere.
fn compressed_on_loopback() -> Option<String> {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 5);
    touch(words, 5, 60_000);
    let of_class = CLASSES.map(|class| {
        let traffic = traffic(&running, class);
        let (compressed, pages) = (traffic.pages_compressed.get(), traffic.pages.get());
        println!("{class:?}: {compressed} of {pages} pages compressed");
        let too_many = class == TrafficClass::Urgent && compressed * 30 >= pages;
        let on = traffic.is_compressing() || too_many;
        on.then(|| format!("{class:?}: {compressed} of {pages}"))
    });
    let urgent = traffic(&running, TrafficClass::Urgent);
    assert!(urgent.pages_compressed.get() > 0, "it was never tried");
    verify(words, 5);
    running.fabric.shutdown();
    of_class.into_iter().flatten().next()
}

/// Rate of the slow link in Mbit/s.
const SLOW_MBIT: f64 = 50.0;
/// Rounds for each setting. Disturbances only slow a round down, so the best one counts.
const ROUNDS: usize = 2;
/// How long a class has to find out that compression pays. A disturbed trial is repeated after many
/// pages.
const SETTLING_TIME_MAX: Duration = Duration::from_secs(30);

/// Results for one class of pages.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    pages_a_second: f64,
    compressing: bool,
}

impl Found {
    fn better_of(self, other: Self) -> Self {
        if other.pages_a_second > self.pages_a_second {
            other
        } else {
            self
        }
    }
}

/// Transfers pages over a slow link: writes all, reads at random by several threads, and reads
/// sequentially. Before each there is time for the trials.
fn measured(compression: Compression) -> [Found; 3] {
    let donor = donor(SMALL_GUEST);
    let link = throttled(donor.address(), SLOW_MBIT);
    let mut config = config(SMALL_GUEST, LOCAL, &[link]);
    config.compression = compression;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    let [urgent, bulk, prefetch] = CLASSES.map(|class| traffic(&running, class));
    let measure = |traffic: &Traffic, work: &dyn Fn()| {
        let deadline = Instant::now() + SETTLING_TIME_MAX;
        work();
        while compression == Compression::Auto
            && !traffic.is_compressing()
            && Instant::now() < deadline
        {
            work();
        }
        let (before, started) = (traffic.pages.get(), Instant::now());
        work();
        Found {
            pages_a_second: (traffic.pages.get() - before) as f64 / started.elapsed().as_secs_f64(),
            compressing: traffic.is_compressing(),
        }
    };
    let touch_all = || {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| touch(words, 7, 800));
            }
        });
    };
    fill(words, 6);
    let written = measure(&bulk, &|| fill(words, 7));
    let touched = measure(&urgent, &touch_all);
    let scanned = measure(&prefetch, &|| verify(words, 7));
    println!("{compression:?}: written {written:?}, touched {touched:?}, scanned {scanned:?}");
    if compression == Compression::On {
        for traffic in [urgent, bulk, prefetch] {
            assert!(traffic.wire_bytes.get() * 4 < traffic.plain_bytes() * 3);
        }
    }
    running.fabric.shutdown();
    [written, touched, scanned]
}

#[test]
fn on_a_slow_link_pages_are_compressed_by_themselves_and_it_pays() {
    let _all = PROCESSORS.lock().unwrap_or_else(PoisonError::into_inner);
    let settings = [Compression::Off, Compression::On, Compression::Auto];
    let mut best = [[Found::default(); 3]; 3];
    // In turns, so that other load of the host affects all settings.
    for _ in 0..ROUNDS {
        for (best, setting) in best.iter_mut().zip(settings) {
            for (best, found) in best.iter_mut().zip(measured(setting)) {
                *best = best.better_of(found);
            }
        }
    }
    for (what, place) in [("written", 0), ("touched", 1), ("scanned", 2)] {
        let [off, on, auto] = best.map(|of| of[place]);
        let rates = [off, on, auto].map(|found| found.pages_a_second);
        // Share of the link's capacity.
        let part = rates[0] * (PAGE_SIZE + HEADER_BYTES) as f64 * 8.0 / (SLOW_MBIT * 1e6);
        if part < 0.3 {
            // Other load keeps the CPUs busy, so compression cannot save time.
            println!("{what}: the link carried {part:.2} of what it could, so nothing is compared");
            continue;
        }
        assert!(
            auto.compressing,
            "{what}: off, where the link is what limits"
        );
        assert!(rates[1] > rates[0] * 1.2, "{what}: off, on, auto {rates:?}");
        assert!(rates[2] > rates[0] * 1.1, "{what}: off, on, auto {rates:?}");
    }
}
