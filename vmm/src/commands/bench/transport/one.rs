//! One transport: its connections, its round trips and its streams.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fabric_transport::IN_FLIGHT_MAX;
use fabric_transport::measure::{Effort, Gauge};
use memory_fabric::stats::Histogram;

use ssi_hv::progress::Steps;
use ssi_hv::size::ByteSize;

use super::super::{median, micros, percentiles};
use super::{Bar, Connections, Measured, OfSize, SIZES};

/// Number of connections to establish.
const CONNECTIONS: usize = 8;
/// Limit of round trips of one size: enough for the 99.9th percentile.
const ROUND_TRIPS_MAX: u64 = 10_000;
/// Limit of outstanding bytes in a stream: the size of a connection's buffers.
const WINDOW_BYTES: usize = 2 << 20;
/// Longest silence before the donor is considered dead.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Number of bytes compared at both ends of each piece of a stream: comparing all would take longer
/// than the transfer.
const COMPARED_BYTES: usize = 8;
/// Rows of a histogram.
const BARS: u32 = 12;

/// What the donor stores, for comparison.
#[derive(Debug)]
pub(super) struct Contents(Vec<u8>);

impl Contents {
    pub(super) fn new(bytes: u64) -> Self {
        let word = |word: u64| (word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        Self((0..bytes / 8).flat_map(word).collect())
    }

    fn at(&self, offset: u64, bytes: usize) -> &[u8] {
        let start = usize::try_from(offset).expect("inside the lease");
        &self.0[start..start + bytes]
    }

    /// Returns the number of bytes that differ from those written at `offset`.
    fn differing(&self, offset: u64, came: &[u8]) -> u64 {
        let written = self.at(offset, came.len());
        if written == came {
            return 0;
        }
        written
            .iter()
            .zip(came)
            .filter(|(one, other)| one != other)
            .count() as u64
    }
}

/// Writes the whole lease; returns the rate in bytes per second.
pub(super) fn fill(gauge: &mut Gauge, contents: &Contents) -> Result<f64> {
    let effort = Effort {
        messages_max: u64::MAX,
        time_max: Duration::MAX,
        silence_max: SILENCE_MAX,
    };
    let rate = gauge
        .fill(effort, &mut |offset, page| {
            let bytes = page.len();
            page.copy_from_slice(contents.at(offset, bytes));
        })
        .context("cannot write the lease")?;
    Ok(rate.bytes_per_second())
}

/// Measures connections, and then one of them, in `seconds` in total.
pub(super) fn measure(
    kind: &'static str,
    connect: impl Fn() -> Result<Gauge>,
    seconds: Duration,
    contents: &Contents,
    steps: &Steps,
) -> Result<Measured> {
    steps.say(&format!("{kind}: connects"));
    let (connections, mut gauge) = connections(connect)?;
    let sizes: Vec<u32> = SIZES
        .into_iter()
        .filter(|&size| gauge.takes(size))
        .collect();
    // Half of the time is for round trips, and half for streams.
    let time_max = seconds / 2 / u32::try_from(sizes.len().max(1))?;
    let (verified, corrupt) = (Cell::new(0), Cell::new(0));
    let compare = |offset, came: &[u8]| {
        verified.set(verified.get() + came.len() as u64);
        corrupt.set(corrupt.get() + contents.differing(offset, came));
    };
    let mut page_histogram = Vec::new();
    let mut measured = Vec::new();
    for bytes in sizes {
        let size = ByteSize::from_bytes(bytes.into());
        steps.say(&format!("{kind}: {size} at a time"));
        let times = Histogram::new();
        let effort = Effort {
            messages_max: ROUND_TRIPS_MAX,
            time_max,
            silence_max: SILENCE_MAX,
        };
        let mut whole = |offset, came: &[u8]| compare(offset, came);
        gauge.round_trips(bytes, effort, &mut |time| times.record(time), &mut whole)?;
        let mut ends = |offset: u64, came: &[u8]| {
            let ends = COMPARED_BYTES.min(came.len());
            let last = came.len() - ends;
            compare(offset, &came[..ends]);
            compare(offset + last as u64, &came[last..]);
        };
        let in_flight = (WINDOW_BYTES / bytes as usize).clamp(1, IN_FLIGHT_MAX);
        let effort = Effort {
            messages_max: u64::MAX,
            ..effort
        };
        let rate = gauge.stream(bytes, in_flight, effort, &mut ends)?;
        let summary = times.summary();
        if bytes as usize == memory_fabric::page::PAGE_SIZE {
            page_histogram = bars(&times);
        }
        measured.push(OfSize {
            bytes,
            round_trips: summary.count,
            latency_us: percentiles(&summary),
            jitter: micros(summary.p99) / micros(summary.p50),
            in_flight,
            messages_per_second: rate.messages_per_second(),
            stream_bytes_per_second: rate.bytes_per_second(),
        });
        steps.step();
    }
    Ok(Measured {
        kind,
        connections: Some(connections),
        write_bytes_per_second: None,
        sizes: measured,
        page_histogram,
        verified_bytes: verified.get(),
        corrupt_bytes: corrupt.get(),
    })
}

fn connections(connect: impl Fn() -> Result<Gauge>) -> Result<(Connections, Gauge)> {
    let mut times = Vec::new();
    let mut last = None;
    for _ in 0..CONNECTIONS {
        // The previous connection ends first: a lease has one of each class.
        drop(last.take());
        let began = Instant::now();
        let gauge = connect()?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        last = Some(gauge);
    }
    let connections = Connections {
        count: times.len(),
        first_ms: times[0],
        others_ms: median(times.split_off(1)),
    };
    Ok((connections, last.context("no connection")?))
}

/// Returns the durations in rows with geometrically growing bounds, from the minimum to the 99.9th
/// percentile; longer ones are in one more row.
fn bars(times: &Histogram) -> Vec<Bar> {
    let counts: Vec<(f64, u64)> = times
        .counts()
        .map(|(up_to, count)| (micros(up_to), count))
        .collect();
    let summary = times.summary();
    let (Some(&(least, _)), most) = (counts.first(), micros(summary.p999)) else {
        return Vec::new();
    };
    let factor = (most / least).max(1.0).powf(1.0 / f64::from(BARS - 1));
    let mut bars: Vec<Bar> = (0..BARS)
        .map(|row| Bar {
            up_to_us: least * factor.powi(i32::try_from(row).unwrap_or(0)),
            count: 0,
        })
        .collect();
    bars.dedup_by(|one, other| one.up_to_us <= other.up_to_us);
    // By rounding, the last bound may exceed the 99.9th percentile.
    let before = bars.last().map_or(most, |bar| bar.up_to_us);
    bars.push(Bar {
        up_to_us: micros(summary.max).max(before),
        count: 0,
    });
    for (up_to, count) in counts {
        // A value at a bound must not fall into the next row by rounding.
        let row = bars
            .iter()
            .position(|bar| up_to <= bar.up_to_us * 1.000_001);
        let last = bars.len() - 1;
        bars[row.unwrap_or(last)].count += count;
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_one_row_of_the_histogram() {
        let times = Histogram::new();
        for us in 1..=10_000 {
            times.record(Duration::from_micros(us));
        }
        let bars = bars(&times);
        assert_eq!(bars.len(), BARS as usize + 1);
        assert_eq!(bars.iter().map(|bar| bar.count).sum::<u64>(), 10_000);
        assert!(bars.is_sorted_by(|one, other| one.up_to_us <= other.up_to_us));
        assert!(bars.last().is_some_and(|bar| bar.count <= 300), "{bars:?}");
        assert!(super::bars(&Histogram::new()).is_empty());
        let same = Histogram::new();
        same.record(Duration::from_micros(7));
        let one = super::bars(&same);
        assert_eq!(one.iter().map(|bar| bar.count).sum::<u64>(), 1);
    }

    #[test]
    fn a_wrong_byte_is_counted() {
        let contents = Contents::new(8192);
        let mut page = contents.at(4096, 4096).to_vec();
        assert_eq!(contents.differing(4096, &page), 0);
        assert!(contents.differing(0, &page) > 3000, "another page");
        page[77] ^= 1;
        assert_eq!(contents.differing(4096, &page), 1);
    }
}
