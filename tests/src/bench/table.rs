//! The targets, and the table that the bench prints.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::Value;

use super::number;

const MIB: f64 = 1_048_576.0;

/// Longest acceptable fault on a page that is written while memory is evicted.
const STALL_MAX_US: f64 = 100_000.0;

/// Load average above which the machine was busy with other work.
const LOAD_IDLE_MAX: f64 = 0.5;

/// A measurement with its target.
#[derive(Debug, Serialize)]
pub(super) struct Target {
    measure: &'static str,
    /// `null` if not measured.
    value: Option<f64>,
    target: &'static str,
    met: Option<bool>,
    /// Why it was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
}

/// The condition on the value.
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// Returns every target, measured or not.
pub(super) fn targets(report: &Value) -> Vec<Target> {
    use Bound::{AtLeast, AtMost};
    let not_there = |part: &str| {
        let part = &report[part];
        let said = part["skipped"].as_str().or(part["failed"].as_str());
        said.unwrap_or("its measure failed").to_owned()
    };
    let derived = |measure, value: Option<f64>, target, bound: Bound, part: &str| {
        let met = value.map(|value| match bound {
            AtMost(limit) => value <= limit,
            AtLeast(limit) => value >= limit,
        });
        let skipped = value.is_none().then(|| not_there(part));
        Target {
            measure,
            value,
            target,
            met,
            skipped,
        }
    };
    let row = |measure, pointer: &str, target, bound, part: &str| {
        derived(measure, number(report, pointer), target, bound, part)
    };
    let mut rows = vec![
        row(
            "random fault p50 / floor p50",
            "/native/fault/ratio_p50",
            "at most 1.15",
            AtMost(1.15),
            "native",
        ),
        row(
            "random fault p99 / floor p99",
            "/native/fault/ratio_p99",
            "at most 1.5",
            AtMost(1.5),
            "native",
        ),
        row(
            "random fault CPU time / the floor's",
            "/native/fault/ratio_cpu",
            "at most 1.3",
            AtMost(1.3),
            "native",
        ),
        row(
            "sequential scan / floor",
            "/native/scan/scan/sequential/ratio_to_floor",
            "at least 0.8",
            AtLeast(0.8),
            "native",
        ),
    ];
    let below = number(report, "/native/fault/floor/rounds_below");
    let rounds = number(report, "/native/fault/rounds");
    rows.extend([
        derived(
            "rounds in which the floor was below",
            quotient(below, rounds),
            "at least 0.95",
            AtLeast(0.95),
            "native",
        ),
        derived(
            "faults of 8 threads / of 1 thread",
            of_threads(report, "faults_per_second", (8, 1), (1, 1)),
            "at least 1.6",
            AtLeast(1.6),
            "native",
        ),
        derived(
            "CPU a fault of 8 threads / of 1 thread",
            of_threads(report, "cpu_seconds_per_million_faults", (8, 1), (1, 1)),
            "at most 1",
            AtMost(1.0),
            "native",
        ),
        derived(
            "faults of 8 threads, 4 donors / 1 donor",
            of_threads(report, "faults_per_second", (8, 4), (8, 1)),
            "at least 1",
            AtLeast(1.0),
            "native",
        ),
        row(
            "2 replicas: fault p50, times one copy",
            "/native/replicas/redundant/ratio_p50",
            "at most 1.1",
            AtMost(1.1),
            "native",
        ),
        row(
            "2 replicas: write-back bytes, times one copy",
            "/native/replicas/redundant/ratio_write_back_bytes",
            "at most 2.1",
            AtMost(2.1),
            "native",
        ),
        row(
            "fault p50 / that of swap over the network",
            "/swap/latency_p50_ours_to_swap",
            "at most 0.5",
            AtMost(0.5),
            "swap",
        ),
        row(
            "speed at 50 % local / that of swap",
            "/swap/times_faster_than_swap",
            "at least 2",
            AtLeast(2.0),
            "swap",
        ),
        row(
            "fault p50 / that of QEMU's post-copy",
            "/swap/postcopy/latency_p50_ours_to_postcopy",
            "at most 0.5",
            AtMost(0.5),
            "swap",
        ),
        row(
            "start of 4 TiB, ms",
            "/native/growth/growth/3/start_ms",
            "under 2000",
            AtMost(2000.0),
            "native",
        ),
    ]);
    let mut memory = row(
        "memory of 4 TiB, 256 pages touched, MiB",
        "/native/growth/growth/3/touched_bytes",
        "under 64",
        AtMost(64.0 * MIB),
        "native",
    );
    memory.value = memory.value.map(|bytes| bytes / MIB);
    rows.push(memory);
    // A lost update is a wrong byte, which makes the measurement fail.
    let mut stall = row(
        "longest stall of 2 writers in 60 s, ms",
        "/native/stalls/stalls/page_us/max",
        "no lost update, no stall over 100",
        AtMost(STALL_MAX_US),
        "native",
    );
    stall.value = stall.value.map(|us| us / 1000.0);
    rows.push(stall);
    rows
}

/// Returns one value divided by another.
fn quotient(value: Option<f64>, by: Option<f64>) -> Option<f64> {
    value
        .zip(by)
        .map(|(value, by)| value / by)
        .filter(|it| it.is_finite())
}

/// Returns a value of the point with so many threads and donors, divided by that of another point.
fn of_threads(report: &Value, key: &str, point: (u64, u64), by: (u64, u64)) -> Option<f64> {
    let points = report["native"]["threads"]["threads"].as_array()?;
    let at = |(threads, donors): (u64, u64)| {
        let is_it = |it: &&Value| it["threads"] == threads && it["donors"] == donors;
        points.iter().find(is_it)?[key].as_f64()
    };
    quotient(at(point), at(by))
}

/// Formats the targets, then the values without one.
pub(super) fn text(report: &Value, targets: &[Target]) -> String {
    let mut text = String::new();
    write_text(&mut text, report, targets).expect("writing to a string does not fail");
    text
}

fn write_text(text: &mut String, report: &Value, targets: &[Target]) -> std::fmt::Result {
    let host = &report["native"]["fault"]["host"];
    writeln!(
        text,
        "{}, {} processors, Linux {}, virtualisation {}\n",
        host["cpu_model"].as_str().unwrap_or("?"),
        report["processors"],
        host["kernel"].as_str().unwrap_or("?"),
        host["virtualization"].as_str().unwrap_or("?"),
    )?;
    let load = number(report, "/load_average_before");
    if let Some(load) = load.filter(|load| *load > LOAD_IDLE_MAX) {
        writeln!(
            text,
            "The machine was not idle: its load average was {load:.1} before. Times and rates suffer.\n"
        )?;
    }
    writeln!(text, "{:<44}{:>9}  {:<8}target", "measure", "value", "")?;
    for row in targets {
        let met = match row.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "skipped",
        };
        let value = row
            .value
            .map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
        writeln!(
            text,
            "{:<44}{value:>9}  {met:<8}{}",
            row.measure, row.target
        )?;
        if let Some(reason) = &row.skipped {
            writeln!(text, "    not measured: {reason}")?;
        }
    }
    writeln!(text, "\n{:<44}{:>9}", "beside these", "value")?;
    let mut beside = Vec::new();
    let mut more = |name: String, value: Option<f64>| beside.extend(value.map(|v| (name, v)));
    for key in ["p50", "p90", "p99", "p999"] {
        let pointer = format!("/native/fault/latency_us/{key}");
        more(format!("random fault {key}, us"), number(report, &pointer));
    }
    for key in ["p50", "p99"] {
        let pointer = format!("/native/fault/floor/latency_us/{key}");
        more(format!("floor {key}, us"), number(report, &pointer));
    }
    write_redundant(report, &mut more);
    let rate = |pointer: &str| number(report, pointer).map(|rate| rate / MIB);
    let scan = "/native/scan/scan";
    more(
        "raw stream, MiB/s".into(),
        rate(&format!("{scan}/stream_bytes_per_second")),
    );
    more(
        "floor of a scan, MiB/s".into(),
        rate(&format!("{scan}/floor_bytes_per_second")),
    );
    for kind in ["sequential", "strided"] {
        more(
            format!("{kind} scan, MiB/s"),
            rate(&format!("{scan}/{kind}/bytes_per_second")),
        );
    }
    let list = |pointer: &str| {
        let list = report.pointer(pointer).and_then(Value::as_array);
        list.cloned().unwrap_or_default()
    };
    for point in list("/native/writes/writes") {
        let name = format!("writes, {} % local, times slower", point["local_percent"]);
        more(name, point["slowdown"].as_f64());
    }
    for (name, pointer) in [
        ("a page of 2 writers, p99.9, us", "page_us/p999"),
        ("the same all local, p99.9, us", "all_local_page_us/p999"),
        ("the same all local, longest, us", "all_local_page_us/max"),
    ] {
        let value = number(report, &format!("/native/stalls/stalls/{pointer}"));
        more(name.into(), value);
    }
    let unchanged = "/native/unchanged/unchanged";
    for (name, key) in [
        ("a fingerprint, ns", "fingerprint_ns"),
        ("the same from no cache, ns", "fingerprint_uncached_ns"),
        ("writes of the same value / of another", "speedup"),
    ] {
        more(name.into(), number(report, &format!("{unchanged}/{key}")));
    }
    for point in list("/native/growth/growth") {
        let gib = point["memory_bytes"].as_u64().unwrap_or(0) >> 30;
        more(
            format!("start of {gib} GiB, ms"),
            point["start_ms"].as_f64(),
        );
        let touched = point["touched_bytes"].as_f64().map(|bytes| bytes / MIB);
        more(format!("memory of {gib} GiB, MiB"), touched);
        let metadata = point["metadata_bytes_per_page"].as_f64();
        more(format!("metadata of {gib} GiB, bytes a page"), metadata);
    }
    for key in ["p90", "p99"] {
        let pointer = format!("/swap/latency_{key}_ours_to_swap");
        more(
            format!("fault {key} / that of swap"),
            number(report, &pointer),
        );
    }
    for side in list("/swap/against") {
        let name = side["read_ahead"].as_str().unwrap_or("?");
        for (what, key) in [
            ("fault p50 / swap", "latency_p50_ours_to_swap"),
            ("times faster than swap", "times_faster_than_swap"),
        ] {
            more(format!("{what}, read-ahead {name}"), side[key].as_f64());
        }
    }
    for (what, key) in [
        (
            "fault p50 / that of swap, tight",
            "latency_p50_ours_to_swap",
        ),
        ("times faster than swap, tight", "times_faster_than_swap"),
    ] {
        more(what.into(), number(report, &format!("/swap/tight/{key}")));
    }
    for key in ["p90", "p99"] {
        let pointer = format!("/swap/postcopy/latency_{key}_ours_to_postcopy");
        more(
            format!("fault {key} / that of QEMU's post-copy"),
            number(report, &pointer),
        );
    }
    more(
        "requests of post-copy / faults of its guest".into(),
        number(report, "/swap/postcopy/requests_to_faults"),
    );
    for (name, value) in beside {
        writeln!(text, "{name:<44}{value:>9.2}")?;
    }
    let points = list("/native/threads/threads");
    if !points.is_empty() {
        writeln!(
            text,
            "\n{:<16}{:<16}{:>16}{:>16}{:>24}",
            "threads", "donors", "faults/s", "to 1 and 1", "CPU s a million faults"
        )?;
    }
    for point in points {
        let value = |key: &str| point[key].as_f64().unwrap_or(f64::NAN);
        writeln!(
            text,
            "{:<16}{:<16}{:>16.0}{:>16.2}{:>24.1}",
            point["threads"].to_string(),
            point["donors"].to_string(),
            value("faults_per_second"),
            value("ratio_to_one"),
            value("cpu_seconds_per_million_faults"),
        )?;
    }
    if report["swap"]["hosts"].is_string() {
        writeln!(
            text,
            "\nSwap and post-copy were measured on emulated hosts: only ratios mean something."
        )?;
    }
    Ok(())
}

/// Adds what copies and stripes cost beyond their targets; stripes have none.
fn write_redundant(report: &Value, more: &mut impl FnMut(String, Option<f64>)) {
    for (name, key, is_judged) in [("2 replicas", "replicas", true), ("4+2", "stripes", false)] {
        for (what, ratio, has_target) in [
            ("fault p50", "ratio_p50", true),
            ("fault p99", "ratio_p99", false),
            ("CPU a fault", "ratio_cpu", false),
            ("write-back bytes", "ratio_write_back_bytes", true),
        ] {
            if !(is_judged && has_target) {
                let pointer = format!("/native/{key}/redundant/{ratio}");
                more(
                    format!("{name}: {what}, times one copy"),
                    number(report, &pointer),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn targets_are_met_missed_or_skipped_with_a_reason() {
        let report = json!({
            "native": {
                "fault": {
                    "ratio_p50": 1.1, "ratio_p99": 1.6, "ratio_cpu": 1.3,
                    "rounds": 100, "floor": {"rounds_below": 97},
                },
                "threads": {"threads": [
                    {"threads": 1, "donors": 1, "faults_per_second": 1000.0, "cpu_seconds_per_million_faults": 40.0},
                    {"threads": 8, "donors": 1, "faults_per_second": 1700.0, "cpu_seconds_per_million_faults": 41.0},
                    {"threads": 8, "donors": 4, "faults_per_second": 1600.0},
                ]},
                "replicas": {"redundant": {"ratio_p50": 1.2, "ratio_write_back_bytes": 2.0, "ratio_cpu": 1.4}},
                "stripes": {"redundant": {"ratio_p50": 1.75, "ratio_write_back_bytes": 1.51}},
                "scan": {"scan": {"stream_bytes_per_second": 4_096_000.0, "sequential": {"ratio_to_floor": 0.1}}},
                "stalls": {"stalls": {"page_us": {"max": 8317.0}}},
                "growth": {"growth": [{}, {}, {}, {"start_ms": 1.5, "touched_bytes": 1_048_576}]},
            },
            "swap": {"skipped": "--native was given"},
        });
        let rows = targets(&report);
        let met: Vec<_> = rows.iter().map(|row| row.met).collect();
        let (yes, no) = (Some(true), Some(false));
        let floors = [yes, no, yes, no, yes];
        let threads = [yes, no, no];
        let replicas = [no, yes];
        let rest = [None, None, None, yes, yes, yes];
        assert_eq!(met, [&floors[..], &threads, &replicas, &rest].concat());
        for row in &rows {
            assert_eq!(row.met.is_none(), row.skipped.is_some(), "{row:?}");
        }
        let text = text(&report, &rows);
        assert!(text.contains("not measured: --native was given"), "{text}");
        assert!(text.contains("MISSED  at most 1.5"), "{text}");
        for (name, value) in [
            ("2 replicas: CPU a fault, times one copy", "1.40"),
            ("4+2: fault p50, times one copy", "1.75"),
            ("4+2: write-back bytes, times one copy", "1.51"),
        ] {
            let line = format!("{name:<44}{value:>9}");
            assert!(text.contains(&line), "{text}");
        }
    }

    #[test]
    fn peers_in_the_testbed_are_judged_each_by_its_ratio() {
        let report = json!({"swap": {
            "latency_p50_ours_to_swap": 0.3,
            "postcopy": {"latency_p50_ours_to_postcopy": 0.6, "requests_to_faults": 0.96},
        }});
        let rows = targets(&report);
        let met = |text: &str| {
            rows.iter()
                .find(|row| row.measure.contains(text))
                .unwrap()
                .met
        };
        assert_eq!(met("p50 / that of swap"), Some(true));
        assert_eq!(met("p50 / that of QEMU's post-copy"), Some(false));
        let text = text(&report, &rows);
        assert!(text.contains("faults of its guest      0.96"), "{text}");
    }
}
