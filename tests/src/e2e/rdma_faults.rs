//! Scenarios of RDMA failures, without a guest: the program
//! `rdma-faults` accesses memory in its place.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, on_the_way_to_2, remove_rxe};
use super::donor::{DONOR, Donor};
use super::guest::{SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::{Host, RemoteProcess};

/// Deadline of the conformance suite of all transports on emulated hosts.
const CONFORMING_DEADLINE: Duration = Duration::from_secs(120);
/// Upper bound of the time until an error: the adapter's retries, with a margin for emulation.
const REFUSED_MS_MAX: f64 = 10_000.0;
/// Initial duration of a link outage, in milliseconds.
const OUTAGE_MS: u32 = 200;
/// Step by which an outage that was too short or too long is adjusted.
const OUTAGE_STEP_MS: u32 = 50;
/// Longest outage that is judged, in milliseconds; a busy host can make one longer, and it is then
/// repeated.
const OUTAGE_MS_MAX: f64 = 250.0;
/// Longest access during an outage: the outage and one retry of the adapter. SoftRoCE asks for a
/// retry every 67 ms; doubled for emulation.
const OUTAGE_TOUCH_MS_MAX: f64 = 2.0 * (OUTAGE_MS as f64 + 67.0);
/// Shortest outage that has an effect.
const OUTAGE_MS_MIN: f64 = 100.0;
/// Maximum number of outages until one has a usable duration.
const OUTAGES_MAX: usize = 10;
/// Longest access when READs are never answered again: the timeout of the adapter or of the lane,
/// and a read over TCP.
const SILENT_TOUCH_MS_MAX: f64 = 6000.0;
/// Prefix of the message about a failed lane.
const READ_FAILED: &str = "READ failed on queue pair ";
/// Deadline for RDMA to recover after some outages: attempts are up to 30 s apart.
const RECONNECT_TIME_MAX: Duration = Duration::from_secs(60);
/// Accesses to wait for, so that any access that began during a fault has ended.
pub(super) const TOUCHES_MORE: u64 = 50;
/// Protocol number of UDP, and the port of RoCE version 2 (InfiniBand Architecture Specification,
/// annex A17).
const ROCE: (u8, u16) = (17, 4791);

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "rdma_conforms",
        about: "RDMA passes the suite of all transports",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: conforms,
    },
    Scenario {
        name: "rdma_lies",
        about: "a wrong key, packet number or queue pair ends in time, with a named error or TCP",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: lies,
    },
    Scenario {
        name: "rdma_faults",
        about: "outage, silence and a restarted donor: what is specified, and no wrong byte",
        needs_product: true,
        // The times above are those of this kernel's SoftRoCE: on 6.12 a READ failed after 219 ms.
        hosts: Hosts::TWO_6_1,
        run: faults,
    },
];

fn conforms(context: &Context<'_>) -> Result {
    let one = context.testbed.host(1);
    add_rxe(one)?;
    let argv = ["/share/rdma-faults", "conform", &one.address()];
    let output = one.run(&argv, CONFORMING_DEADLINE)?;
    let last = output.stdout.lines().last().unwrap_or_default();
    ensure!(output.status.code == 0 && last == "CONFORMS", "{output:?}");
    remove_rxe(one)?;
    Ok(Verdict::Pass)
}

fn lies(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let donor = Donor::lending(context, "64M", &[])?;
    let one = context.testbed.host(1);
    // Completion status of the adapter: 10 is a remote access error, 12 is too many retries.
    for (lie, status) in [
        ("key", "status 10"),
        ("packet-number", "status 12"),
        ("queue-pair", "status 12"),
        ("answers", "status 12"),
    ] {
        let argv = [
            "/share/rdma-faults",
            "spoil",
            DONOR,
            "--here",
            &one.address(),
            "--lie",
            lie,
        ];
        let output = one.run(&argv, Duration::from_secs(60))?;
        ensure!(output.status.code == 0, "{lie}: {output:?}");
        let line = output.stdout.lines().last().context("no result")?;
        let found: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        for (text, time) in [
            ("error", "error_after_ms"),
            ("rdma", "rdma_after_ms"),
            ("auto", "auto_after_ms"),
        ] {
            let said = found[text].as_str().unwrap_or_default();
            // Verb, status, queue pair, device and peer.
            ensure!(
                [
                    "READ failed on queue pair ",
                    " of rxe0 to 10.77.0.1:",
                    status
                ]
                .iter()
                .all(|part| said.contains(part)),
                "{lie}, {text}: {found}"
            );
            ensure!(
                found[time].as_f64().is_some_and(|ms| ms <= REFUSED_MS_MAX),
                "{lie}, {text}: {found}"
            );
        }
        context.note(format!(
            "{lie}: {} after {} ms (emulated)",
            found["error"], found["error_after_ms"]
        ));
    }
    donor.stop(context)?;
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}

fn faults(context: &Context<'_>) -> Result {
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    add_rxe(one)?;
    add_rxe(two)?;
    let donor = Donor::lending(context, "128M", &["--lease-seconds", "300"])?;
    let process = walk(one, &[])?;
    process.wait_for_line("WALKING rdma", SHORT)?;
    context.note(outlasted(one, &process)?);

    // TCP continues to work; RDMA does not.
    let before = so_far(&process)?;
    let failed = process.stderr().matches(READ_FAILED).count();
    one.check(&["sh", "-c", &on_the_way_to_2(ROCE, "loss 100%")], SHORT)?;
    // A WRITE may fail first, and an outage that was too long may have failed READs.
    let error = process.wait_for_nth_line(READ_FAILED, failed, SHORT)?;
    ensure!(
        [
            " of rxe0 to 10.77.0.2:7700",
            "status 12",
            "pages go on over TCP"
        ]
        .iter()
        .all(|part| error.contains(part)),
        "{error}"
    );
    let silent = after_touches(&process, TOUCHES_MORE)?;
    context.testbed.clear_netem()?;
    let back = connected(&process)?;
    let longest = silent["longest_ms"].as_f64().unwrap_or(f64::NAN);
    ensure!(
        longest <= SILENT_TOUCH_MS_MAX
            && back["failures"].as_u64() > before["failures"].as_u64()
            && back["events"] == Value::Array(Vec::new()),
        "{silent}, then {back}"
    );
    context.note(format!(
        "RDMA packets dropped: longest touch {longest:.0} ms, then over TCP"
    ));

    donor.kill()?;
    let again = Donor::lending(context, "128M", &[])?;
    let output = process.wait(Duration::from_secs(30))?;
    ensure!(
        output.status.code == exit::DONOR_LOST && output.stdout.contains("LOST "),
        "a donor that forgot its leases: {output:?}"
    );
    again.stop(context)?;
    remove_rxe(one)?;
    remove_rxe(two)?;
    Ok(Verdict::Pass)
}

/// Checks that an outage costs time but causes no failure if it is shorter than the adapter's
/// retries. Returns a summary.
fn outlasted(host: &Host, process: &RemoteProcess) -> anyhow::Result<String> {
    let mut others = Vec::new();
    let mut wanted = OUTAGE_MS;
    for _ in 0..OUTAGES_MAX {
        let before = connected(process)?;
        let took = outage(host, wanted)?;
        let after = after_touches(process, TOUCHES_MORE)?;
        let longest = after["longest_ms"].as_f64().unwrap_or(f64::NAN);
        let said = format!("outage of {took:.0} ms: longest touch {longest:.0} ms");
        if took > OUTAGE_MS_MAX || longest < OUTAGE_MS_MIN {
            wanted = if took > OUTAGE_MS_MAX {
                wanted.saturating_sub(OUTAGE_STEP_MS)
            } else {
                wanted + OUTAGE_STEP_MS
            };
            others.push(said);
            continue;
        }
        ensure!(
            longest <= OUTAGE_TOUCH_MS_MAX && after["failures"] == before["failures"],
            "the adapter's retries do not outlast it: {said}: {after}"
        );
        return Ok(format!("{said}, no failure"));
    }
    anyhow::bail!(
        "no outage took less than {OUTAGE_MS_MAX} ms and was felt for {OUTAGE_MS_MIN} ms: {others:?}"
    );
}

/// Cuts the link for this many milliseconds, and returns an upper bound of the actual duration.
fn outage(host: &Host, wanted: u32) -> anyhow::Result<f64> {
    // Starting a program can take longer than the outage. Therefore `tc` already runs and waits for
    // commands (system call 0 on descriptor 0), and the shell's built-in clock measures the time.
    let script = format!(
        "rm -f /tmp/tc; mkfifo /tmp/tc; tc -b - </tmp/tc & p=$!; exec 3>/tmp/tc; i=0; \
         until read call from _ </proc/$p/syscall && [ \"$call $from\" = '0 0x0' ]; do \
         i=$((i+1)); [ $i -lt 1000000 ] || exit 1; done; \
         now() {{ read t _ </proc/uptime; t=${{t%.*}}${{t#*.}}; }}; \
         now; begin=$t; echo qdisc add dev link2 root netem loss 100% >&3; \
         until now; [ $t -ge $((begin + {})) ]; do :; done; \
         echo qdisc del dev link2 root >&3; exec 3>&-; wait $p || exit 1; now; echo $((t - begin))",
        wanted / 10
    );
    let said = host.check(&["sh", "-c", &script], SHORT)?;
    let hundredths: u32 = said.trim().parse().with_context(|| said.clone())?;
    Ok(f64::from(hundredths) * 10.0)
}

/// Polls a walker until its pages travel by RDMA.
fn connected(process: &RemoteProcess) -> anyhow::Result<Value> {
    let deadline = Instant::now() + RECONNECT_TIME_MAX;
    loop {
        let found = so_far(process)?;
        if found["connected"] == true {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "RDMA is not back: {found}");
    }
}

/// Starts the walker with further flags.
pub(super) fn walk(host: &Host, more: &[&str]) -> anyhow::Result<RemoteProcess> {
    let argv = [&["/share/rdma-faults", "walk", DONOR], more].concat();
    Ok(host.spawn(&argv)?)
}

/// Stops a walker, which must have found every byte right.
pub(super) fn done(process: RemoteProcess) -> anyhow::Result<()> {
    process.kill(libc::SIGTERM)?;
    let output = process.wait(SHORT)?;
    ensure!(output.status.code == 0, "{output:?}");
    let line = output.stdout.lines().last().unwrap_or_default();
    let found = json(line, "DONE ")?;
    ensure!(
        found["corrupt_bytes"] == 0 && found["touches"].as_u64() > Some(0),
        "{found}"
    );
    Ok(())
}

/// Requests the walker's counters.
fn so_far(process: &RemoteProcess) -> anyhow::Result<Value> {
    let known = process.stdout().matches("SO FAR ").count();
    process.kill(libc::SIGUSR1)?;
    let line = process.wait_for_nth_line("SO FAR ", known, SHORT)?;
    let found = json(&line, "SO FAR ")?;
    ensure!(found["corrupt_bytes"] == 0, "{found}");
    Ok(found)
}

/// Polls a walker until it has made this many more accesses. Returns its counters, which include
/// the longest access.
pub(super) fn after_touches(process: &RemoteProcess, more: u64) -> anyhow::Result<Value> {
    let touches = |value: &Value| value["touches"].as_u64().unwrap_or(0);
    let longest = |value: &Value| value["longest_ms"].as_f64().unwrap_or(0.0);
    let deadline = Instant::now() + SHORT;
    let mut found = so_far(process)?;
    let wanted = touches(&found) + more;
    while touches(&found) < wanted {
        ensure!(Instant::now() < deadline, "no touches: {found}");
        let before = longest(&found);
        found = so_far(process)?;
        found["longest_ms"] = Value::from(before.max(longest(&found)));
    }
    Ok(found)
}

pub(super) fn json(line: &str, prefix: &str) -> anyhow::Result<Value> {
    let text = line.strip_prefix(prefix).with_context(|| line.to_owned())?;
    serde_json::from_str(text).with_context(|| line.to_owned())
}
