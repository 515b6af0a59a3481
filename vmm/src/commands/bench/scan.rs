//! Scans: every page once, sequentially or in strides, compared with the raw stream.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::SPIN_DEFAULT;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::rdma::DeviceChoice;
use serde::Serialize;
use ssi_hv::progress::Progress;
use ssi_hv::size::ByteSize;

use super::bed::Bed;
use super::fault::Tally;
use super::placement::Placement;
use super::stream::Stream;
use super::{ROUNDS, median, scan_floor};

/// Pages between accesses of a strided scan.
const STRIDE_PAGES: usize = 4;

/// The results of scans.
#[derive(Debug, Serialize)]
pub(super) struct Scans {
    /// Pages read over one bare TCP connection, with as many requests outstanding as the transport
    /// has.
    pub(super) stream_bytes_per_second: f64,
    /// Pages that are also copied into place, mapped, read by another thread, unmapped and freed.
    pub(super) floor_bytes_per_second: f64,
    pub(super) sequential: Scan,
    pub(super) strided: Scan,
}

/// One kind of scan.
#[derive(Debug, Serialize)]
pub(super) struct Scan {
    /// Pages between accesses.
    pub(super) stride_pages: usize,
    /// Rate of pages that came from the donor.
    pub(super) bytes_per_second: f64,
    /// Median over the rounds of that rate divided by the stream's.
    pub(super) ratio_to_stream: f64,
    /// As well, divided by the floor's.
    pub(super) ratio_to_floor: f64,
}

pub(super) fn measure(memory: ByteSize, local: ByteSize, tally: &Tally) -> Result<Scans> {
    let placement = Placement::new()?;
    let bed = Bed::start(memory, local, 1, Some(&placement))?;
    bed.view.fill();
    // One scan without measurement: afterwards every evicted page is clean.
    scan(&bed, 1, tally);
    let donor = Donor::start(&DonorConfig {
        credentials: None,
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: memory.bytes(),
        lease_duration_max: Duration::from_secs(60),
        spin: SPIN_DEFAULT,
        rdma: DeviceChoice::None,
        allow: None,
    })?;
    let local_pages = usize::try_from(local.bytes())? / PAGE_SIZE;
    let (mut streams, mut floors) = (Vec::new(), Vec::new());
    let (mut sequential, mut strided) = (Vec::new(), Vec::new());
    let progress = Progress::rounds(ROUNDS);
    for _ in 0..ROUNDS {
        let mut stream = Stream::connect(donor.address(), bed.view.pages)?;
        let (raw, raw_corrupt) = stream.read()?;
        let (bare, bare_corrupt) = scan_floor::scan(&mut stream, local_pages, &placement)?;
        stream.release()?;
        let corrupt = raw_corrupt + bare_corrupt;
        tally.corrupt.fetch_add(corrupt, Ordering::Relaxed);
        tally
            .verified
            .fetch_add(2 * memory.bytes(), Ordering::Relaxed);
        streams.push(rate(bed.view.pages, raw));
        floors.push(rate(bed.view.pages, bare));
        sequential.push(scan(&bed, 1, tally));
        strided.push(scan(&bed, STRIDE_PAGES, tally));
        progress.step();
    }
    drop(progress);
    let result = |stride_pages, rates: Vec<f64>| {
        let ratio = |others: &[f64]| {
            let pairs = rates.iter().zip(others);
            median(pairs.map(|(ours, other)| ours / other).collect())
        };
        Scan {
            stride_pages,
            ratio_to_stream: ratio(&streams),
            ratio_to_floor: ratio(&floors),
            bytes_per_second: median(rates),
        }
    };
    Ok(Scans {
        sequential: result(1, sequential),
        strided: result(STRIDE_PAGES, strided),
        stream_bytes_per_second: median(streams),
        floor_bytes_per_second: median(floors),
    })
}

/// Reads every byte of every page; returns the rate of remote pages in bytes per second.
fn scan(bed: &Bed, stride: usize, tally: &Tally) -> f64 {
    let view = &bed.view;
    let fetched = bed.pages_fetched();
    let mut corrupt = 0;
    let started = Instant::now();
    for first in 0..stride {
        for page in (first..view.pages).step_by(stride) {
            corrupt += view.corrupt_bytes(page);
        }
    }
    let time = started.elapsed();
    tally.corrupt.fetch_add(corrupt, Ordering::Relaxed);
    let bytes = (view.pages * PAGE_SIZE) as u64;
    tally.verified.fetch_add(bytes, Ordering::Relaxed);
    // Wrongly prefetched pages were transferred too, but do not count.
    let fetched = usize::try_from(bed.pages_fetched() - fetched).unwrap_or(usize::MAX);
    rate(fetched.min(view.pages), time)
}

// Counts of bytes stay far below 2^52.
#[allow(clippy::cast_precision_loss)]
fn rate(pages: usize, time: Duration) -> f64 {
    (pages * PAGE_SIZE) as f64 / time.as_secs_f64()
}
