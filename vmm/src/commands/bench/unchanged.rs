//! Writes that change nothing, and what the fingerprints of pages cost and save.

use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context as _, Result};
use fabric_pages::fingerprint::FingerprintKey;
use memory_fabric::page::{PAGE_SIZE, PageBytes};
use serde::Serialize;
use ssi_hv::progress::Progress;
use ssi_hv::size::ByteSize;

use super::bed::Bed;
use super::fault::Tally;
use super::random::next;
use super::view::{WORDS_PER_PAGE, content, differing_bytes};
use super::{ROUNDS, median};

/// Fingerprints of one round: of 64 MiB.
const FINGERPRINTS: usize = 16_384;
/// Fingerprints that are timed together: less than a time slice, so that another thread delays few of
/// these batches.
const BATCH: usize = 64;

/// The results.
#[derive(Debug, Serialize)]
pub(super) struct Unchanged {
    /// Time of the fingerprint of a page in the first-level cache, as one that was just received: median
    /// over the rounds of the fastest batch.
    pub(super) fingerprint_ns: f64,
    /// The same for pages of 64 MiB in turn, which are in no cache.
    pub(super) fingerprint_uncached_ns: f64,
    /// Each visit writes the value that the page has.
    pub(super) same: Visits,
    /// Each visit changes the page.
    pub(super) other: Visits,
    /// Median over the rounds of the rate of the former divided by that of the latter.
    pub(super) speedup: f64,
    /// Write-backs of the former that were omitted, in bytes.
    pub(super) saved_bytes: u64,
}

/// Visits to random pages, each of which compares every byte.
#[derive(Debug, Default, Serialize)]
pub(super) struct Visits {
    pub(super) pages_per_second: f64,
    pub(super) pages_fetched: u64,
    pub(super) evictions: u64,
    /// Evictions of pages that counted as dirty and were equal to their home's copy.
    pub(super) evictions_unchanged: u64,
    pub(super) pages_written_back: u64,
}

pub(super) fn measure(memory: ByteSize, local: ByteSize, tally: &Tally) -> Result<Unchanged> {
    let key = FingerprintKey::random().context("no random numbers for fingerprints")?;
    let pages: Vec<PageBytes> = (0..FINGERPRINTS)
        .map(|page| std::array::from_fn(|byte| (page ^ byte).to_le_bytes()[0]))
        .collect();
    let mut same = Set::start(memory, local, false)?;
    let mut other = Set::start(memory, local, true)?;
    let (mut cached, mut uncached, mut speedups) = (Vec::new(), Vec::new(), Vec::new());
    let progress = Progress::rounds(ROUNDS);
    for _ in 0..ROUNDS {
        // The same page again and again, and all pages once.
        let one = vec![vec![&pages[0]; BATCH]; FINGERPRINTS / BATCH];
        cached.push(fingerprint_ns(&key, &one));
        let all: Vec<_> = pages
            .chunks(BATCH)
            .map(|batch| batch.iter().collect())
            .collect();
        uncached.push(fingerprint_ns(&key, &all));
        let rate = same.visit(tally);
        speedups.push(rate / other.visit(tally));
        progress.step();
    }
    drop(progress);
    // Before the comparison, which reads in order what was written: up to 4,096 of its pages are
    // mapped writable in advance, and leave unchanged.
    let visits = (same.visits(), other.visits());
    same.verify(tally);
    other.verify(tally);
    let (same, other) = visits;
    Ok(Unchanged {
        fingerprint_ns: median(cached),
        fingerprint_uncached_ns: median(uncached),
        speedup: median(speedups),
        saved_bytes: same.evictions_unchanged * PAGE_SIZE as u64,
        same,
        other,
    })
}

/// Adds the results to a table.
pub(super) fn write_table(text: &mut String, result: &Unchanged) -> std::fmt::Result {
    writeln!(
        text,
        "\n{:<22}{:>9}{:>10}{:>10}{:>12}{:>13}",
        "writes of", "pages/s", "fetched", "evicted", "unchanged", "written back"
    )?;
    for (name, visits) in [
        ("the same value", &result.same),
        ("another value", &result.other),
    ] {
        writeln!(
            text,
            "{name:<22}{:>9.0}{:>10}{:>10}{:>12}{:>13}",
            visits.pages_per_second,
            visits.pages_fetched,
            visits.evictions,
            visits.evictions_unchanged,
            visits.pages_written_back
        )?;
    }
    writeln!(
        text,
        "{:.2} times as fast; {} MiB were not written back; a fingerprint takes {:.0} ns, \
         {:.0} ns from no cache",
        result.speedup,
        result.saved_bytes >> 20,
        result.fingerprint_ns,
        result.fingerprint_uncached_ns
    )
}

/// Returns the time of a fingerprint: the mean of the fastest batch.
fn fingerprint_ns(key: &FingerprintKey, batches: &[Vec<&PageBytes>]) -> f64 {
    let times = batches.iter().map(|batch| {
        let started = Instant::now();
        for page in batch {
            black_box(key.of(black_box(page)));
        }
        #[allow(clippy::cast_precision_loss, reason = "a few pages")]
        let pages = batch.len().max(1) as f64;
        started.elapsed().as_secs_f64() * 1e9 / pages
    });
    times.fold(f64::INFINITY, f64::min)
}

/// A bed, and how often each of its pages was changed.
struct Set {
    bed: Bed,
    /// Whether a visit changes the page.
    changes: bool,
    changed: Vec<u32>,
    random: u64,
    rates: Vec<f64>,
    /// Counters before the first measured visit.
    before: Visits,
}

impl Set {
    /// Fills memory and reads all of it, after which all pages that left are known at home.
    fn start(memory: ByteSize, local: ByteSize, changes: bool) -> Result<Self> {
        let bed = Bed::start(memory, local, 1, None)?;
        bed.view.fill();
        let mut set = Self {
            changed: vec![0; bed.view.pages],
            bed,
            changes,
            random: 1,
            rates: Vec::new(),
            before: Visits::default(),
        };
        set.verify(&Tally::default());
        set.before = set.counters();
        Ok(set)
    }

    /// Writes to as many random pages as there are, and compares them; returns the rate in pages
    /// per second.
    fn visit(&mut self, tally: &Tally) -> f64 {
        let view = &self.bed.view;
        // The compiler must not know that nothing changes: it would omit the write.
        let change = black_box(u64::from(self.changes));
        let mut corrupt = 0;
        let started = Instant::now();
        for _ in 0..view.pages {
            let page = next(&mut self.random) % view.pages;
            // The access that faults is a write.
            view.word(page, 0).fetch_add(change, Ordering::Relaxed);
            self.changed[page] += u32::from(self.changes);
            corrupt += self.corrupt_bytes(page);
        }
        let time = started.elapsed();
        tally.corrupt.fetch_add(corrupt, Ordering::Relaxed);
        let bytes = (view.pages * PAGE_SIZE) as u64;
        tally.verified.fetch_add(bytes, Ordering::Relaxed);
        #[allow(clippy::cast_precision_loss, reason = "far below 2^52 pages")]
        let rate = view.pages as f64 / time.as_secs_f64();
        self.rates.push(rate);
        rate
    }

    /// Returns the number of bytes of a page that differ from its last write.
    fn corrupt_bytes(&self, page: usize) -> u64 {
        let words = (0..WORDS_PER_PAGE).map(|word| {
            let found = self.bed.view.word(page, word).load(Ordering::Relaxed);
            let changed = if word == 0 { self.changed[page] } else { 0 };
            let wanted = content(page, word).wrapping_add(changed.into());
            differing_bytes(found, wanted)
        });
        words.sum()
    }

    /// Compares every page with its last write, in order.
    fn verify(&self, tally: &Tally) {
        let pages = self.bed.view.pages;
        let corrupt: u64 = (0..pages).map(|page| self.corrupt_bytes(page)).sum();
        tally.corrupt.fetch_add(corrupt, Ordering::Relaxed);
        let bytes = (pages * PAGE_SIZE) as u64;
        tally.verified.fetch_add(bytes, Ordering::Relaxed);
    }

    fn counters(&self) -> Visits {
        let stats = self.bed.stats();
        let donors = stats.donors.iter();
        Visits {
            pages_per_second: 0.0,
            pages_fetched: self.bed.pages_fetched(),
            evictions: stats.evictions.get(),
            evictions_unchanged: stats.evictions_unchanged.get(),
            pages_written_back: donors.map(|donor| donor.pages_written_back.get()).sum(),
        }
    }

    /// Returns the median rate, and what happened since the start.
    fn visits(&self) -> Visits {
        let (before, now) = (&self.before, self.counters());
        Visits {
            pages_fetched: now.pages_fetched - before.pages_fetched,
            evictions: now.evictions - before.evictions,
            evictions_unchanged: now.evictions_unchanged - before.evictions_unchanged,
            pages_written_back: now.pages_written_back - before.pages_written_back,
            pages_per_second: median(self.rates.clone()),
        }
    }
}
