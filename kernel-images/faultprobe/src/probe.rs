//! The run: fill, visit, compare.

use crate::cpu::now_ticks;
use crate::memory::{Memory, PAGE_BYTES};
use crate::pattern::{Contents, Mismatch, mismatches, mix};
use crate::{Args, Order};

/// How many corrupt bytes are printed individually.
const MISMATCHES_SHOWN_MAX: usize = 8;
/// The pages that are touched again to measure a local access.
const LOCAL_PAGES: usize = 16;
/// How many accesses to these pages are timed, spread over the run.
const LOCAL_TOUCHES: usize = 8192;

/// The results of a run; times are in ticks of the clock.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Pages in use.
    pub pages: usize,
    /// The time of the first access of each visit.
    pub touch_ticks: Vec<u64>,
    /// How many of them belong to each pass, the last one included.
    pub pass_touches: Vec<usize>,
    /// The time of accesses to pages that were touched just before.
    pub local_ticks: Vec<u64>,
    /// Bytes compared.
    pub verified_bytes: u64,
    /// Bytes that differ from what was written.
    pub corrupt_bytes: u64,
    /// Pages rewritten after the first fill.
    pub rewritten_pages: u64,
}

/// How a page is visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visit {
    /// Read and compare.
    Read,
    /// Read, compare, then write the next generation.
    ReadThenWrite,
    /// Write one word first, then compare the others, then write the next generation.
    WriteFirst,
}

impl Visit {
    /// Chooses how to visit a page: one half of the visits reads, the other half writes in two
    /// ways.
    fn choose(seed: u64, pass: u8, page: usize) -> Self {
        match mix(mix(seed ^ u64::from(pass)) ^ page as u64) % 4 {
            0 => Self::WriteFirst,
            1 => Self::ReadThenWrite,
            _ => Self::Read,
        }
    }
}

/// Fills the memory, calls `filled`, visits it as the arguments say, and finally compares what was
/// written since it was last compared.
pub fn run(memory: &mut Memory, args: &Args, filled: impl FnOnce()) -> Outcome {
    let mut run = Run::new(memory.pages(), args.seed);
    run.fill(memory);
    filled();
    if args.unbind
        && let Err(error) = memory.unbind()
    {
        eprintln!("faultprobe: cannot remove the binding: {error}; the memory stays on its node");
    }
    let mut order: Vec<usize> = (0..memory.pages()).collect();
    // An equal share of the local accesses follows every so many visits.
    let visits = memory.pages() * (usize::from(args.passes) + 1);
    let local_every = (visits * LOCAL_PAGES / LOCAL_TOUCHES).max(1);
    run.outcome.touch_ticks.reserve_exact(visits);
    let mut visited = 0;
    for pass in 0..=args.passes {
        if args.pattern == Order::Random {
            shuffle(&mut order, mix(args.seed ^ (u64::from(pass) << 32)));
        }
        let last = pass == args.passes;
        if last {
            order.retain(|&page| run.unverified[page]);
        }
        run.outcome.pass_touches.push(order.len());
        for (position, &page) in order.iter().enumerate() {
            let how = if last {
                Visit::Read
            } else {
                Visit::choose(args.seed, pass, page)
            };
            run.visit(memory, page, how);
            visited += 1;
            if visited % local_every == 0 {
                run.calibrate(
                    memory,
                    &order[position.saturating_sub(LOCAL_PAGES - 1)..=position],
                );
            }
        }
    }
    run.outcome
}

/// The expected contents of each page, and the results so far.
#[derive(Debug)]
pub struct Run {
    /// How often each page was rewritten.
    generations: Vec<u32>,
    /// Which pages were written since they were last compared.
    unverified: Vec<bool>,
    seed: u64,
    shown: usize,
    /// The results so far.
    pub outcome: Outcome,
}

impl Run {
    /// Creates the state of `pages` pages before they are filled.
    pub fn new(pages: usize, seed: u64) -> Self {
        Self {
            generations: vec![0; pages],
            unverified: vec![true; pages],
            seed,
            shown: 0,
            outcome: Outcome {
                pages,
                ..Outcome::default()
            },
        }
    }

    /// Writes every page in order.
    pub fn fill(&self, memory: &mut Memory) {
        for page in 0..memory.pages() {
            self.contents(page).fill(memory.page_mut(page));
        }
    }

    /// Compares a page with what was last written to it.
    pub fn compare_written(&mut self, memory: &Memory, page: usize) {
        let contents = self.contents(page);
        self.compare(memory.page(page), page, contents, 0);
    }

    fn contents(&self, page: usize) -> Contents {
        Contents::new(self.seed, page, self.generations[page])
    }

    fn visit(&mut self, memory: &mut Memory, page: usize, how: Visit) {
        // Computed before the clock starts, and therefore not measured.
        let old = self.contents(page);
        let new = Contents::new(self.seed, page, self.generations[page] + 1);
        let (old_first, first_word) = (old.word(0), new.word(0));
        let start = now_ticks();
        let (first, skip) = if how == Visit::WriteFirst {
            (memory.touch_write(page, first_word), 1)
        } else {
            (memory.touch_read(page), 0)
        };
        let end = now_ticks();
        self.outcome.touch_ticks.push(end.saturating_sub(start));

        self.compare(memory.page(page), page, old, skip);
        self.unverified[page] = how != Visit::Read;
        if skip == 1 {
            // What was there before it was written, and then what was written.
            let found = memory.touch_read(page);
            for (expected, found) in [(old_first, first), (first_word, found)] {
                self.note(page, mismatches(0, expected, found));
            }
        }
        if how != Visit::Read {
            self.generations[page] += 1;
            new.fill(memory.page_mut(page));
            self.outcome.rewritten_pages += 1;
        }
    }

    fn compare(&mut self, words: &[u64], page: usize, contents: Contents, skip: usize) {
        self.outcome.verified_bytes += PAGE_BYTES as u64;
        if contents.matches(words, skip) {
            return;
        }
        for (index, &found) in words.iter().enumerate().skip(skip) {
            self.note(page, mismatches(index, contents.word(index), found));
        }
    }

    fn note(&mut self, page: usize, mismatches: impl Iterator<Item = Mismatch>) {
        for Mismatch {
            offset,
            expected,
            found,
        } in mismatches
        {
            self.outcome.corrupt_bytes += 1;
            if self.shown < MISMATCHES_SHOWN_MAX {
                self.shown += 1;
                eprintln!(
                    "faultprobe: corrupt byte: page {page}, offset {offset}, expected {expected:#04x}, found {found:#04x}"
                );
            }
        }
    }

    /// Times accesses to pages that were visited just before.
    fn calibrate(&mut self, memory: &Memory, pages: &[usize]) {
        for &page in pages {
            memory.touch_read(page);
        }
        for &page in pages {
            let start = now_ticks();
            memory.touch_read(page);
            let end = now_ticks();
            self.outcome.local_ticks.push(end.saturating_sub(start));
        }
    }
}

/// Shuffles the numbers (Fisher and Yates).
pub fn shuffle(order: &mut [usize], seed: u64) {
    let mut state = seed;
    for i in (1..order.len()).rev() {
        state = mix(state);
        let bound = i as u64 + 1;
        // The remainder is below the slice's length, and so fits.
        let j = usize::try_from(state % bound).unwrap_or(0);
        order.swap(i, j);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn args(more: &[&str]) -> Args {
        let line = ["faultprobe", "--bytes", "1M"];
        Args::try_parse_from(line.iter().chain(more)).unwrap()
    }

    fn start(memory: &mut Memory) -> Run {
        let run = Run::new(memory.pages(), 1);
        run.fill(memory);
        run
    }

    #[test]
    fn sound_memory_is_found_sound_in_both_orders() {
        for pattern in ["random", "sequential"] {
            let args = args(&["--pattern", pattern, "--passes", "3"]);
            let mut memory = Memory::new(args.bytes).unwrap();
            let mut filled = false;
            let outcome = run(&mut memory, &args, || filled = true);
            assert!(filled);
            assert_eq!(outcome.corrupt_bytes, 0);
            assert_eq!(outcome.pages, 256);
            // Three passes over all pages, and a last one over those written in the third.
            let visits = outcome.touch_ticks.len();
            assert!((3 * 256 + 64..4 * 256).contains(&visits), "{visits} visits");
            assert_eq!(outcome.pass_touches.len(), 4);
            assert_eq!(outcome.pass_touches.iter().sum::<usize>(), visits);
            assert_eq!(outcome.verified_bytes, visits as u64 * 4096);
            assert!(outcome.rewritten_pages > 200 && !outcome.local_ticks.is_empty());
        }
    }

    #[test]
    fn one_flipped_byte_is_found_however_its_page_is_visited() {
        for how in [Visit::Read, Visit::ReadThenWrite, Visit::WriteFirst] {
            let mut memory = Memory::new(16 << 12).unwrap();
            let mut run = start(&mut memory);
            memory.page_mut(5)[100] ^= 0xff00;
            memory.page_mut(9)[0] ^= 0xff;
            for page in 0..16 {
                run.visit(&mut memory, page, how);
            }
            assert_eq!(run.outcome.corrupt_bytes, 2, "{how:?}");
        }
    }

    #[test]
    fn a_page_that_lost_its_last_write_is_found() {
        let mut memory = Memory::new(4 << 12).unwrap();
        let mut run = start(&mut memory);
        let stale = memory.page(2).to_vec();
        run.visit(&mut memory, 2, Visit::ReadThenWrite);
        run.visit(&mut memory, 2, Visit::Read);
        assert_eq!(run.outcome.corrupt_bytes, 0);
        memory.page_mut(2).copy_from_slice(&stale);
        run.visit(&mut memory, 2, Visit::Read);
        assert!(run.outcome.corrupt_bytes > 4000);
    }

    #[test]
    fn a_shuffle_keeps_every_page_once() {
        let mut order: Vec<usize> = (0..1000).collect();
        shuffle(&mut order, 3);
        assert!(order.iter().enumerate().filter(|(i, p)| i == *p).count() < 20);
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(i, p)| i == *p));
    }
}
