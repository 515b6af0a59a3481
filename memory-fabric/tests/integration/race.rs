//! Many writers against the evictor: no update may be lost under any timing.

use fabric_test_support::*;
use memory_fabric::fabric::{Compression, Sealing, TransportKind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const GUEST: u64 = 64 * MIB;
const LOCAL: u64 = 16 * MIB;
const WRITERS: usize = 6;

/// Increments random words, more often in a hot set, until `increments` were made in total. Every
/// word must then hold its number of increments.
fn race(running: &Running, increments: u64, disturb: impl FnMut(u64) + Send) {
    race_without_prefetch(running, increments, disturb);
    let stats = running.fabric.stats();
    println!(
        "{} pages fetched ahead, {} used, {} late",
        stats.prefetch_issued.get(),
        stats.prefetch_used.get(),
        stats.prefetch_late.get(),
    );
    assert!(
        stats.prefetch_used.get() > increments / 2000,
        "too few pages fetched ahead"
    );
}

/// The same where pages are fetched only on demand.
fn race_without_prefetch(running: &Running, increments: u64, mut disturb: impl FnMut(u64) + Send) {
    let words = Words::of(&running.fabric);
    let pages = words.pages();
    // A third of the cache: these pages repeatedly go on probation and are rescued.
    let hot = pages / 12;
    let done = AtomicU64::new(0);
    let finished = AtomicBool::new(false);
    let mut totals = vec![0_u64; pages * WORDS_PER_PAGE];
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let done = &done;
                scope.spawn(move || {
                    let mut random = Random(writer as u64 + 1);
                    let mut added = vec![0_u32; pages * WORDS_PER_PAGE];
                    while done.load(Ordering::Relaxed) < increments {
                        let set = if random.below(3) == 0 { hot } else { pages };
                        let page = random.below(set);
                        let first = random.below(WORDS_PER_PAGE);
                        if random.below(2) == 0 {
                            // A read maps the page write-protected, so that the write faults.
                            std::hint::black_box(words.at(page, first).load(Ordering::Relaxed));
                        }
                        for step in 0..64 {
                            let word = (first + step * 7) % WORDS_PER_PAGE;
                            words.at(page, word).fetch_add(1, Ordering::Relaxed);
                            added[page * WORDS_PER_PAGE + word] += 1;
                        }
                        done.fetch_add(64, Ordering::Relaxed);
                        if random.below(256) == 0 {
                            // Some advance sequentially, so that pages are prefetched.
                            let start = random.below(pages);
                            for page in (start..pages).take(48) {
                                words.at(page, first).fetch_add(1, Ordering::Relaxed);
                                added[page * WORDS_PER_PAGE + first] += 1;
                            }
                        }
                    }
                    added
                })
            })
            .collect();
        let (done, finished) = (&done, &finished);
        scope.spawn(move || {
            while !finished.load(Ordering::Relaxed) {
                disturb(done.load(Ordering::Relaxed));
                std::thread::yield_now();
            }
        });
        for writer in writers {
            for (total, added) in totals.iter_mut().zip(writer.join().expect("writer")) {
                *total += u64::from(added);
            }
        }
        finished.store(true, Ordering::Relaxed);
    });
    for (index, &total) in totals.iter().enumerate() {
        let (page, word) = (index / WORDS_PER_PAGE, index % WORDS_PER_PAGE);
        let found = words.at(page, word).load(Ordering::Relaxed);
        assert_eq!(found, total, "page {page} word {word}");
    }
    let stats = running.fabric.stats();
    println!(
        "{} increments, {} remote faults, {} minor, {} evictions ({} clean, {} cancelled)",
        done.load(Ordering::Relaxed),
        stats.remote.summary().count,
        stats.minor.summary().count,
        stats.evictions.get(),
        stats.evictions_clean.get(),
        stats.evictions_cancelled.get(),
    );
    assert!(
        stats.evictions.get() > 10_000,
        "too few evictions for a result"
    );
    assert!(
        stats.evictions_cancelled.get() > 100,
        "too few cancelled evictions"
    );
    assert!(
        stats.remote.summary().count > increments / 400,
        "too few fetches"
    );
    // The pager kept its budget: the file has no more bytes than that.
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert!(
        resident <= LOCAL,
        "{resident} bytes resident, {LOCAL} is the budget"
    );
}

#[test]
fn ten_million_increments_over_tcp_lose_no_update() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let started = Instant::now();
    race(&running, 10_000_000, |_| {});
    println!("in {:?}", started.elapsed());
    let nodes = running.fabric.shutdown();
    let count = nodes[1].own_count.expect("the donor reported its counters");
    assert_eq!(count.pages_read, nodes[1].pages_fetched);
    assert_eq!(count.pages_written, nodes[1].pages_written_back);
}

#[test]
fn no_update_is_lost_with_pages_compressed_or_never() {
    for compression in [Compression::On, Compression::Off] {
        let donor = donor(GUEST);
        let mut config = config(GUEST, LOCAL, &[donor.address()]);
        config.compression = compression;
        let running = start(&config);
        race(&running, 2_000_000, |_| {});
        let donor = &running.fabric.stats().donors[0];
        let compressed = donor.urgent.pages_compressed.get() + donor.bulk.pages_compressed.get();
        assert_eq!(compressed > 1000, compression == Compression::On);
    }
}

#[test]
fn no_update_is_lost_without_continue_write_protected() {
    let donor = donor(GUEST);
    let config = config(GUEST, LOCAL, &[donor.address()]);
    race(&start_as_on_old_kernels(&config), 2_000_000, |_| {});
}

#[test]
fn no_update_is_lost_without_write_protection() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    // Pages that were fetched ahead and never touched are dropped without a write-back.
    config.prefetch = false;
    let running = start_without_write_protection(&config);
    race_without_prefetch(&running, 2_000_000, |_| {});
    let stats = running.fabric.stats();
    assert!(stats.evictions.get() > 1000, "too few evictions");
    assert_eq!(stats.evictions_clean.get(), 0);
    assert_eq!(stats.write_protect.summary().count, 0);
}

#[test]
fn no_update_is_lost_over_loopback() {
    let mut config = config(GUEST, LOCAL, &[]);
    config.transport = TransportKind::Loopback;
    race(&start(&config), 4_000_000, |_| {});
}

#[test]
fn no_update_is_lost_over_three_donors_whose_connections_break() {
    let donors = [donor(24 * MIB), donor(24 * MIB), donor(24 * MIB)];
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    let mut config = config(GUEST, LOCAL, &addresses);
    config.checksum = true;
    config.compression = Compression::On;
    let running = start(&config);
    let mut broken = 0;
    race(&running, 4_000_000, |done| {
        // Forty times, evenly over the run.
        let due = done / 100_000;
        if due > broken {
            broken = due;
            donors[usize::try_from(due).expect("small") % 3].break_connections();
        }
    });
}

/// Pages are evicted, touched while they are written back, and fetched ahead, while connections
/// break: each must open with what was written back last.
fn no_update_is_lost_sealed(transport: TransportKind, increments: u64) {
    let donors = [donor(48 * MIB), donor(48 * MIB)];
    let addresses: Vec<_> = donors.iter().map(|donor| donor.address()).collect();
    let mut config = config(GUEST, LOCAL, &addresses);
    config.transport = transport;
    config.seal = Sealing::On;
    let running = start(&config);
    let mut broken = 0;
    race(&running, increments, |done| {
        let due = done / 100_000;
        if due > broken {
            broken = due;
            donors[usize::from(due.is_multiple_of(2))].break_connections();
        }
    });
    let sealing = &running.fabric.stats().sealing;
    assert_eq!(sealing.rejected.get(), 0);
    assert!(sealing.sealed.get() > 10_000 && sealing.opened.get() > 10_000);
    running.fabric.shutdown();
}

#[test]
fn no_update_is_lost_with_sealed_pages_over_tcp() {
    no_update_is_lost_sealed(TransportKind::Tcp, 4_000_000);
}

#[test]
fn no_update_is_lost_with_sealed_pages_over_udp() {
    no_update_is_lost_sealed(TransportKind::Udp, 2_000_000);
}
