//! The bench: what remote memory costs, here, and in the testbed beside swap over the network.
//!
//! Everything that has a target is a ratio, or compared with something, in one run. What
//! could not be measured is a skip with its reason, and never a target that is met.

mod native;
mod swap;
mod swap_guest;
mod table;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

/// Version of the report's fields.
const SCHEMA: u32 = 2;

/// Which parts are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// All.
    All,
    /// What runs on this machine as it is.
    Native,
    /// The comparison with swap, in the testbed.
    Swap,
}

/// Measures, prints a table, and writes `target/bench/report.json`. `rounds` is how often what
/// runs in the testbed is repeated.
///
/// # Errors
/// Fails when something could not be measured that could be here, and when a byte was wrong; the
/// report has the rest. A target that is missed is no error.
pub fn run(workspace: &Path, parts: Parts, rounds: usize) -> anyhow::Result<()> {
    let dir = workspace.join("target/bench");
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let file = dir.join("report.json");
    // An older report must not be taken for this run's.
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
            "the same work in guests on our memory and on swap over the network, in the testbed ..."
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

/// How many threads ran or wanted to, over the last minute.
fn load_average() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// The middle one; NaN, which JSON has as null, when there is none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A number of the report by its path.
fn number(report: &Value, pointer: &str) -> Option<f64> {
    report.pointer(pointer)?.as_f64()
}
