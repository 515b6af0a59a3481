//! Measurements that run natively on this machine, through the product's own commands.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::cleanup::{self, Process};

/// Deadline of one measurement. The longest takes 75 s alone on two CPUs.
const DEADLINE: Duration = Duration::from_secs(300);

/// A command of the product to measure.
#[derive(Debug)]
pub(super) struct Measure {
    /// Its key in the report.
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    arguments: &'static [&'static str],
}

/// All measurements, in execution order.
pub(super) const MEASURES: &[Measure] = &[
    Measure {
        name: "fault",
        about: "random faults, beside the floor",
        arguments: &["fault"],
    },
    Measure {
        name: "replicas",
        about: "random faults with two copies of each page, beside one",
        arguments: &["fault", "--replicas", "2"],
    },
    Measure {
        name: "stripes",
        about: "random faults with stripes of 4+2, beside one copy",
        arguments: &["fault", "--redundancy", "4+2"],
    },
    Measure {
        name: "scan",
        about: "sequential and strided scans, beside the raw stream",
        arguments: &["memory", "--measure", "scan"],
    },
    Measure {
        name: "threads",
        about: "1 to 8 threads, 1 to 4 donors",
        arguments: &["memory", "--measure", "threads"],
    },
    Measure {
        name: "writes",
        about: "a working set that is written all over",
        arguments: &["memory", "--measure", "writes"],
    },
    Measure {
        name: "stalls",
        about: "2 writers while memory is evicted under them, for a minute",
        arguments: &["memory", "--measure", "stalls"],
    },
    Measure {
        name: "unchanged",
        about: "writes that change nothing, and the time of a fingerprint",
        arguments: &["memory", "--measure", "unchanged"],
    },
    Measure {
        name: "growth",
        about: "guests from 1 GiB to 4 TiB",
        arguments: &["memory", "--measure", "growth"],
    },
];

/// Runs one measurement and reads its JSON.
pub(super) fn measure(workspace: &Path, measure: &Measure) -> anyhow::Result<Value> {
    let program = workspace.join("target/release/ssi-hv");
    ensure!(
        program.is_file(),
        "no ssi-hv in target/release: run scripts/bench"
    );
    let mut command = Command::new(program);
    command
        .arg("bench")
        .args(measure.arguments)
        .arg("--json")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let text = output_of(&mut command)?;
    let result: Value = serde_json::from_str(&text).context("what it printed is not JSON")?;
    ensure!(
        result["corrupt_bytes"] == 0 && result["verified_bytes"].as_u64() > Some(0),
        "{} bytes of {} are wrong",
        result["corrupt_bytes"],
        result["verified_bytes"]
    );
    Ok(result)
}

/// Returns the standard output of a command, which must succeed before the deadline. Its standard
/// error is inherited.
fn output_of(command: &mut Command) -> anyhow::Result<String> {
    let process = Process::spawn(command).context("ssi-hv")?;
    let stdout = process.take_stdout().context("standard output")?;
    let (sender, output) = mpsc::channel();
    std::thread::spawn(move || sender.send(std::io::read_to_string(stdout)));
    let deadline = cleanup::after(DEADLINE);
    match process.wait_until(deadline)? {
        None => bail!("not done in {} s", DEADLINE.as_secs()),
        Some(status) if !status.success() => bail!("{status}; its error is above"),
        Some(_) => {}
    }
    // The process has exited, so the output is complete.
    Ok(output.recv_timeout(DEADLINE)??)
}
