//! `ssi-hv bench memory`: everything except the latency of one fault.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use anyhow::Result;
use serde::Serialize;
use ssi_hv::exit::ExitCode;
use ssi_hv::host;
use ssi_hv::report::Host;
use ssi_hv::size::ByteSize;

use super::fault::Tally;
use super::growth::{self, Growth};
use super::scan::{self, Scans};
use super::stalls::{self, Stalls};
use super::threads::{self, Scaled};
use super::unchanged::{self, Unchanged};
use super::writes::{self, Writes};
use super::{ROUNDS, finish};
use crate::cli::bench::{BenchMeasure, BenchMemoryConfig};
use crate::commands::Failure;

/// Divisor of the memory that gives the local part in scans and in faults of several threads.
const LOCAL_SHARE: u64 = 4;

/// The results; measurements that were not requested are omitted.
#[derive(Debug, Serialize)]
struct MemoryBench {
    schema: u32,
    host: Host,
    memory_bytes: u64,
    /// In scans and in faults of several threads.
    local_memory_bytes: u64,
    transport: &'static str,
    rounds: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    scan: Option<Scans>,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<Vec<Scaled>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    writes: Option<Vec<Writes>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stalls: Option<Stalls>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unchanged: Option<Unchanged>,
    #[serde(skip_serializing_if = "Option::is_none")]
    growth: Option<Vec<Growth>>,
    verified_bytes: u64,
    corrupt_bytes: u64,
}

/// Runs the requested measurements.
pub fn memory(config: &BenchMemoryConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    let result = measure(config)?;
    let wrong = (result.corrupt_bytes, "bytes");
    finish(&result, config.json, table, wrong)
}

fn measure(config: &BenchMemoryConfig) -> Result<MemoryBench> {
    let memory = config.memory;
    let page = memory_fabric::page::PAGE_SIZE as u64;
    let local = ByteSize::from_bytes((memory.bytes() / LOCAL_SHARE).next_multiple_of(page));
    let wanted = |measure| config.measure.is_empty() || config.measure.contains(&measure);
    let tally = Tally::default();
    let some = |measure: BenchMeasure| wanted(measure).then_some(());
    let scan = some(BenchMeasure::Scan).map(|()| scan::measure(memory, local, &tally));
    let threads = some(BenchMeasure::Threads).map(|()| threads::measure(memory, local, &tally));
    let writes = some(BenchMeasure::Writes).map(|()| writes::measure(memory, &tally));
    let stalls =
        some(BenchMeasure::Stalls).map(|()| stalls::measure(memory, local, config.seconds, &tally));
    let unchanged =
        some(BenchMeasure::Unchanged).map(|()| unchanged::measure(memory, local, &tally));
    let growth = some(BenchMeasure::Growth).map(|()| growth::measure(&tally));
    Ok(MemoryBench {
        schema: ssi_hv::report::SCHEMA,
        host: host::detect(),
        memory_bytes: memory.bytes(),
        local_memory_bytes: local.bytes(),
        transport: "tcp",
        rounds: ROUNDS,
        scan: scan.transpose()?,
        threads: threads.transpose()?,
        writes: writes.transpose()?,
        stalls: stalls.transpose()?,
        unchanged: unchanged.transpose()?,
        growth: growth.transpose()?,
        verified_bytes: tally.verified.load(Ordering::Relaxed),
        corrupt_bytes: tally.corrupt.load(Ordering::Relaxed),
    })
}

fn table(result: &MemoryBench) -> String {
    let mut text = String::new();
    write_table(&mut text, result).expect("writing to a string does not fail");
    text
}

fn write_table(text: &mut String, result: &MemoryBench) -> std::fmt::Result {
    let host = &result.host;
    writeln!(
        text,
        "{}, Linux {}; over {}, medians of {} rounds",
        host.cpu_model, host.kernel, result.transport, result.rounds,
    )?;
    let has_quarter = [
        result.scan.is_some(),
        result.threads.is_some(),
        result.stalls.is_some(),
        result.unchanged.is_some(),
    ];
    if has_quarter.contains(&true) {
        let (memory, local) = (result.memory_bytes, result.local_memory_bytes);
        let (memory, local) = (memory >> 20, local >> 20);
        writeln!(
            text,
            "{memory} MiB, {local} MiB of it local, except in writes and growth"
        )?;
    }
    if let Some(scans) = &result.scan {
        writeln!(
            text,
            "\n{:<26}{:>12}{:>14}{:>14}",
            "scan", "MiB/s", "of the floor", "of the stream"
        )?;
        let mib = |rate: f64| rate / f64::from(1 << 20);
        let stream = mib(scans.stream_bytes_per_second);
        writeln!(text, "{:<26}{stream:>12.0}", "raw stream")?;
        let floor = mib(scans.floor_bytes_per_second);
        writeln!(text, "{:<26}{floor:>12.0}", "floor")?;
        for (name, scan) in [
            ("sequential", &scans.sequential),
            ("strided", &scans.strided),
        ] {
            let rate = mib(scan.bytes_per_second);
            let (floor, stream) = (scan.ratio_to_floor, scan.ratio_to_stream);
            writeln!(text, "{name:<26}{rate:>12.0}{floor:>14.3}{stream:>14.3}")?;
        }
    }
    if let Some(points) = &result.threads {
        writeln!(
            text,
            "\n{:<26}{:>12}{:>14}{:>14}{:>14}{:>22}",
            "threads, donors",
            "faults/s",
            "to 1 and 1",
            "of the floor",
            "floor's to 1",
            "CPU s a million"
        )?;
        for point in points {
            writeln!(
                text,
                "{:<26}{:>12.0}{:>14.2}{:>14.2}{:>14.2}{:>22.1}",
                format!("{}, {}", point.threads, point.donors),
                point.faults_per_second,
                point.ratio_to_one,
                point.ratio_to_floor,
                point.floor_ratio_to_one,
                point.cpu_seconds_per_million_faults
            )?;
        }
    }
    if let Some(points) = &result.writes {
        writeln!(
            text,
            "\n{:<26}{:>12}{:>14}",
            "writes", "pages/s", "times slower"
        )?;
        for point in points {
            let name = format!("{} % local", point.local_percent);
            let (rate, slowdown) = (point.pages_per_second, point.slowdown);
            writeln!(text, "{name:<26}{rate:>12.0}{slowdown:>14.2}")?;
        }
    }
    if let Some(stalls) = &result.stalls {
        writeln!(
            text,
            "\n{:<26}{:>10}{:>10}{:>10}{:>10}",
            "us a page", "p50", "p99", "p99.9", "max"
        )?;
        let about = format!("{} writers, {} s", stalls.writers, stalls.seconds);
        for (name, times) in [
            (about.as_str(), &stalls.page_us),
            ("all local, before", &stalls.all_local_page_us),
        ] {
            writeln!(
                text,
                "{name:<26}{:>10.1}{:>10.1}{:>10.1}{:>10.1}",
                times.p50, times.p99, times.p999, times.max
            )?;
        }
        writeln!(
            text,
            "{} pages written, {} evicted; {} faults waited for memory",
            stalls.pages, stalls.evictions, stalls.stalled_for_memory
        )?;
    }
    if let Some(unchanged) = &result.unchanged {
        unchanged::write_table(text, unchanged)?;
    }
    if let Some(points) = &result.growth {
        writeln!(
            text,
            "\n{:<14}{:>10}{:>14}{:>14}{:>14}{:>14}",
            "guest", "start ms", "started KiB", "touched KiB", "metadata B", "tables B"
        )?;
        for point in points {
            let kib = |bytes: f64| bytes / 1024.0;
            writeln!(
                text,
                "{:<14}{:>10.1}{:>14.0}{:>14.0}{:>14.1}{:>14.1}",
                ByteSize::from_bytes(point.memory_bytes).to_string(),
                point.start_ms,
                kib(point.started_bytes),
                kib(point.touched_bytes),
                point.metadata_bytes_per_page,
                point.page_table_bytes_per_page,
            )?;
        }
    }
    writeln!(
        text,
        "\n{} bytes verified, {} wrong",
        result.verified_bytes, result.corrupt_bytes
    )
}
