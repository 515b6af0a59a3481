//! Measures faults of one kind each: a program cannot see the kind of a fault, but it can choose
//! pages for which only one kind is possible.
//!
//! All pages are written in order. At most `local` bytes of the guest's memory are local, so all
//! pages except the last ones have been evicted by then. Half of those are visited once each in
//! random order: nothing could predict these visits, so each fetches its page. Those of the other
//! half are visited at a fixed stride, with pauses in which the pager has time to prefetch: after
//! the first ones, each visit finds its page local. Most find it mapped, along with an earlier one;
//! the others are minor faults, each of which costs the program what every fault costs besides the
//! fetch. They are slower than visits without a fault and faster than those that fetch, so whoever
//! knows the number of each kind finds their median in the order of all visits.
//!
//! Before each phase, and at the end, a line of standard input is awaited, so that the pager's
//! counters can be read. The end of the input counts as a line.

use std::io::BufRead;
use std::time::Duration;

use serde::Serialize;

use crate::Args;
use crate::clock::Clock;
use crate::cpu::now_ticks;
use crate::memory::{Memory, PAGE_BYTES_U64};
use crate::probe::Run;
use crate::report::{Latency, latency_of, to_ns};

/// Visits of a phase: the median of as many moves by a few percent.
const VISITS_MAX: usize = 3000;
/// Distance between visits that are meant to find their page local. With adjacent pages there would
/// be fewer faults.
const STRIDE: usize = 3;
/// Pause before each of these visits, in which the next page arrives.
const PAUSE: Duration = Duration::from_millis(4);

/// Visits for which one is in [`Phase::slowest_first_us`].
const SAMPLED: usize = 10;

/// The visits of one phase.
#[derive(Debug, Serialize)]
pub struct Phase {
    visits: usize,
    latency_us: Latency,
    /// The latencies of the slowest visit and of each tenth one after it, in whole microseconds.
    slowest_first_us: Vec<u64>,
}

/// The printed object.
#[derive(Debug, Serialize)]
pub struct Kinds {
    pages: usize,
    verified_bytes: u64,
    corrupt_bytes: u64,
    /// Visits of pages that were remote.
    remote: Phase,
    /// Visits of pages that were fetched ahead.
    ahead: Phase,
}

impl Kinds {
    /// Returns whether every byte was right.
    pub fn is_sound(&self) -> bool {
        self.corrupt_bytes == 0
    }

    /// Returns the object as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|e| format!("{{\"error\":\"{e}\"}}"))
    }
}

/// Runs both phases on memory of which at most `local` bytes stay with the guest.
///
/// # Errors
/// Fails when no page is sure to be evicted.
pub fn run(
    memory: &mut Memory,
    args: &Args,
    local: u64,
    input: &mut impl BufRead,
) -> Result<Kinds, String> {
    let local = usize::try_from(local / PAGE_BYTES_U64).unwrap_or(usize::MAX);
    let left = memory.pages().saturating_sub(local);
    if left < 2 * STRIDE {
        return Err(format!(
            "{} pages, of which {local} may be local: too few are sure to be remote; use a larger --bytes",
            memory.pages()
        ));
    }
    let clock = Clock::start();
    let mut run = Run::new(memory.pages(), args.seed);
    run.fill(memory);
    let mut far: Vec<usize> = (0..left / 2).collect();
    crate::probe::shuffle(&mut far, args.seed);
    far.truncate(VISITS_MAX);
    let near: Vec<usize> = (left / 2..left).step_by(STRIDE).take(VISITS_MAX).collect();

    wait(input, "filled");
    let remote = visit_all(&mut run, memory, &far, Duration::ZERO);
    wait(input, "remote pages visited");
    let ahead = visit_all(&mut run, memory, &near, PAUSE);
    wait(input, "fetched pages visited");
    let rate = clock.ns_per_tick();
    Ok(Kinds {
        pages: memory.pages(),
        verified_bytes: run.outcome.verified_bytes,
        corrupt_bytes: run.outcome.corrupt_bytes,
        remote: Phase::of(remote, rate),
        ahead: Phase::of(ahead, rate),
    })
}

impl Phase {
    fn of(mut ticks: Vec<u64>, ns_per_tick: f64) -> Self {
        let latency_us = latency_of(&ticks, ns_per_tick);
        ticks.sort_unstable_by(|a, b| b.cmp(a));
        let sampled = ticks.iter().step_by(SAMPLED);
        Self {
            visits: ticks.len(),
            latency_us,
            slowest_first_us: sampled
                .map(|&ticks| to_ns(ticks, ns_per_tick) / 1000)
                .collect(),
        }
    }
}

/// Reads and compares each page, and returns how long each first access took.
fn visit_all(run: &mut Run, memory: &Memory, pages: &[usize], pause: Duration) -> Vec<u64> {
    let mut ticks = Vec::with_capacity(pages.len());
    for &page in pages {
        if !pause.is_zero() {
            // Paces the accesses, so that the pager can prefetch meanwhile. The guest is not
            // notified of that, and a page that has not arrived in time is counted as a remote one.
            std::thread::sleep(pause);
        }
        let start = now_ticks();
        memory.touch_read(page);
        let end = now_ticks();
        ticks.push(end.saturating_sub(start));
        run.compare_written(memory, page);
    }
    ticks
}

/// Prints the position of the probe and waits for a line.
pub(crate) fn wait(input: &mut impl BufRead, place: &str) {
    println!("FAULTPROBE-AT {place}");
    let mut line = String::new();
    if let Err(error) = input.read_line(&mut line) {
        eprintln!("faultprobe: standard input: {error}");
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn args() -> Args {
        Args::try_parse_from(["faultprobe", "--bytes", "1M"]).unwrap()
    }

    #[test]
    fn pages_that_may_be_local_are_not_visited_and_others_are_once() {
        let mut memory = Memory::new(1 << 20).unwrap();
        let kinds = run(&mut memory, &args(), 512 << 10, &mut "\n".as_bytes()).unwrap();
        assert_eq!((kinds.remote.visits, kinds.ahead.visits), (64, 22));
        assert_eq!(kinds.verified_bytes, (64 + 22) * 4096);
        assert!(kinds.is_sound());
        let json: serde_json::Value = serde_json::from_str(&kinds.to_json()).unwrap();
        assert!(json["remote"]["latency_us"]["p50"].is_number());
        let slowest_first = json["ahead"]["slowest_first_us"].as_array().unwrap();
        assert_eq!(slowest_first.len(), 3, "of 22 visits");
    }

    #[test]
    fn each_tenth_visit_is_listed_from_the_slowest_on() {
        let phase = Phase::of((1..=21).collect(), 2000.0);
        assert_eq!(phase.slowest_first_us, [42, 22, 2]);
    }

    #[test]
    fn memory_that_may_all_be_local_is_refused() {
        let mut memory = Memory::new(1 << 20).unwrap();
        let error = run(&mut memory, &args(), 1 << 20, &mut "".as_bytes()).unwrap_err();
        assert!(error.contains("--bytes"), "{error}");
    }

    #[test]
    fn a_changed_page_is_found() {
        let mut memory = Memory::new(16 << 12).unwrap();
        let mut state = Run::new(16, 1);
        state.fill(&mut memory);
        memory.page_mut(3)[7] ^= 1;
        visit_all(&mut state, &memory, &[2, 3, 4], Duration::ZERO);
        assert_eq!(state.outcome.corrupt_bytes, 1);
    }
}
