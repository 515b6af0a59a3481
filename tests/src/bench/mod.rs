//! Measures what remote memory costs: natively on this machine, and in the testbed compared with
//! swap over the network and with post-copy migration.
//!
//! Every value with a target is a ratio or a comparison within one run. A value that could not be
//! measured is reported as skipped with its reason, and never as a target that is met.

mod native;
mod postcopy;
mod qemu;
mod swap;
mod swap_guest;
mod table;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

/// Version of the report's format.
const SCHEMA: u32 = 2;

/// Selects the measurements to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Both the native measurements and the comparisons in the testbed.
    All,
    /// Measurements that run natively on this machine.
    Native,
    /// The comparisons with swap and post-copy in the testbed.
    Swap,
}

/// Measures, prints a table, and writes `target/bench/report.json`. The comparisons in the testbed
/// run `rounds` times.
///
/// # Errors
/// Fails when a native measurement fails, or when a byte was wrong; the report then holds the other
/// results. A missed target is not an error.
pub fn run(workspace: &Path, parts: Parts, rounds: usize) -> anyhow::Result<()> {
    let dir = workspace.join("target/bench");
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let file = dir.join("report.json");
    // A report of an earlier run must not be mistaken for this one.
    let _ = std::fs::remove_file(&file);
    let begin = Instant::now();
    let mut failed = Vec::new();
    let mut report = json!({
        "schema": SCHEMA,
        "processors": processors(),
        "load_average_before": load_average(),
    });

    report["native"] = if parts == Parts::Swap {
        json!({"skipped": "--swap was given"})
    } else {
        let mut results = json!({});
        for measure in native::MEASURES {
            println!("{} ...", measure.about);
            match native::measure(workspace, measure) {
                Ok(result) => results[measure.name] = result,
                Err(error) => failed.push(format!("{}: {error:#}", measure.name)),
            }
        }
        results
    };
    report["swap"] = if parts == Parts::Native {
        json!({"skipped": "--native was given"})
    } else {
        println!(
            "the same work on our memory, on swap over the network, and by post-copy, in the testbed ..."
        );
        match swap::measure(workspace, &dir, rounds) {
            Ok(result) => result,
            Err(error) => {
                failed.push(format!("swap: {error:#}"));
                json!({"failed": format!("{error:#}")})
            }
        }
    };

    let targets = table::targets(&report);
    println!("\n{}", table::text(&report, &targets));
    report["targets"] = json!(targets);
    report["failed"] = json!(failed);
    report["seconds"] = json!(begin.elapsed().as_secs());
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n")
        .with_context(|| file.display().to_string())?;
    println!(
        "The whole report: {}",
        file.strip_prefix(workspace).unwrap_or(&file).display()
    );
    if !failed.is_empty() {
        bail!("not measured: {}", failed.join("; "));
    }
    Ok(())
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(0, usize::from)
}

/// Returns the average number of runnable threads over the last minute.
fn load_average() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Returns the median; NaN, which JSON represents as null, for an empty set.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Looks up a number in the report by its JSON pointer.
fn number(report: &Value, pointer: &str) -> Option<f64> {
    report.pointer(pointer)?.as_f64()
}
