//! Links that are measured at the start and at run time, and the resulting choices.

use fabric_test_support::delay::delayed;
use fabric_test_support::*;
use memory_fabric::fabric::{Compression, PathKind, Tier, TransportKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time of a page on a link that is certainly slow. Half of it is far above what threads on a busy
/// machine take to be scheduled, so that a link without this delay is never found to be that slow.
const SLOW: Duration = Duration::from_millis(50);

#[test]
fn a_link_is_measured_and_followed_when_it_gets_slow_and_fast_again() {
    let donor = donor(64 * MIB);
    let delay = Arc::new(AtomicU64::new(0));
    let address = delayed(donor.address(), Arc::clone(&delay));
    let mut config = config(48 * MIB, 16 * MIB, &[address]);
    config.transport = TransportKind::Auto;
    config.compression = Compression::Off;
    config.prefetch = false;
    let running = start(&config);
    let view = running.fabric.view().clone();
    let path = || view.paths()[0].clone().expect("a link");
    assert_eq!(running.fabric.path(), PathKind::Tcp);
    assert_eq!(running.fabric.bulk_path(), PathKind::Tcp);
    let measured = path().tcp.expect("measured at the start");
    assert_eq!(path().rdma, None, "this donor has none");
    assert_eq!(running.fabric.round_trip(), Some(measured.page));
    assert_eq!(
        running.fabric.tier(),
        Some(Tier::of(PathKind::Tcp, measured.page))
    );
    // What the prefetcher and compression use at the start, by numbers that differ between tiers.
    let used = || {
        (
            path().policy().window_pages,
            path().policy().compression_first_pages,
        )
    };
    let of = |tier| match tier {
        Tier::Rdma => (64, 1024),
        Tier::FastTcp => (128, 256),
        Tier::Slow => (256, 64),
    };
    assert_eq!(used(), of(path().tier()));

    let words = Words::of(&running.fabric);
    fill(words, 7);
    delay.store(
        u64::try_from(SLOW.as_micros()).expect("short"),
        Ordering::SeqCst,
    );
    // Continuous accesses, so that real fetches provide the samples.
    let mut random = Random(3);
    let touch_until = |what: &str, random: &mut Random, done: &dyn Fn() -> bool| {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !done() {
            assert!(std::time::Instant::now() < deadline, "{what}");
            for _ in 0..16 {
                verify_page(words, 7, random.below(words.pages()));
            }
        }
    };
    touch_until("it is not found to be slow", &mut random, &|| {
        path().tier() == Tier::Slow && path().latency_estimate() >= SLOW
    });
    assert_eq!(used(), of(Tier::Slow));
    let changes = path().tier_changes.get();

    // No accesses, so that probes must detect it.
    delay.store(0, Ordering::SeqCst);
    let fetched = view.nodes()[1].pages_fetched;
    wait_until("an idle link is not measured again", || {
        path().latency_estimate() < SLOW / 2
    });
    // The last page may be counted shortly after it became accessible.
    let more = view.nodes()[1].pages_fetched - fetched;
    assert!(more <= 1, "{more} probes were counted as pages");
    assert!(path().tier_changes.get() >= changes);
    verify(words, 7);
    let nodes = running.fabric.shutdown();
    let own = nodes[1].own_count.expect("the donor reported its counters");
    assert_eq!(own.pages_read, nodes[1].pages_fetched, "nor at the donor");
}

#[test]
fn a_way_that_takes_longer_than_measuring_may_is_measured() {
    let delay = Duration::from_millis(210);
    let donor = donor(32 * MIB);
    let micros = u64::try_from(delay.as_micros()).expect("short");
    let address = delayed(donor.address(), Arc::new(AtomicU64::new(micros)));
    let mut config = config(24 * MIB, 16 * MIB, &[address]);
    config.transport = TransportKind::Tcp;
    let running = start(&config);
    let path = running.fabric.view().paths()[0].clone().expect("a link");
    let measured = path.tcp.expect("measured at the start");
    assert!(
        measured.small >= delay && measured.page >= delay,
        "{measured:?}"
    );
    running.fabric.shutdown();
}

#[test]
fn leases_are_renewed_while_the_way_to_another_donor_is_measured() {
    let far = donor(32 * MIB);
    // Its two silences, and three round trips of each size, take twice as long as the other donor's
    // lease lasts.
    let way = delayed(far.address(), Arc::new(AtomicU64::new(400_000)));
    let near = donor_for(32 * MIB, Duration::from_secs(2));
    let mut config = config(48 * MIB, 16 * MIB, &[way, near.address()]);
    config.transport = TransportKind::Tcp;
    let running = start(&config);
    let paths = running.fabric.view().paths();
    let measured = |donor: usize| paths[donor].clone().expect("a link").tcp;
    let (far, near) = (
        measured(0).expect("measured"),
        measured(1).expect("measured"),
    );
    assert!(far.page > near.page, "{far:?}, {near:?}");
    running.fabric.shutdown();
}

#[test]
fn a_link_that_cannot_be_measured_still_carries_pages() {
    let donor = donor(64 * MIB);
    // Every measuring connection is closed.
    let proxy = fabric_test_support::delay::without_probes(donor.address());
    let mut config = config(32 * MIB, 16 * MIB, &[proxy]);
    config.transport = TransportKind::Auto;
    let running = start(&config);
    let view = running.fabric.view().clone();
    let path = view.paths()[0].clone().expect("a link");
    assert_eq!((path.tcp, path.rdma), (None, None));
    // The round trip of the lease renewal is used instead.
    let link = view.links()[0].clone().expect("a link").round_trip_min();
    assert!(path.latency_estimate() >= link, "{link:?}");
    let words = Words::of(&running.fabric);
    fill(words, 9);
    verify(words, 9);
    running.fabric.shutdown();
}
