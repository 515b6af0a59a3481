//! Scenarios of guests that only read.

use std::time::Duration;

use anyhow::ensure;
use serde_json::Value;

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, exit};
use super::status::{number, status};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// How long the guest may take for a pass over its file.
const PASS_DEADLINE: Duration = Duration::from_secs(300);
/// Pages of the file.
const FILE_PAGES: u64 = (200 << 20) / 4096;
/// Fetched pages for each page that may be written back: the guest's kernel writes a little of its
/// own.
const FETCHED_PER_WRITE_BACK: u64 = 100;

/// Fills a file in memory and reads it twice, so that what was written leaves and the kernel has
/// noted each page as used, which changes the page's `struct page`; then reads it twice more.
/// Pauses are for a look at the counters. The kernel may print its command line, which must not
/// have the markers themselves.
const WORK: &str = "dd if=/dev/urandom of=/tmp/file bs=1M count=200 2>/dev/null; md5sum </tmp/file; \
    md5sum </tmp/file; echo PASS-$((0)); sleep 3; md5sum </tmp/file; md5sum </tmp/file; echo PASS-$((2)); sleep 3";

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "reads_stay_reads",
        about: "a guest that reads a file larger than its local memory has nothing written back",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| on(context, &[]),
    },
    Scenario {
        name: "reads_stay_reads_old_kernel",
        about: "the same on a kernel that cannot map pages write-protected as it resolves a fault",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| on(context, &[]),
    },
];

/// Runs such a guest with further flags.
pub(super) fn on(context: &Context<'_>, flags: &[&'static str]) -> Result {
    let donor = Donor::start(context)?;
    let mut guest = Guest::remote(1, WORK);
    guest.more.extend(["--name", "reader"]);
    guest.more.extend(flags);
    let process = guest.boot(context)?;
    let look = |marker: &str| -> anyhow::Result<Value> {
        process.wait_for_line(marker, PASS_DEADLINE)?;
        status(context.testbed.host(1), &["reader"])
    };
    let before = look("PASS-0")?;
    let after = look("PASS-2")?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    donor.stop(context)?;
    let sums = guest.output.stdout.lines().filter_map(|line| {
        let (sum, rest) = line.split_once("  ")?;
        (sum.len() == 32 && rest.trim() == "-").then_some(sum)
    });
    let sums: Vec<&str> = sums.collect();
    ensure!(
        sums.len() == 4 && sums.iter().all(|sum| *sum == sums[0]),
        "the passes read {sums:?}"
    );
    let grown = |key: &str| -> anyhow::Result<u64> {
        let pointer = format!("/vms/0/{key}");
        Ok(number(&after, &pointer)?.saturating_sub(number(&before, &pointer)?))
    };
    let fetched = grown("nodes/1/pages_fetched")?;
    let written_back = grown("nodes/1/pages_written_back")?;
    let unchanged = grown("evictions/unchanged")?;
    context.note(format!(
        "two passes over 200 MiB with 128 MiB local: {fetched} pages fetched, {written_back} written back, \
         {unchanged} counted as dirty and were dropped as equal"
    ));
    ensure!(
        fetched >= FILE_PAGES,
        "{fetched} pages were fetched: the file did not leave local memory"
    );
    ensure!(
        written_back * FETCHED_PER_WRITE_BACK <= fetched,
        "{written_back} pages written back for {fetched} fetched, 1 for {FETCHED_PER_WRITE_BACK} is the limit"
    );
    Ok(Verdict::Pass)
}
