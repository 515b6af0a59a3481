//! Pages are compressed by themselves where it pays, and nowhere else: what is measured, and so nothing runs
//! beside it.

use fabric_test_support::throttle::throttled;
use fabric_test_support::traffic::{CLASSES, touch, traffic};
use fabric_test_support::*;
use memory_fabric::fabric::Compression;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::stats::Traffic;
use memory_fabric::wire::{HEADER_BYTES, TrafficClass};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const GUEST: u64 = 48 * MIB;
/// On a slow link.
const SMALL_GUEST: u64 = 32 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Held by the test that has the processors.
static PROCESSORS: Mutex<()> = Mutex::new(());

/// How often loopback is tried at the most: of all trials of compressing some are won by chance.
const CHANCES: usize = 3;

#[test]
fn on_loopback_hardly_a_page_is_compressed_by_itself() {
    let _all = PROCESSORS.lock().unwrap_or_else(PoisonError::into_inner);
    let found: Vec<_> = (0..CHANCES)
        .map_while(|_| compressed_on_loopback())
        .collect();
    assert!(found.len() < CHANCES, "each time it was on: {found:?}");
}

/// Says where compressing was on in the end, or for more than it takes to try it, if anywhere.
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

/// What the slow link carries, Mbit/s.
const SLOW_MBIT: f64 = 50.0;
/// How often each setting is measured: what disturbs makes nothing faster, so the best counts.
const ROUNDS: usize = 2;
/// How long a class is given to find out that compressing pays. A trial that was disturbed is made again after
/// many pages.
const SETTLING_TIME_MAX: Duration = Duration::from_secs(30);

/// What a class of pages came to.
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

/// Pages over a slow link: written all over, touched at random by several threads, and read in order. There
/// is time before each to find out what pays.
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
    // In turns, so that what the host does meanwhile meets all of them.
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
        // Of what the link could carry.
        let part = rates[0] * (PAGE_SIZE + HEADER_BYTES) as f64 * 8.0 / (SLOW_MBIT * 1e6);
        if part < 0.3 {
            // Others keep the processors busy: then there is nothing that compressing could save.
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
