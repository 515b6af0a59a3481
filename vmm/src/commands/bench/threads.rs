//! How faults scale with threads and donors, and their cost in CPU time.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use fabric_transport::stream::Carrier;
use memory_fabric::page::PAGE_SIZE;
use serde::Serialize;
use ssi_hv::progress::Progress;
use ssi_hv::size::ByteSize;

use super::bed::Bed;
use super::fault::{FAULT_MIN, Tally};
use super::floor::Bare;
use super::random::next;
use super::view::View;
use super::{ROUNDS, median, usage};

const THREADS: [u32; 4] = [1, 2, 4, 8];
const DONORS: [u32; 3] = [1, 2, 4];
/// Duration of each combination in each round.
const TIME: Duration = Duration::from_millis(250);

/// One combination of threads and donors.
#[derive(Debug, Serialize)]
pub(super) struct Scaled {
    pub(super) threads: u32,
    pub(super) donors: u32,
    pub(super) faults_per_second: f64,
    /// Median over the rounds of the rate divided by that of one thread and one donor.
    pub(super) ratio_to_one: f64,
    /// The rate of the floor with as many threads and donors: a pager that does only what none can
    /// avoid.
    pub(super) floor_faults_per_second: f64,
    /// Median over the rounds of the floor's rate divided by that of its own for one thread and one
    /// donor.
    pub(super) floor_ratio_to_one: f64,
    /// Median over the rounds of the rate divided by that of the floor.
    pub(super) ratio_to_floor: f64,
    /// CPU time of the whole process: threads, pager and donors, including the kernel's work for
    /// them.
    pub(super) cpu_seconds_per_million_faults: f64,
}

#[derive(Debug, Default)]
struct Rates {
    faults_per_second: Vec<f64>,
    floor_per_second: Vec<f64>,
    cpu_seconds: Vec<f64>,
}

pub(super) fn measure(memory: ByteSize, local: ByteSize, tally: &Tally) -> Result<Vec<Scaled>> {
    let mut beds = Vec::new();
    for donors in DONORS {
        let bed = Bed::start(memory, local, donors, None)?;
        bed.view.fill();
        beds.push((donors, bed));
    }
    let mut rates: Vec<Rates> = Vec::new();
    rates.resize_with(DONORS.len() * THREADS.len(), Rates::default);
    let progress = Progress::rounds(ROUNDS);
    for round in 0..ROUNDS {
        let combinations = beds
            .iter()
            .flat_map(|(_, bed)| THREADS.map(|threads| (bed, threads)));
        for ((bed, threads), rates) in combinations.zip(&mut rates) {
            let (faults, time, busy) = touch(&bed.view, threads, round, tally)?;
            // Counts of faults stay far below 2^52; a round always has some.
            #[allow(clippy::cast_precision_loss)]
            let faults = faults.max(1) as f64;
            rates.faults_per_second.push(faults / time.as_secs_f64());
            rates.cpu_seconds.push(busy.as_secs_f64() * 1e6 / faults);
            rates.floor_per_second.push(floor_rate(bed, threads)?);
        }
        progress.step();
    }
    drop(progress);
    let one = rates[0].faults_per_second.clone();
    let floor_one = rates[0].floor_per_second.clone();
    let combinations = DONORS
        .into_iter()
        .flat_map(|donors| THREADS.map(|threads| (donors, threads)));
    let scaled = combinations
        .zip(rates)
        .map(|((donors, threads), rates)| Scaled {
            threads,
            donors,
            ratio_to_one: ratio(&rates.faults_per_second, &one),
            floor_ratio_to_one: ratio(&rates.floor_per_second, &floor_one),
            ratio_to_floor: ratio(&rates.faults_per_second, &rates.floor_per_second),
            faults_per_second: median(rates.faults_per_second),
            floor_faults_per_second: median(rates.floor_per_second),
            cpu_seconds_per_million_faults: median(rates.cpu_seconds),
        });
    Ok(scaled.collect())
}

/// Returns the median over the rounds of one rate divided by another.
fn ratio(rates: &[f64], of: &[f64]) -> f64 {
    median(rates.iter().zip(of).map(|(rate, of)| rate / of).collect())
}

/// Returns how many pages a second the floor has by so many threads from the donors of a bed.
fn floor_rate(bed: &Bed, threads: u32) -> Result<f64> {
    let donors: Vec<_> = bed.donors().map(|donor| (donor, &Carrier::Tcp)).collect();
    let memory = (bed.view.pages * PAGE_SIZE) as u64;
    let mut bare = Bare::new(&donors, false, memory)?;
    let touched = bare.touch_once(threads, 1, None)?;
    bare.release()?;
    // Thousands of pages.
    #[allow(clippy::cast_precision_loss)]
    let pages = touched.times.summary().count as f64;
    Ok(pages / touched.time.as_secs_f64())
}

/// Accesses random pages from all threads; returns the accesses that waited for a page, the
/// duration, and the CPU time.
fn touch(
    view: &View,
    threads: u32,
    round: u32,
    tally: &Tally,
) -> Result<(u64, Duration, Duration)> {
    let faults = tally.faults.load(Ordering::Relaxed);
    let busy = usage::processor_time()?;
    let started = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut random = u64::from(round * 1000 + thread + 1);
                while started.elapsed() < TIME {
                    let page = next(&mut random) % view.pages;
                    let before = Instant::now();
                    view.word(page, 0).load(Ordering::Relaxed);
                    if before.elapsed() >= FAULT_MIN {
                        tally.faults.fetch_add(1, Ordering::Relaxed);
                        let bytes = PAGE_SIZE as u64;
                        tally.verified.fetch_add(bytes, Ordering::Relaxed);
                        let corrupt = view.corrupt_bytes(page);
                        tally.corrupt.fetch_add(corrupt, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    Ok((
        tally.faults.load(Ordering::Relaxed) - faults,
        started.elapsed(),
        usage::processor_time()? - busy,
    ))
}
