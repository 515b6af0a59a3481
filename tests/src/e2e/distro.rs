//! Scenarios with a whole distribution as the guest.

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, remove_rxe};
use super::donor::Donor;
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::distro::comparison::{Comparison, Measured, donor_flags, measure};
use crate::distro::{ssi, work};
use crate::testbed::Tap;

/// Scenarios that run only by name, since making the image and booting it takes minutes.
pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "distro_boot",
        about: "Debian boots from its disk to a login prompt, has a network, and keeps what a database wrote",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: boots,
    },
    Scenario {
        name: "distro_work_tcp",
        about: "Debian does verified work in memory that is mostly on a donor, by TCP, and reboots",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| works(context, "tcp", work::ALL, true),
    },
    Scenario {
        name: "distro_work_rdma",
        about: "the same by RDMA",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| works(context, "rdma", work::ALL, true),
    },
    Scenario {
        name: "distro_ssi",
        about: "Debian boots on one host, and does verified work with a CPU on each of two",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: works_on_two_hosts,
    },
    Scenario {
        name: "distro_memtester_tcp",
        about: "Debian tests half of its memory, twice what is local, by TCP",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| works(context, "tcp", &[work::HALF_OF_MEMORY], false),
    },
    Scenario {
        name: "distro_memtester_rdma",
        about: "the same by RDMA",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| works(context, "rdma", &[work::HALF_OF_MEMORY], false),
    },
];

/// Boots the guest with most of its memory on a donor, runs these workloads, optionally reboots it,
/// and powers it off.
fn remote(
    context: &Context<'_>,
    transport: &str,
    local_memory: &str,
    pieces: &[work::Work],
    reboots: bool,
) -> anyhow::Result<(Measured, Value)> {
    let donor = Donor::lending(
        context,
        "1G",
        &[
            "--rdma-device",
            if transport == "rdma" { "rxe0" } else { "none" },
        ],
    )?;
    let flags = [&donor_flags(local_memory)[..], &["--transport", transport]].concat();
    let result = one(context, "remote", &flags, pieces, reboots)?;
    donor.stop(context)?;
    let count = result.1.pointer("/faults/remote/count");
    ensure!(
        count
            .and_then(Value::as_u64)
            .is_some_and(|count| count > 1000),
        "remote faults: {count:?}"
    );
    ensure!(
        result.1["transport"]["kind"] == transport,
        "{}",
        result.1["transport"]
    );
    Ok(result)
}

/// Boots the guest with these flags; its console is logged to an artifact of the scenario.
fn one(
    context: &Context<'_>,
    name: &str,
    flags: &[&str],
    pieces: &[work::Work],
    reboots: bool,
) -> anyhow::Result<(Measured, Value)> {
    let console = console(context, name)?;
    let (host, dir) = (context.testbed.host(1), &context.artifacts);
    measure(host, dir, flags, console, pieces, reboots)
}

/// Logs the guest's console to an artifact of the scenario.
fn console(context: &Context<'_>, name: &str) -> anyhow::Result<Tap> {
    let path = context.artifacts.join(format!("{name}-console.log"));
    let mut log = std::fs::File::create(&path).with_context(|| path.display().to_string())?;
    Ok(Box::new(move |bytes: &[u8]| {
        // Best effort: the log only serves to analyse a failure.
        let _ = log.write_all(bytes);
    }))
}

/// Returns a skip with its reason if Debian cannot be booted.
fn missing(context: &Context<'_>) -> Option<Verdict> {
    let reason = context.share.distro_missing.as_ref()?;
    Some(Verdict::Skip(format!("no image of Debian: {reason}")))
}

fn boots(context: &Context<'_>) -> Result {
    if let Some(skipped) = missing(context) {
        return Ok(skipped);
    }
    let (measured, report) = remote(
        context,
        "tcp",
        // With 256 MiB everything would fit the local memory.
        "128M",
        &[work::NETWORK, work::DATABASE],
        false,
    )?;
    context.note(format!(
        "login prompt after {:.0} s, {} remote faults (emulated)",
        measured.to_login.as_secs_f64(),
        report["faults"]["remote"]["count"]
    ));
    Ok(Verdict::Pass)
}

fn works_on_two_hosts(context: &Context<'_>) -> Result {
    if let Some(skipped) = missing(context) {
        return Ok(skipped);
    }
    let node = Donor::lending(context, "1G", &["--cpus", "1"])?;
    let console = console(context, "guest")?;
    let worked = ssi::work_on_two_hosts(context.testbed.host(1), &context.artifacts, console)?;
    let report = node.end(context)?;
    ensure!(report["lent_bytes"] == 0, "the node's report: {report}");
    context.note(format!(
        "{} (emulated); host 2: {}",
        worked.json(),
        worked.report["nodes"][1]["transfers"]
    ));
    Ok(Verdict::Pass)
}

/// Runs the workloads with most of the memory on a donor, and then with all of it local.
fn works(context: &Context<'_>, transport: &str, pieces: &[work::Work], reboots: bool) -> Result {
    if let Some(skipped) = missing(context) {
        return Ok(skipped);
    }
    let hosts = context.testbed.hosts();
    if transport == "rdma" {
        hosts.iter().try_for_each(add_rxe)?;
    }
    let (there, report) = remote(context, transport, "256M", pieces, reboots)?;
    if transport == "rdma" {
        hosts.iter().try_for_each(remove_rxe)?;
    }
    let (here, _) = one(context, "local", &[], pieces, false)?;
    let comparison = Comparison { here, there };
    let path = context.artifacts.join("comparison.json");
    std::fs::write(&path, serde_json::to_string_pretty(&comparison.json())?)?;
    let mut note = format!("{} remote faults;", report["faults"]["remote"]["count"]);
    for (name, here, there) in comparison.rows() {
        // Writing to a String cannot fail.
        let _ = write!(note, " {name} {there:.0} s, local {here:.0} s;");
    }
    context.note(note);
    Ok(Verdict::Pass)
}
