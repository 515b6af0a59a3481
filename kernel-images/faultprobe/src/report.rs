//! The line of results.

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::clock::Clock;
use crate::probe::Outcome;
use crate::{Args, Order};

/// Least duration of a fault. A userfaultfd round trip alone costs 20 us, and the fastest networks
/// add some microseconds.
const FAULT_NS_MIN: u64 = 10_000;
/// Factor by which an access with a fault is slower than the slow end of local accesses.
const FAULT_FACTOR: u64 = 8;

/// Percentiles, in microseconds; zeroes if there was nothing to measure.
#[derive(Debug, Serialize)]
pub struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

/// The printed object.
#[derive(Debug, Serialize)]
pub struct Report {
    pages: usize,
    touches: usize,
    /// Touches that stopped the program, of whatever kind.
    faults: u64,
    /// Per pass, the last one included.
    faults_by_pass: Vec<usize>,
    verified_bytes: u64,
    corrupt_bytes: u64,
    rewritten_pages: u64,
    /// Latencies of the faults.
    latency_us: Latency,
    /// Latencies of accesses to pages touched just before.
    local_us: Latency,
    threshold_us: f64,
    pattern: &'static str,
    passes: u8,
    seed: u64,
    elapsed_s: f64,
}

/// Returns the time above which an access counts as a fault: eight times the 99th percentile of
/// local accesses, with a minimum of 10 us.
///
/// It cannot distinguish a fetch from another host from a fault that the pager resolves locally (a
/// page on probation, or fetched ahead); both stop the program. [`kinds`](crate::kinds) measures
/// them separately.
pub fn threshold_ns(local_p99_ns: u64) -> u64 {
    local_p99_ns.saturating_mul(FAULT_FACTOR).max(FAULT_NS_MIN)
}

impl Report {
    /// Summarizes a run.
    pub fn new(args: &Args, outcome: &Outcome, clock: &Clock) -> Self {
        let rate = clock.ns_per_tick();
        let local = histogram(outcome.local_ticks.iter().map(|&t| to_ns(t, rate)));
        let threshold = threshold_ns(local.value_at_quantile(0.99));
        let touches = outcome.touch_ticks.iter().map(|&t| to_ns(t, rate));
        let touches: Vec<u64> = touches.collect();
        let is_fault = |ns: &u64| *ns > threshold;
        let faults = histogram(touches.iter().copied().filter(is_fault));
        let mut rest = touches.as_slice();
        let by_pass = outcome.pass_touches.iter().map(|&count| {
            let (pass, after) = rest.split_at(count.min(rest.len()));
            rest = after;
            pass.iter().filter(|ns| is_fault(ns)).count()
        });
        let faults_by_pass = by_pass.collect();
        Self {
            pages: outcome.pages,
            touches: outcome.touch_ticks.len(),
            faults: faults.len(),
            faults_by_pass,
            verified_bytes: outcome.verified_bytes,
            corrupt_bytes: outcome.corrupt_bytes,
            rewritten_pages: outcome.rewritten_pages,
            latency_us: latency(&faults),
            local_us: latency(&local),
            threshold_us: to_us(threshold),
            pattern: match args.pattern {
                Order::Random => "random",
                Order::Sequential => "sequential",
            },
            passes: args.passes,
            seed: args.seed,
            elapsed_s: (clock.elapsed_s() * 1000.0).round() / 1000.0,
        }
    }

    /// Returns the report as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|e| format!("{{\"error\":\"{e}\"}}"))
    }
}

/// Returns the percentiles of times in ticks.
pub fn latency_of(ticks: &[u64], ns_per_tick: f64) -> Latency {
    latency(&histogram(ticks.iter().map(|&t| to_ns(t, ns_per_tick))))
}

fn histogram(values: impl Iterator<Item = u64>) -> Histogram<u64> {
    // One nanosecond to ten minutes, with three digits: bounds that the crate accepts.
    let mut histogram = match Histogram::new_with_bounds(1, 600_000_000_000, 3) {
        Ok(histogram) => histogram,
        Err(error) => unreachable!("constant bounds: {error}"),
    };
    for value in values {
        histogram.saturating_record(value.max(1));
    }
    histogram
}

fn latency(histogram: &Histogram<u64>) -> Latency {
    let at = |quantile| to_us(histogram.value_at_quantile(quantile));
    Latency {
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: to_us(histogram.max()),
    }
}

/// Returns a time in nanoseconds.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times below ten minutes; both factors are positive, and casts from floats saturate"
)]
pub fn to_ns(ticks: u64, ns_per_tick: f64) -> u64 {
    (ticks as f64 * ns_per_tick) as u64
}

#[expect(clippy::cast_precision_loss, reason = "times below ten minutes")]
fn to_us(ns: u64) -> f64 {
    ((ns as f64 / 10.0).round()) / 100.0
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn slow_accesses_are_faults_and_others_are_not() {
        let args = Args::try_parse_from(["faultprobe", "--passes", "1"]).unwrap();
        let mut outcome = Outcome {
            pages: 500,
            local_ticks: vec![100; 1000],
            ..Outcome::default()
        };
        outcome.touch_ticks = vec![150; 900];
        let clock = Clock::start();
        // A tick is far below a microsecond, so this is some tens of milliseconds at least.
        outcome.touch_ticks.extend([100_000_000; 100]);
        outcome.pass_touches = vec![950, 50];
        let report = Report::new(&args, &outcome, &clock);
        assert_eq!(
            (report.faults, report.touches, report.pages),
            (100, 1000, 500)
        );
        assert_eq!(report.faults_by_pass, [50, 50]);
        assert!(report.latency_us.p50 > report.threshold_us);
        let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
        for key in ["p50", "p90", "p99", "p999", "max"] {
            assert!(json["latency_us"][key].is_number(), "{key}");
        }
        assert_eq!(json["corrupt_bytes"], 0);
        assert!(json["local_us"]["p99"].is_number());
    }

    #[test]
    fn the_threshold_follows_local_accesses_above_its_floor() {
        assert_eq!(threshold_ns(50), 10_000);
        assert_eq!(threshold_ns(5_000), 40_000);
    }
}
