//! `ssi-hv bench`.

mod bed;
mod beside;
mod clients;
mod coherence;
mod fault;
mod floor;
mod growth;
mod members;
mod memory;
mod placement;
mod random;
mod scan;
mod scan_floor;
mod stalls;
mod start;
mod stream;
mod threads;
mod transport;
mod unchanged;
mod usage;
mod view;
mod working_set;
mod write_back;
mod writes;

use std::fmt::Write as _;
use std::time::Duration;

pub use clients::clients;
pub use coherence::{coherence, node as coherence_node};
pub use memory::memory;
use memory_fabric::stats::{Histogram, Summary};
use placement::Placement;
use serde::Serialize;
use ssi_hv::exit::ExitCode;
use ssi_hv::instance::percentiles;
use ssi_hv::report::{Host, Percentiles, Stages, Virtualization};
pub use start::start;
pub use transport::transport;

use self::beside::{BesideBench, RedundantBench};
use self::write_back::WriteBack;
use super::{Failure, print};
use crate::cli::bench::BenchFaultConfig;

/// Rounds, in each of which everything is measured once, so that disturbances affect all
/// measurements equally.
const ROUNDS: u32 = 5;

/// Prints results as JSON or as a table. Fails if what was verified was `wrong`: how often, and
/// what.
fn finish<T: Serialize>(
    result: &T,
    json: bool,
    table: impl FnOnce(&T) -> String,
    (wrong, what): (u64, &str),
) -> Result<ExitCode, Failure> {
    let text = if json {
        serde_json::to_string_pretty(result)? + "\n"
    } else {
        table(result)
    };
    print(&text)?;
    if wrong > 0 {
        let error = anyhow::anyhow!("{wrong} {what} were wrong");
        return Err(Failure::new(ExitCode::HostError, error));
    }
    Ok(ExitCode::Success)
}

/// Measures the latency of remote faults, and the floor for comparison.
pub fn fault(config: &BenchFaultConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    let result = beside::measure(config)?;
    let wrong = (result.corrupt_bytes, "bytes");
    finish(&result, config.json, table, wrong)
}

/// The results.
#[derive(Debug, Serialize)]
struct FaultBench {
    schema: u32,
    host: Host,
    memory_bytes: u64,
    local_memory_bytes: u64,
    threads: u32,
    donors: u32,
    transport: &'static str,
    rounds: u32,
    cpus: Placement,
    /// Accesses that waited for a page from a donor, as measured by the accessing threads.
    faults: u64,
    faults_per_second: f64,
    latency_us: Percentiles,
    /// The same as measured by the pager: from reading the fault to waking the thread.
    pager_latency_us: Percentiles,
    stages: Stages,
    /// CPU time of the whole process for one such access, with the donors': median of the rounds.
    cpu_us: f64,
    floor: Floor,
    /// Medians over the rounds of our value divided by that of the floor.
    ratio_p50: f64,
    ratio_p99: f64,
    ratio_cpu: f64,
    write_back: WriteBack,
    /// With `--seal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    sealed: Option<BesideBench>,
    /// With `--tls` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<BesideBench>,
    /// With `--replicas 2` or `--redundancy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    redundant: Option<RedundantBench>,
    verified_bytes: u64,
    corrupt_bytes: u64,
}

/// The same accesses over a pager that does only what none can avoid.
#[derive(Debug, Serialize)]
struct Floor {
    latency_us: Percentiles,
    cpu_us: f64,
    /// Rounds in which its p50 was not above ours: all, if it is a floor.
    rounds_below: u32,
}

/// One measurement in several rounds.
#[derive(Debug, Default)]
struct Series {
    all: Histogram,
    rounds: Vec<Summary>,
}

impl Series {
    fn add(&mut self, round: &Histogram) {
        self.all.merge(round);
        self.rounds.push(round.summary());
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn table(result: &FaultBench) -> String {
    let mut text = String::new();
    let host = &result.host;
    let emulated = match host.virtualization {
        Virtualization::Hardware => "",
        Virtualization::Emulated => " (no hardware virtualization; times are this machine's own)",
    };
    let mib = |bytes: u64| bytes >> 20;
    // Writing to a string does not fail.
    let _ = writeln!(text, "{}, Linux {}{emulated}", host.cpu_model, host.kernel);
    let _ = writeln!(
        text,
        "{} MiB, {} MiB of it local, {} thread(s), {} donor(s) over {}, {} rounds\n",
        mib(result.memory_bytes),
        mib(result.local_memory_bytes),
        result.threads,
        result.donors,
        result.transport,
        result.rounds,
    );
    let _ = writeln!(
        text,
        "{:<26}{:>9}{:>9}{:>9}{:>9}{:>10}",
        "us", "p50", "p90", "p99", "p99.9", "max"
    );
    for (name, row) in [
        ("remote fault", &result.latency_us),
        ("  in the pager", &result.pager_latency_us),
        ("    queue", &result.stages.queue),
        ("    fetch", &result.stages.fetch),
        ("    install", &result.stages.install),
        ("floor", &result.floor.latency_us),
    ] {
        let _ = writeln!(
            text,
            "{name:<26}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>10.1}",
            row.p50, row.p90, row.p99, row.p999, row.max
        );
    }
    let beside = [("sealed", &result.sealed), ("under TLS", &result.tls)];
    for (how, beside) in beside {
        if let Some(beside) = beside {
            write_beside(&mut text, how, beside);
        }
    }
    if let Some(redundant) = &result.redundant {
        let how = redundant.name();
        write_beside(&mut text, &how, &redundant.faults);
        let _ = writeln!(
            text,
            "{how}: {:.2} times the bytes of write-backs: {:.0} for each page, and {:.0} with one copy",
            redundant.ratio_write_back_bytes,
            redundant.write_back.bytes_per_page,
            result.write_back.bytes_per_page,
        );
    }
    let _ = writeln!(
        text,
        "\n{} faults, {:.0} a second; {:.1} us of CPU time each, and {:.1} us at the floor\n\
         p50 is {:.2}, p99 {:.2} and CPU time {:.2} times the floor, which was below in {} of {} rounds\n\
         {} bytes verified, {} wrong",
        result.faults,
        result.faults_per_second,
        result.cpu_us,
        result.floor.cpu_us,
        result.ratio_p50,
        result.ratio_p99,
        result.ratio_cpu,
        result.floor.rounds_below,
        result.rounds,
        result.verified_bytes,
        result.corrupt_bytes,
    );
    text
}

/// Writes a row for what was measured beside plain memory, and a line that compares them.
fn write_beside(text: &mut String, how: &str, beside: &BesideBench) {
    let row = &beside.latency_us;
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{:<26}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>10.1}\n\n{how}: p50 is {:.2}, p99 {:.2} and CPU time \
         {:.2} times that without ({:.1} and {:.1} us of CPU for each fault)",
        format!("remote fault, {how}"),
        row.p50,
        row.p90,
        row.p99,
        row.p999,
        row.max,
        beside.ratio_p50,
        beside.ratio_p99,
        beside.ratio_cpu,
        beside.cpu_us,
        beside.plain_cpu_us,
    );
}
