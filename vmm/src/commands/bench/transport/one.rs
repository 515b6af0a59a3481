//! One transport: its connections, its round trips and its streams.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fabric_transport::IN_FLIGHT_MAX;
use fabric_transport::measure::{Effort, Gauge};
use memory_fabric::stats::Histogram;

use ssi_hv::progress::Steps;
use ssi_hv::report::Distribution;
use ssi_hv::size::ByteSize;

use ssi_hv_api::bench::{Bar, Connections, OfSize, Transport, Trips};

use super::super::usage::processor_time;
use super::super::{median, micros, percentiles};
use super::{Measured, SIZES};

/// Number of connections to establish.
const CONNECTIONS: usize = 8;
/// Limit of outstanding bytes in a stream: the size of a connection's buffers.
const WINDOW_BYTES: usize = 2 << 20;
/// Longest silence before the donor is considered dead.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Number of bytes compared at both ends of each piece of a stream: comparing all would take longer
/// than the transfer.
const COMPARED_BYTES: usize = 8;
/// Rows of a histogram.
const BARS: u32 = 12;

/// The limits of a transport.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time in total.
    pub(super) time: Duration,
    /// Round trips of one size.
    pub(super) round_trips: u64,
}

/// What the donor stores, for comparison.
#[derive(Debug)]
pub(super) struct Contents(Vec<u8>);

impl Contents {
    pub(super) fn new(bytes: u64) -> Self {
        let word = |word: u64| (word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        Self((0..bytes / 8).flat_map(word).collect())
    }

    /// Returns contents that differ in every bit.
    pub(super) fn inverted(&self) -> Self {
        Self(self.0.iter().map(|byte| !byte).collect())
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

/// Writes pages one at a time.
pub(super) fn write_one_by_one(
    gauge: &mut Gauge,
    limits: Limits,
    contents: &Contents,
) -> Result<Trips> {
    let times = Times::default();
    let effort = Effort {
        messages_max: limits.round_trips,
        time_max: limits.time / 2 / u32::try_from(SIZES.len())?,
        silence_max: SILENCE_MAX,
    };
    gauge
        .write_trips(
            effort,
            &mut |time| times.record(time),
            &mut |offset, page| {
                let bytes = page.len();
                page.copy_from_slice(contents.at(offset, bytes));
            },
        )
        .context("cannot write page by page")?;
    Ok(times.trips())
}

/// Durations of requests that are made one at a time.
#[derive(Debug, Default)]
struct Times {
    histogram: Histogram,
    sum: Cell<Duration>,
}

impl Times {
    fn record(&self, time: Duration) {
        self.histogram.record(time);
        self.sum.set(self.sum.get() + time);
    }

    fn trips(&self) -> Trips {
        let summary = self.histogram.summary();
        let count = u32::try_from(summary.count.max(1)).unwrap_or(u32::MAX);
        Trips {
            round_trips: summary.count,
            latency_us: percentiles(&summary),
            p95_us: micros(self.share(95)),
            mean_us: micros(self.sum.get() / count),
            // A round trip within the resolution of the clock has none.
            jitter: micros(summary.p99) / micros(summary.p50).max(1e-3),
        }
    }

    /// Returns the time that this share of the round trips, in per cent, did not exceed.
    fn share(&self, percent: u64) -> Duration {
        let counts: Vec<_> = self.histogram.counts().collect();
        let wanted = (counts.iter().map(|(_, count)| count).sum::<u64>() * percent).div_ceil(100);
        let mut so_far = 0;
        let found = counts.iter().find(|(_, count)| {
            so_far += count;
            so_far >= wanted
        });
        // Its maximum is exact, unlike the ends of its steps.
        let longest = self.histogram.summary().max;
        found.map_or(longest, |(up_to, _)| (*up_to).min(longest))
    }
}

/// Measures connections, and then one of them, within the limits.
pub(super) fn measure(
    kind: &'static str,
    connect: impl Fn() -> Result<Gauge>,
    limits: Limits,
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
    let time_max = limits.time / 2 / u32::try_from(sizes.len().max(1))?;
    let (verified, corrupt) = (Cell::new(0), Cell::new(0));
    let compare = |offset, came: &[u8]| {
        verified.set(verified.get() + came.len() as u64);
        corrupt.set(corrupt.get() + contents.differing(offset, came));
    };
    let mut page_histogram = Vec::new();
    let mut page_distribution = Vec::new();
    let mut measured = Vec::new();
    for bytes in sizes {
        let size = ByteSize::from_bytes(bytes.into());
        steps.say(&format!("{kind}: {size} at a time"));
        let times = Times::default();
        let effort = Effort {
            messages_max: limits.round_trips,
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
        let used = processor_time()?;
        let rate = gauge.stream(bytes, in_flight, effort, &mut ends)?;
        let used = processor_time()?.saturating_sub(used);
        if bytes as usize == memory_fabric::page::PAGE_SIZE {
            page_histogram = bars(&times.histogram);
            page_distribution = distribution(&times.histogram);
        }
        measured.push(OfSize {
            bytes,
            trips: times.trips(),
            in_flight,
            messages_per_second: rate.messages_per_second(),
            stream_bytes_per_second: rate.bytes_per_second(),
            cpu_us_per_page: micros(used) / pages(rate.bytes),
        });
        steps.step();
    }
    Ok(Measured {
        transport: Transport {
            kind: kind.to_owned(),
            connections: Some(connections),
            write_bytes_per_second: None,
            writes: None,
            sizes: measured,
            page_histogram,
            page_distribution,
        },
        verified_bytes: verified.get(),
        corrupt_bytes: corrupt.get(),
    })
}

/// Returns how many pages these bytes fill, at least one.
#[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
fn pages(bytes: u64) -> f64 {
    (bytes as f64 / memory_fabric::page::PAGE_SIZE as f64).max(1.0)
}

fn distribution(times: &Histogram) -> Distribution {
    let counts = times.counts().filter(|(_, count)| *count > 0);
    counts
        .map(|(up_to, count)| (micros(up_to), count))
        .collect()
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
    fn the_mean_and_the_95th_percentile_are_those_of_what_was_recorded() {
        let times = Times::default();
        for us in 1..=1000 {
            times.record(Duration::from_micros(us));
        }
        let trips = times.trips();
        assert_eq!(trips.round_trips, 1000);
        assert!((trips.mean_us - 500.5).abs() < 1e-6, "{trips:?}");
        // A step of the histogram is 1/32 of the value.
        assert!((950.0..=980.0).contains(&trips.p95_us), "{trips:?}");
        assert!((1.9..=2.1).contains(&trips.jitter), "{trips:?}");
        let none = Times::default().trips();
        assert_eq!((none.round_trips, none.p95_us, none.mean_us), (0, 0.0, 0.0));
        assert!(none.jitter.abs() < 1e-9, "{none:?}");
    }

    #[test]
    fn a_wrong_byte_is_counted() {
        let contents = Contents::new(8192);
        let mut page = contents.at(4096, 4096).to_vec();
        assert_eq!(contents.differing(4096, &page), 0);
        assert!(contents.differing(0, &page) > 3000, "another page");
        let inverted = contents.inverted();
        assert_eq!(inverted.differing(4096, &page), 4096);
        page[77] ^= 1;
        assert_eq!(contents.differing(4096, &page), 1);
    }
}
