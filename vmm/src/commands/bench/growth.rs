//! The cost of guest size: `bench start` for small and very large guests, in turn.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use ssi_hv::progress::Progress;
use ssi_hv::size::ByteSize;

use super::fault::Tally;
use super::start::Started;
use super::{ROUNDS, median};

/// 1, 16 and 256 GiB, and 4 TiB.
const SIZES_MIB: [u64; 4] = [1 << 10, 16 << 10, 256 << 10, 4 << 20];
/// Deadline of one size, beyond which it is an error.
const CHILD_DEADLINE: Duration = Duration::from_secs(120);

/// Medians for one size.
#[derive(Debug, Serialize)]
pub(super) struct Growth {
    pub(super) memory_bytes: u64,
    pub(super) start_ms: f64,
    /// Growth of the process's memory by the start.
    pub(super) started_bytes: f64,
    /// The same with 256 scattered pages accessed; without the guest's own pages.
    pub(super) touched_bytes: f64,
    pub(super) metadata_bytes_per_page: f64,
    pub(super) page_table_bytes_per_page: f64,
}

pub(super) fn measure(tally: &Tally) -> Result<Vec<Growth>> {
    let mut rounds: [Vec<Started>; SIZES_MIB.len()] = Default::default();
    let progress = Progress::rounds(ROUNDS);
    for _ in 0..ROUNDS {
        for (mib, results) in SIZES_MIB.into_iter().zip(&mut rounds) {
            let started = in_child(ByteSize::from_mib(mib))?;
            let add = |to: &AtomicU64, count| to.fetch_add(count, Ordering::Relaxed);
            add(&tally.verified, started.verified_bytes);
            add(&tally.corrupt, started.corrupt_bytes);
            results.push(started);
        }
        progress.step();
    }
    drop(progress);
    Ok(rounds.iter().map(|results| summary(results)).collect())
}

fn summary(results: &[Started]) -> Growth {
    let of = |value: fn(&Started) -> f64| median(results.iter().map(value).collect());
    // Counts of bytes stay far below 2^52.
    #[allow(clippy::cast_precision_loss)]
    Growth {
        memory_bytes: results.first().map_or(0, |first| first.memory_bytes),
        start_ms: of(|result| result.start_ms),
        started_bytes: of(|result| result.started_bytes as f64),
        touched_bytes: of(|result| result.touched_bytes as f64),
        metadata_bytes_per_page: of(|result| result.metadata_bytes_per_page),
        page_table_bytes_per_page: of(|result| result.page_table_bytes_per_page),
    }
}

/// Runs each size in a separate process, so that none affects another.
fn in_child(memory: ByteSize) -> Result<Started> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut child = Command::new(program)
        .args(["bench", "start", "--json", "--memory"])
        .arg(memory.bytes().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a process")?;
    let stdout = child.stdout.take().context("no output")?;
    // Its output ends with the process.
    let (ended, output) = mpsc::channel();
    std::thread::spawn(move || ended.send(std::io::read_to_string(stdout)));
    let Ok(text) = output.recv_timeout(CHILD_DEADLINE) else {
        child.kill().context("cannot end a process")?;
        child.wait()?;
        bail!("{memory} did not start in {} s", CHILD_DEADLINE.as_secs());
    };
    let (status, text) = (child.wait()?, text?);
    let started = serde_json::from_str(&text);
    started.with_context(|| format!("{memory} ended with {status}"))
}
