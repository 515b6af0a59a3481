//! Scenarios of the status commands.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::published::Published;
use crate::testbed::Host;

/// Minimum of faults for meaningful percentiles.
const FAULTS_MIN: u64 = 500;
/// Number of the guest's pages.
const PAGES: u64 = (256 << 20) / 4096;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "status_while_running",
    about: "status and heat map of a running guest agree with each other, the donor and the report",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: status_while_running,
}];

fn status_while_running(context: &Context<'_>) -> Result {
    let (here, there) = (context.testbed.host(1), context.testbed.host(2));
    let donor = Donor::start(context)?;
    let mut guest = Guest::small(2, "faultprobe --bytes 64M");
    guest.more.extend(["--name", "looked-at"]);
    let process = guest.boot(context)?;

    let deadline = Instant::now() + GUEST_DEADLINE;
    let first = loop {
        let now = status(here, &["looked-at"])?;
        // Each is read at its own time.
        let of_donor = number(&now, "/vms/0/nodes/1/faults/count")?;
        if number(&now, "/vms/0/faults/remote/count")?.min(of_donor) >= FAULTS_MIN {
            break now;
        }
        ensure!(Instant::now() < deadline, "no remote faults: {now}");
    };
    ensure!(first["vms"][0]["state"] == "running", "{first}");
    ensure!(first["vms"][0]["boot"]["to_init_ms"].is_number(), "{first}");
    ensure!(
        number(&first, "/vms/0/memory/cached_bytes")?
            <= number(&first, "/vms/0/memory/cache_bytes")?,
        "more is cached than may be: {first}"
    );
    let link = &first["vms"][0]["nodes"][1]["link"];
    ensure!(
        link["reachable"] == true && link["round_trip_us"].as_f64().is_some_and(|us| us > 0.0),
        "link: {link}"
    );

    // Pages that move while the map is made may be counted twice: many, if its maker has to wait.
    let cache = number(&first, "/vms/0/memory/cache_bytes")? / 4096;
    let inside =
        |heat: &Value| sum(heat, "resident") + sum(heat, "leaving") + sum(heat, "arriving");
    let heat = loop {
        let heat = status(here, &["--heat"])?;
        if inside(&heat) <= cache + cache / 8 {
            break heat;
        }
        ensure!(
            Instant::now() < deadline,
            "{} pages here, with a cache of {cache}",
            inside(&heat)
        );
    };
    let heat_of = |key: &str| sum(&heat, key);
    ensure!(
        heat_of("looked_at") == PAGES,
        "{} pages looked at",
        heat_of("looked_at")
    );
    let parts = ["resident", "leaving", "arriving", "remote", "untouched"];
    let all: u64 = parts.iter().map(|key| heat_of(key)).sum();
    ensure!(all == PAGES, "{all} pages in all");
    let inside = inside(&heat);
    ensure!(
        inside > cache / 2,
        "{inside} pages here, with a cache of {cache}"
    );
    ensure!(heat_of("remote") > 0, "nothing is remote");
    ensure!(heat_of("recent_faults") > 0, "nothing was touched lately");
    let map = here.check(&["ssi-hv", "status", "looked-at", "--heat"], SHORT)?;
    ensure!(
        map.contains("every page was looked at") && map.contains("at home on node 1"),
        "{map}"
    );
    let screen = here.check(&["ssi-hv", "status"], SHORT)?;
    std::fs::write(
        context.artifacts.join("status.txt"),
        format!("{screen}\n{map}"),
    )?;

    let node = status(there, &[])?;
    ensure!(number(&node, "/nodes/0/leases")? == 1, "{node}");
    ensure!(
        number(&node, "/nodes/0/pages_read")? >= number(&first, "/vms/0/nodes/1/pages_fetched")?,
        "the donor has read fewer pages than were fetched before: {node}"
    );

    let last = status(here, &[]);
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(64 << 20)?;
    // The guest may have ended before the last query.
    for seen in [&Ok(first), &Ok(heat), &last].into_iter().flatten() {
        for pointer in [
            "/faults/remote/count",
            "/faults/zero/count",
            "/faults/minor/count",
            "/faults/write_protect/count",
            "/nodes/1/pages_fetched",
            "/nodes/1/pages_written_back",
        ] {
            let Some(then) = seen
                .pointer(&format!("/vms/0{pointer}"))
                .and_then(Value::as_u64)
            else {
                continue;
            };
            let end = number(&guest.report, pointer)?;
            ensure!(
                then <= end,
                "{pointer}: {then} while running, {end} at the end"
            );
        }
    }
    ensure!(
        guest.report["nodes"][1]["faults"]["count"] == guest.report["faults"]["remote"]["count"],
        "one donor served all remote faults: {}",
        guest.report["nodes"]
    );
    let after = here.check(&["ssi-hv", "status"], SHORT)?;
    ensure!(after.starts_with("no VM"), "{after}");
    donor.stop(context)?;
    Ok(Verdict::Pass)
}

/// Returns the output of `ssi-hv status --json` on a host; `more` are further arguments.
pub(super) fn status(host: &Host, more: &[&str]) -> anyhow::Result<Value> {
    let argv = [&["/share/ssi-hv", "status", "--json"], more].concat();
    Published::Status.parse(&host.check(&argv, SHORT)?)
}

pub(super) fn number(value: &Value, pointer: &str) -> anyhow::Result<u64> {
    let found = value.pointer(pointer).and_then(Value::as_u64);
    found.with_context(|| format!("no number at {pointer} in {value}"))
}

/// Sums a number over all blocks of the first VM's heat map.
fn sum(value: &Value, key: &str) -> u64 {
    let extents = value["vms"][0]["heat"]["extents"].as_array();
    let blocks = extents
        .into_iter()
        .flatten()
        .filter_map(|extent| extent["blocks"].as_array());
    blocks
        .flatten()
        .filter_map(|block| block[key].as_u64())
        .sum()
}
