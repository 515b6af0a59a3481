//! Memory that two threads rewrite completely, and in which every lost write is detected.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::stats::Histogram;
use ssi_hv::size::ByteSize;

use super::bed::Bed;
use super::fault::Tally;
use super::random::next;
use super::view::{View, WORDS_PER_PAGE, content, differing_bytes};

/// Number of writing threads: the smallest machine has that many CPUs.
pub(super) const THREADS: usize = 2;

/// A bed and the contents of its pages: each thread owns every [`THREADS`]th page, and counts its
/// writes to each.
#[derive(Debug)]
pub(super) struct WorkingSet {
    pub(super) bed: Bed,
    generations: [Vec<u32>; THREADS],
}

impl WorkingSet {
    /// Fills memory of which `local` may be resident at once, or all of it without donors.
    pub(super) fn start(memory: ByteSize, local: ByteSize, donors: u32) -> Result<Self> {
        let bed = Bed::start(memory, local, donors, None)?;
        bed.view.fill();
        let generations = std::array::from_fn(|_| vec![0; bed.view.pages.div_ceil(THREADS)]);
        Ok(Self { bed, generations })
    }

    /// Compares and rewrites random pages for this time; returns the rate in pages per second.
    /// Records the duration of each in `times`.
    pub(super) fn write(
        &mut self,
        round: u32,
        time: Duration,
        times: &Histogram,
        tally: &Tally,
    ) -> f64 {
        let view = &self.bed.view;
        let started = Instant::now();
        let written: u64 = std::thread::scope(|scope| {
            let writers: Vec<_> = (1..)
                .zip(&mut self.generations)
                .map(|(number, generations)| {
                    scope.spawn(move || {
                        let mut random = u64::from(round) * 1000 + number;
                        let (mut written, mut corrupt) = (0, 0);
                        loop {
                            let before = Instant::now();
                            if before - started >= time {
                                break;
                            }
                            let mine = next(&mut random) % generations.len();
                            let page = mine * THREADS + usize::try_from(number - 1).unwrap_or(0);
                            if page >= view.pages {
                                continue;
                            }
                            corrupt += rewrite(view, page, generations[mine]);
                            times.record(before.elapsed());
                            generations[mine] += 1;
                            written += 1;
                        }
                        tally.corrupt.fetch_add(corrupt, Ordering::Relaxed);
                        written
                    })
                })
                .collect();
            writers
                .into_iter()
                .map(|writer| writer.join().expect("a writer does not panic"))
                .sum()
        });
        let time = started.elapsed();
        let bytes = written * PAGE_SIZE as u64;
        tally.verified.fetch_add(bytes, Ordering::Relaxed);
        // Counts of pages stay far below 2^52; a round always has some.
        #[allow(clippy::cast_precision_loss)]
        let written = written.max(1) as f64;
        written / time.as_secs_f64()
    }

    /// Compares every page with its last write.
    pub(super) fn verify(&self, tally: &Tally) {
        let view = &self.bed.view;
        for page in 0..view.pages {
            let generation = self.generations[page % THREADS][page / THREADS];
            let corrupt = (0..WORDS_PER_PAGE).map(|word| {
                let found = view.word(page, word).load(Ordering::Relaxed);
                differing_bytes(found, written(page, word, generation))
            });
            tally.corrupt.fetch_add(corrupt.sum(), Ordering::Relaxed);
        }
        let bytes = (view.pages * PAGE_SIZE) as u64;
        tally.verified.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Compares a page with its generation and writes the next; returns the number of wrong bytes.
fn rewrite(view: &View, page: usize, generation: u32) -> u64 {
    let words = (0..WORDS_PER_PAGE).map(|word| {
        let place = view.word(page, word);
        let found = place.load(Ordering::Relaxed);
        place.store(written(page, word, generation + 1), Ordering::Relaxed);
        differing_bytes(found, written(page, word, generation))
    });
    words.sum()
}

/// Returns the contents of a word in this generation of its page.
fn written(page: usize, word: usize, generation: u32) -> u64 {
    content(page, word) ^ (u64::from(generation) << 32 | u64::from(generation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_lost_its_last_write_is_noticed() {
        assert_eq!(written(7, 3, 0), content(7, 3));
        assert!(differing_bytes(written(7, 3, 1), written(7, 3, 2)) > 0);
        assert_eq!(differing_bytes(0x1122, 0x1133), 1);
    }
}
