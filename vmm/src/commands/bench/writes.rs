//! A working set that is written all over, with less and less of it local.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use memory_fabric::page::PAGE_SIZE;
use serde::Serialize;
use ssi_hv::size::ByteSize;

use super::bed::Bed;
use super::fault::{Tally, View, WORDS_PER_PAGE, content, differing_bytes, next};
use super::{ROUNDS, median};

/// Threads that write: as many as the smallest machine has processors.
const THREADS: usize = 2;
/// How much of the working set is local, in percent; the first is what the others are
/// compared with.
const LOCAL_PERCENT: [u64; 4] = [100, 75, 50, 25];
/// How long each runs in each round.
const TIME: Duration = Duration::from_millis(500);

/// The working set with so much of it local.
#[derive(Debug, Serialize)]
pub(super) struct Writes {
    pub(super) local_percent: u64,
    /// Pages compared and written anew, every byte of them.
    pub(super) pages_per_second: f64,
    /// Median over the rounds of the rate with all local divided by this one.
    pub(super) slowdown: f64,
}

/// A bed and what its pages hold: each thread has every [`THREADS`]th page, and knows how often
/// it wrote it.
#[derive(Debug)]
struct WorkingSet {
    bed: Bed,
    generations: [Vec<u32>; THREADS],
}

pub(super) fn measure(memory: ByteSize, tally: &Tally) -> Result<Vec<Writes>> {
    let mut sets = Vec::new();
    for percent in LOCAL_PERCENT {
        let pages = memory.bytes() / PAGE_SIZE as u64 * percent / 100;
        let (local, donors) = if percent == 100 {
            (memory, 0)
        } else {
            (ByteSize::from_bytes(pages * PAGE_SIZE as u64), 1)
        };
        let bed = Bed::start(memory, local, donors)?;
        bed.view.fill();
        let generations = std::array::from_fn(|_| vec![0; bed.view.pages.div_ceil(THREADS)]);
        sets.push(WorkingSet { bed, generations });
    }
    let mut rates = vec![Vec::new(); sets.len()];
    for round in 0..ROUNDS {
        for (set, rates) in sets.iter_mut().zip(&mut rates) {
            rates.push(set.write(round, tally));
        }
    }
    for set in &sets {
        set.verify(tally);
    }
    let all_local = rates[0].clone();
    let results = LOCAL_PERCENT.into_iter().zip(rates);
    let results = results.map(|(local_percent, rates)| Writes {
        local_percent,
        slowdown: median(
            all_local
                .iter()
                .zip(&rates)
                .map(|(all, rate)| all / rate)
                .collect(),
        ),
        pages_per_second: median(rates),
    });
    Ok(results.collect())
}

impl WorkingSet {
    /// Compares and rewrites random pages for a while; gives the pages a second.
    fn write(&mut self, round: u32, tally: &Tally) -> f64 {
        let view = &self.bed.view;
        let started = Instant::now();
        let written: u64 = std::thread::scope(|scope| {
            let writers: Vec<_> = (1..)
                .zip(&mut self.generations)
                .map(|(number, generations)| {
                    scope.spawn(move || {
                        let mut random = u64::from(round) * 1000 + number;
                        let (mut written, mut corrupt) = (0, 0);
                        while started.elapsed() < TIME {
                            let mine = next(&mut random) % generations.len();
                            let page = mine * THREADS + usize::try_from(number - 1).unwrap_or(0);
                            if page >= view.pages {
                                continue;
                            }
                            corrupt += rewrite(view, page, generations[mine]);
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

    /// Compares every page after its last write.
    fn verify(&self, tally: &Tally) {
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

/// Compares a page with its generation and writes the next; gives the bytes that were wrong.
fn rewrite(view: &View, page: usize, generation: u32) -> u64 {
    let words = (0..WORDS_PER_PAGE).map(|word| {
        let place = view.word(page, word);
        let found = place.load(Ordering::Relaxed);
        place.store(written(page, word, generation + 1), Ordering::Relaxed);
        differing_bytes(found, written(page, word, generation))
    });
    words.sum()
}

/// What is in a word after its page was written so often.
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
