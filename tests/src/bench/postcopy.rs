//! Post-copy migration of QEMU as a peer: a guest that has filled its memory moves to another host,
//! and there visits its pages while they come on request.
//!
//! Each page comes once and then stays, so that the first pass of the program is all that counts.
//! See `docs/bench.md`.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::qemu::Qemu;
use super::swap_guest::{self, GUEST_DEADLINE};
use super::{median, number};
use crate::testbed::{Host, Tap};

/// Port of the destination for the source.
const PORT: u16 = 4444;
/// Bytes per second of the background stream, before and after the switch; 0 would be no limit.
/// QEMU applies it to portions of 100 ms, and looks at it after each flush of 32 pages.
const BACKGROUND: u64 = 100;
/// Least number of faults of a comparison.
const FAULTS_MIN: u64 = 3000;
/// Least part of the guest's faults that QEMU must have requested, in percent. The others are
/// pages that came before, whose first access is a fault without a request.
const REQUESTED_PERCENT_MIN: u64 = 60;
/// Deadline of the destination for being ready.
const READY_DEADLINE: Duration = Duration::from_secs(60);

/// Runs the program once: on `from` until its memory is filled, and then on `to`.
pub(super) fn run(
    to: &Host,
    from: &Host,
    memory_mib: u64,
    work: &str,
    console: &Path,
) -> anyhow::Result<Value> {
    let log = File::create(console).with_context(|| console.display().to_string())?;
    let log = Arc::new(Mutex::new(log));
    let tap = || -> Tap {
        let log = Arc::clone(&log);
        Box::new(move |bytes| {
            // Best effort: the same text is kept in memory and quoted in errors.
            let _ = log
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .write_all(bytes);
        })
    };
    let source = Qemu::start(from, "source", memory_mib, work, "", tap())?;
    let options = "-incoming defer";
    let destination = Qemu::start(to, "destination", memory_mib, work, options, tap())?;
    source.wait_ready()?;
    destination.wait_ready()?;
    let filled = source
        .process()
        .wait_for_line("FAULTPROBE-AT filled", GUEST_DEADLINE);
    swap_guest::check_failed(&source.process().stdout(), console)?;
    filled.with_context(|| format!("its console is in {}", console.display()))?;

    let uri = format!("{{\"uri\":\"tcp:{}:{PORT}\"}}", to.address());
    let resumed = destination.control_then_line(&[
        capabilities(),
        format!("migrate-incoming={uri}"),
        "event:RESUME".into(),
    ])?;
    // It listens when both commands were answered.
    if let Err(error) = resumed.wait_for_nth_line("\"return\"", 1, READY_DEADLINE) {
        destination.wait_for_control(&resumed)?;
        return Err(error.into());
    }
    source.control(&[
        capabilities(),
        format!(
            "migrate-set-parameters={}",
            json!({"max-bandwidth": BACKGROUND, "max-postcopy-bandwidth": BACKGROUND})
        ),
        format!("migrate={uri}"),
        "migrate-start-postcopy".into(),
        "event:STOP".into(),
    ])?;
    destination.wait_for_control(&resumed)?;
    let done = destination
        .process()
        .wait_for_line("BENCH done", GUEST_DEADLINE);
    let output = source.process().stdout() + &destination.process().stdout();
    swap_guest::check_failed(&output, console)?;
    done.with_context(|| format!("its console is in {}", console.display()))?;

    let mut run = swap_guest::parse(&output)
        .with_context(|| format!("its console is in {}", console.display()))?;
    let answers = source.control(&["query-migrate".into()])?;
    let answer: Value = serde_json::from_str(answers.first().context("no answer")?)?;
    let migration = &answer["return"];
    check_requests(&run, migration)?;
    run["migration"] = migration.clone();
    Ok(run)
}

/// Returns ratios of our runs to those of the same rounds, each the median over the rounds.
pub(super) fn compare(ours: &[&Value], postcopy: &[&Value]) -> Value {
    let ratio = |key: &str| {
        let pointer = format!("/latency_us/{key}");
        let rounds = ours.iter().zip(postcopy);
        let ratios = rounds
            .filter_map(|(ours, theirs)| Some(number(ours, &pointer)? / number(theirs, &pointer)?));
        median(ratios.collect())
    };
    let requested = postcopy.iter().filter_map(|run| {
        Some(number(run, "/migration/ram/postcopy-requests")? / number(run, "/faults")?)
    });
    json!({
        "latency_p50_ours_to_postcopy": ratio("p50"),
        "latency_p90_ours_to_postcopy": ratio("p90"),
        "latency_p99_ours_to_postcopy": ratio("p99"),
        "requests_to_faults": median(requested.collect()),
        "background_bytes_per_second": BACKGROUND,
        "runs": postcopy,
    })
}

fn capabilities() -> String {
    let on = |name: &str| json!({"capability": name, "state": true});
    let all = json!({"capabilities": [on("postcopy-ram"), on("postcopy-preempt")]});
    format!("migrate-set-capabilities={all}")
}

/// Checks that the guest's faults are requests for pages to the source.
fn check_requests(run: &Value, migration: &Value) -> anyhow::Result<()> {
    let status = migration["status"].as_str().unwrap_or("?");
    ensure!(
        matches!(status, "postcopy-active" | "completed"),
        "the migration is in state {status:?} instead of post-copy"
    );
    let faults = run["faults"].as_u64().context("faults")?;
    let requests = migration["ram"]["postcopy-requests"].as_u64();
    let requests = requests.context("QEMU does not say how many pages were requested")?;
    ensure!(
        faults >= FAULTS_MIN,
        "the guest had {faults} faults, and {FAULTS_MIN} are the least to compare"
    );
    ensure!(
        requests * 100 >= faults * REQUESTED_PERCENT_MIN,
        "QEMU requested {requests} pages, and the guest had {faults} faults: the background \
         stream brought too many of them (limit {REQUESTED_PERCENT_MIN} %); use a machine that does less"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_must_be_many_and_requests_of_pages() {
        let check = |faults: u64, requests: u64, status: &str| {
            let migration = json!({"status": status, "ram": {"postcopy-requests": requests}});
            check_requests(&json!({"faults": faults}), &migration)
        };
        assert!(check(10_000, 6000, "postcopy-active").is_ok());
        assert!(check(10_000, 11_000, "completed").is_ok());
        let few = check(FAULTS_MIN - 1, 11_000, "completed").unwrap_err();
        assert!(few.to_string().contains("2999"), "{few}");
        let local = check(10_000, 5999, "postcopy-active").unwrap_err();
        assert!(local.to_string().contains("5999"), "{local}");
        let failed = check(10_000, 10_000, "failed").unwrap_err();
        assert!(failed.to_string().contains("failed"), "{failed}");
        assert!(check_requests(&json!({"faults": 5000}), &json!({"status": "completed"})).is_err());
    }

    #[test]
    fn capabilities_are_a_step_of_the_control_program() {
        let (command, arguments) = capabilities()
            .split_once('=')
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .unwrap();
        assert_eq!(command, "migrate-set-capabilities");
        let arguments: Value = serde_json::from_str(&arguments).unwrap();
        assert_eq!(
            arguments["capabilities"][1]["capability"],
            "postcopy-preempt"
        );
    }
}
