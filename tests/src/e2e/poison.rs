//! The scenario of a guest that loses a donor with the only copy of some of its memory, and goes
//! on.

use std::time::Instant;

use anyhow::{Context as _, ensure};

use super::donor::{DONOR_2, Donor};
use super::guest::{Finished, GUEST_DEADLINE, Guest, exit, faultprobes};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "poison",
    about: "one of two donors is killed for good: a process with memory on it is killed by a machine check, one with memory on the other finishes, and the guest goes on",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: poison,
}];

/// Memory of each process, all of it on one donor. Both together exceed the cache of 48 MiB.
const PROBE_BYTES: u64 = 64 << 20;
const PROBE_PAGES: u64 = PROBE_BYTES / 4096;
/// Pages that are written to the donor that is killed before it is.
const WRITTEN_MIN: u64 = 8000;
/// Pages that come back from it before that: its process has then filled its memory, and allocates
/// no more. A kernel that clears a lost free page for a new use panics.
const FETCHED_MIN: u64 = 4000;
/// The process on the donor that is lost would never end. The other one visits its memory until
/// some time after the loss. Each is waited for, so that their order does not matter.
const WORK: &str = "faultprobe --bytes 64M --node 2 --passes 100 & lost=$!; \
    faultprobe --bytes 64M --node 1 --passes 3; echo kept=$?.; \
    wait $lost; echo lost=$?.; faultprobe --bytes 32M --node 1 --passes 1; echo after=$?.; \
    dmesg | grep -i -E 'mce|memory failure|movable' | head -n 12";

fn poison(context: &Context<'_>) -> Result {
    let here = context.testbed.host(1);
    let (kept, lost) = (Donor::start(context)?, Donor::second(context)?);
    let mut guest = Guest {
        // Debian's cloud kernels are built without machine checks.
        kernel: "backports-vmlinuz",
        memory: "1G",
        local_memory: Some("256M"),
        more: vec!["--numa", "expose", "--donor", DONOR_2, "--transport", "tcp"],
        ..Guest::remote(1, WORK)
    };
    guest.more.extend(["--name", "loses", "--donor-grace", "3"]);
    guest.more.extend(["--on-lost-memory", "poison"]);
    let process = guest.boot(context)?;
    let now = || status(here, &["loses"]);
    let deadline = Instant::now() + GUEST_DEADLINE;
    loop {
        let now = now()?;
        let of = |key: &str| number(&now, &format!("/vms/0/nodes/2/{key}"));
        if of("pages_written_back")? >= WRITTEN_MIN && of("pages_fetched")? >= FETCHED_MIN {
            ensure!(now["vms"][0]["memory"]["lost"].is_null(), "{now}");
            break;
        }
        ensure!(Instant::now() < deadline, "nothing is written back: {now}");
    }
    lost.kill()?;
    for line in ["kept=0.", "lost=135.", "after=0."] {
        process.wait_for_line(line, GUEST_DEADLINE)?;
    }
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let report = &guest.report;
    let of = |key: &str| number(report, &format!("/memory/lost/{key}"));
    let (pages, checks) = (of("pages")?, of("machine_checks")?);
    // What was resident is not lost, and neither is what was never written.
    ensure!(
        (WRITTEN_MIN / 4..=PROBE_PAGES + 512).contains(&pages),
        "{pages} pages are lost: {report}"
    );
    ensure!(
        checks >= 1 && of("poisoned")? >= 1 && of("bytes")? == pages * 4096,
        "{report}"
    );
    let ranges = report["memory"]["lost"]["ranges"].as_array();
    ensure!(ranges.is_some_and(|ranges| !ranges.is_empty()), "{report}");
    let probes = faultprobes(&guest.output.stdout)?;
    ensure!(
        probes.len() == 2 && probes.iter().all(|probe| probe["corrupt_bytes"] == 0),
        "{probes:?}"
    );
    ensure!(
        report["memory"]["lost"]["nodes"] == serde_json::json!([2]),
        "{report}"
    );
    let errors = report["errors"].as_array().context("no errors")?;
    ensure!(
        errors.iter().any(|error| error
            .as_str()
            .is_some_and(|text| text.contains(&format!("{pages} pages")))),
        "{errors:?}"
    );
    context.note(format!(
        "{pages} pages were lost; {checks} machine check(s), {} freed by the guest",
        report["memory"]["lost"]["recovered"]
    ));
    kept.stop(context)?;
    Ok(Verdict::Pass)
}
