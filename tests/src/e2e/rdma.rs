//! Scenarios in which pages travel by RDMA, over SoftRoCE.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, bare_read_us, on_the_way_to_2, remove_rxe};
use super::boot::median_exceeds;
use super::donor::{DONOR, DONOR_2, Donor};
use super::guest::{Finished, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::{Host, Output};

/// Protocol number of TCP, and the port of [`DONOR`].
const DONOR_TCP: (u8, u16) = (6, 7700);
/// READs of one page by the probe.
const READS: u64 = 3000;
/// READs of `ib_read_lat` beside these.
const BARE_READS: u32 = 1000;
/// Limit of the median ratio of their p50, and how many pairs it is of at most.
const RATIO_MAX: f64 = 1.25;
const RATIO_PAIRS: usize = 7;
/// READs of the probe over a link with packet loss.
const LOSSY_READS: u64 = 500;
/// How often 64 pages are written over that link.
const LOSSY_ROUNDS: u64 = 8;
const LOSS_PERCENT: u8 = 5;
/// Timeout after which the adapter repeats a READ, in microseconds.
const RETRY_US: f64 = 60_000.0;
/// Upper bound of wake-ups of the donor's process during the READs, for lease renewals and its
/// timers. Serving the READs itself would need one for each. (CPU time is a weaker measure, since
/// the kernel's work for READs is charged to the process that it interrupts.)
const WAKEUPS_MAX: u64 = READS / 20;
/// Lower bound of its wake-ups before that, while it serves each page of the lease over TCP. It
/// shows that the count is meaningful.
const TCP_WAKEUPS_MIN: u64 = 10;
/// Upper bound of the time until a READ fails, in milliseconds. It is shorter than the timeout of a
/// silent lane, so that the adapter must have reported the failure.
const REFUSAL_MS_MAX: u64 = 3500;
/// Workload of guests: enough memory that pages leave and return.
const PROBE: &str = "faultprobe --bytes 128M";
/// Minimum of pages that such a guest reads from its donor.
const READ_PAGES_MIN: u64 = 1000;
/// Upper bound of pages read over TCP for the initial measurement.
const MEASURING_READS_MAX: u64 = 64;
/// Guests that are run for a measurement that finds RDMA faster.
const MEASURED_MAX: u32 = 4;
/// Minimum of faults of each kind for a meaningful comparison.
const COMPARED_FAULTS_MIN: u64 = 500;
/// Upper bound of a fault by RDMA at p50, relative to one by TCP in the same guest.
const RATIO_TO_TCP_MAX: f64 = 1.1;

/// Scenarios that compare times.
pub(super) const MEASURED: &[Scenario] = &[
    Scenario {
        name: "rdma_probe",
        about: "READs bring what WRITEs left, about as fast as bare ones, use no processor of the donor's, and end with the lease",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: probe,
    },
    Scenario {
        name: "rdma_loss",
        about: "READs and WRITEs over a link that loses packets are sent again by the adapter, and come right",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: loss,
    },
    Scenario {
        name: "rdma_boot",
        about: "a guest whose pages travel by RDMA and by TCP boots, no byte is lost, and RDMA is not slower",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: boot,
    },
];

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "rdma_choice",
    about: "auto takes RDMA where both ends have it; rdma fails clearly where one has not",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: choice,
}];

fn probe(context: &Context<'_>) -> Result {
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    add_rxe(one)?;
    add_rxe(two)?;
    let donor = Donor::lending(context, "64M", &["--rdma-device", "rxe0"])?;
    let reads = READS.to_string();
    let idle = wakeups(two, donor.pid())?;
    let process = one.spawn(&["/share/rdma-probe", DONOR, "--reads", &reads])?;
    process.wait_for_line("FILLED", SHORT)?;
    let before = wakeups(two, donor.pid())?;
    process.wait_for_line("READ", Duration::from_secs(60))?;
    let after = wakeups(two, donor.pid())?;
    let output = process.wait(SHORT)?;
    let found = probed(&output, READS)?;
    ensure!(
        found["pages_read_by_donor"] == 0 && found["pages_written_by_donor"] == 0,
        "the donor's process served pages: {found}"
    );
    let refused_after = found["after_release_ms"].as_u64().unwrap_or(u64::MAX);
    ensure!(
        refused_after <= REFUSAL_MS_MAX,
        "a READ of a lease that had ended failed after {refused_after} ms only: {found}"
    );
    let by_tcp = before.saturating_sub(idle);
    ensure!(
        by_tcp >= TCP_WAKEUPS_MIN,
        "the donor's process was woken {by_tcp} times while it served pages"
    );
    let woken = after.saturating_sub(before);
    ensure!(
        woken <= WAKEUPS_MAX,
        "the donor's process was woken {woken} times for {READS} READs"
    );
    let first = (p50_us(&found)?, bare_read_us(one, two, BARE_READS)?);
    let ratio = |(ours, bare): &(f64, f64)| ours / bare;
    let mut pairs = vec![first];
    let slow = loop {
        let ratios: Vec<f64> = pairs.iter().map(ratio).collect();
        if let Some(slow) = median_exceeds(RATIO_MAX, &ratios, RATIO_PAIRS) {
            break slow;
        }
        let again = ["/share/rdma-probe", DONOR, "--reads", &reads];
        let found = probed(&one.run(&again, Duration::from_secs(60))?, READS)?;
        pairs.push((p50_us(&found)?, bare_read_us(one, two, BARE_READS)?));
    };
    let measured = pairs.iter().map(|pair| {
        let (ours, bare) = pair;
        format!("{ours:.0}/{bare:.0} us = {:.2}", ratio(pair))
    });
    let measured = measured.collect::<Vec<_>>().join(", ");
    ensure!(
        !slow,
        "a READ of 4 KiB takes more than {RATIO_MAX} times that of ib_read_lat: {measured}"
    );
    context.note(format!(
        "READ of 4 KiB, p50 / that of ib_read_lat: {measured}; the donor's process was woken {woken} times for {READS}, and {by_tcp} times before, for pages over TCP; after the lease: {} ({} ms; emulated)",
        found["after_release"].as_str().unwrap_or_default(),
        found["after_release_ms"],
    ));
    donor.stop(context)?;
    remove_rxe(one)?;
    remove_rxe(two)?;
    Ok(Verdict::Pass)
}

fn loss(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let donor = Donor::lending(context, "64M", &[])?;
    context.testbed.netem(1, 2, Duration::ZERO, LOSS_PERCENT)?;
    let reads = LOSSY_READS.to_string();
    let rounds = LOSSY_ROUNDS.to_string();
    let argv = [
        "/share/rdma-probe",
        DONOR,
        "--pages",
        "64",
        "--rounds",
        &rounds,
        "--reads",
        &reads,
    ];
    let output = context.testbed.host(1).run(&argv, Duration::from_secs(90));
    context.testbed.clear_netem()?;
    let output = output?;
    let found = probed(&output, LOSSY_READS)?;
    ensure!(
        found["pages_written"] == LOSSY_ROUNDS * 64 && found["failures"] == 0,
        "not all pages were written by RDMA: {found}"
    );
    let p99 = found["p99_us"].as_f64().unwrap_or(0.0);
    ensure!(
        p99 >= RETRY_US,
        "p99 of {p99} us: nothing was lost, so nothing was tested"
    );
    context.note(format!(
        "{LOSS_PERCENT} % of requests lost: p50 {:.0} us, p99 {p99:.0} us (emulated)",
        found["p50_us"].as_f64().unwrap_or(f64::NAN)
    ));
    donor.stop(context)?;
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}

fn p50_us(found: &Value) -> anyhow::Result<f64> {
    found["p50_us"].as_f64().context("the probe has no p50")
}

/// Returns the probe's result, which must be this many READs without a wrong byte.
pub(super) fn probed(output: &Output, reads: u64) -> anyhow::Result<Value> {
    ensure!(
        output.status.code == 0,
        "the probe failed: {}{}",
        output.stdout,
        output.stderr
    );
    let line = output.stdout.lines().last().context("no result")?;
    let found: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
    ensure!(
        found["reads"] == reads && found["corrupt_bytes"] == 0,
        "{line}"
    );
    Ok(found)
}

/// Returns how often the threads of a process have blocked.
fn wakeups(host: &Host, pid: i32) -> anyhow::Result<u64> {
    // A thread may end in the meantime.
    let script = format!("cat /proc/{pid}/task/*/status 2>/dev/null || true");
    let text = host.check(&["sh", "-c", &script], SHORT)?;
    waits_of(&text).with_context(|| format!("no counts of the threads of {pid}"))
}

fn waits_of(status: &str) -> Option<u64> {
    let counts = status
        .lines()
        .filter_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    let counts: Option<Vec<u64>> = counts.map(|count| count.trim().parse().ok()).collect();
    counts
        .filter(|counts| !counts.is_empty())
        .map(|counts| counts.iter().sum())
}

/// Returns the CPU time of a process, user and system, in clock ticks.
pub(crate) fn processor_ticks(host: &Host, pid: i32) -> anyhow::Result<u64> {
    let stat = host.check(&["cat", &format!("/proc/{pid}/stat")], SHORT)?;
    ticks_of(&stat).with_context(|| format!("no times in {stat:?}"))
}

/// Fields 14 and 15 of `/proc/PID/stat`, counted from the end of the name, which may contain
/// anything.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Runs a guest with two donors, of which the first one has RDMA, until that is used. A measurement on
/// emulated hosts may find that TCP is faster, and is then followed.
fn by_both(context: &Context<'_>) -> anyhow::Result<(Finished, Donor, Donor)> {
    let mut guest = Guest {
        memory: "320M",
        local_memory: Some("96M"),
        ..Guest::remote(1, "faultprobe --bytes 96M")
    };
    guest
        .more
        .extend(["--transport", "auto", "--donor", DONOR_2]);
    for attempt in 1.. {
        let donor = Donor::lending(context, "256M", &["--rdma-device", "rxe0"])?;
        let other = Donor::second_lending(context, "256M", &["--rdma-device", "none"])?;
        let guest = guest.run(context)?;
        guest.expect_exit(exit::SHUTDOWN)?;
        guest.faultprobe_over(96 << 20)?;
        let (transport, path) = (
            &guest.report["transport"],
            &guest.report["nodes"][1]["path"],
        );
        if transport["kind"] == "mixed" {
            return Ok((guest, donor, other));
        }
        let page_us = |by: &str| path[by]["page_us"].as_f64();
        ensure!(
            attempt < MEASURED_MAX && page_us("rdma") > page_us("tcp") && page_us("tcp").is_some(),
            "attempt {attempt}: transport {transport}, path {path}: {}",
            guest.output.stderr
        );
        context.note(format!("TCP was measured to be faster: {path}"));
        donor.stop(context)?;
        other.stop(context)?;
    }
    unreachable!("attempts are limited")
}

/// Uses two donors on one host, one with RDMA and one without, so that the same guest has faults of
/// both kinds at the same time.
fn boot(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let (guest, donor, other) = by_both(context)?;
    let rdma = rdma_of(&guest)?;
    ensure!(
        rdma.pages_read >= READ_PAGES_MIN && rdma.failures == 0,
        "{rdma:?}"
    );
    // The measurement decides whether write-backs travel by RDMA as well.
    let bulk_by_rdma = guest.report["nodes"][1]["path"]["bulk"] == "rdma";
    ensure!(
        bulk_by_rdma == (rdma.pages_written > 0),
        "{rdma:?}, {}",
        guest.report["nodes"][1]["path"]
    );
    let count = |path: &str| -> anyhow::Result<u64> {
        let found = guest.report.pointer(path).and_then(Value::as_u64);
        found.with_context(|| format!("{path} in the report"))
    };
    let (fetched, written_back) = (
        count("/nodes/1/pages_fetched")?,
        count("/nodes/1/pages_written_back")?,
    );
    other.stop(context)?;
    let (read, written) = donor.stop(context)?;
    // Prefetched pages use the transport of write-backs. The READs that verified new connections
    // are not counted.
    let ahead_by_tcp = fetched.saturating_sub(rdma.pages_read);
    ensure!(
        ahead_by_tcp == 0 || !bulk_by_rdma,
        "{fetched} pages fetched: {rdma:?}"
    );
    ensure!(
        (ahead_by_tcp..=ahead_by_tcp + MEASURING_READS_MAX).contains(&read),
        "the donor's process served {read} reads of pages, {ahead_by_tcp} are due: {rdma:?}"
    );
    // Write-backs queued behind discards of free pages travel by TCP.
    ensure!(
        written_back == rdma.pages_written + written,
        "{written_back} pages written back, {written} of them by TCP: {rdma:?}"
    );
    let faults = |node: usize| -> anyhow::Result<(u64, f64, f64)> {
        let faults = format!("/nodes/{node}/faults");
        Ok((
            count(&format!("{faults}/count"))?,
            guest.number(&format!("{faults}/latency_us/p50"))?,
            guest.number(&format!("{faults}/stages/fetch/p50"))?,
        ))
    };
    let ((by_rdma, ours, fetch), (by_tcp, theirs, fetch_tcp)) = (faults(1)?, faults(2)?);
    ensure!(
        by_rdma.min(by_tcp) >= COMPARED_FAULTS_MIN,
        "{by_rdma} faults by RDMA and {by_tcp} by TCP: too few to compare"
    );
    context.note(format!(
        "bulk by RDMA: {bulk_by_rdma}; the same guest: p50 of {by_rdma} faults by RDMA {ours:.0} us (fetch {fetch:.0} us), of {by_tcp} by TCP {theirs:.0} us (fetch {fetch_tcp:.0} us), ratio {:.2}; {} pages by WRITE, {written} by TCP (emulated)",
        ours / theirs,
        rdma.pages_written,
    ));
    ensure!(
        ours <= theirs * RATIO_TO_TCP_MAX,
        "faults take {ours} us by RDMA and {theirs} us by TCP"
    );
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}

fn choice(context: &Context<'_>) -> Result {
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    let donor = Donor::start(context)?;
    let refused = |code: i32, text: &str| -> anyhow::Result<()> {
        let guest = by("rdma").run(context);
        let guest = guest.context("a run that is refused leaves a report")?;
        guest.expect_exit(code)?;
        ensure!(
            guest.output.stderr.contains(text),
            "{text:?} is not in {}",
            guest.output.stderr
        );
        Ok(())
    };
    // Replaces the library with a file that is not one.
    let library = "/x86_64-linux-gnu/libibverbs.so.1; [ ! -e $f ] || ";
    let over_it = |what: &str| {
        let script = format!("for d in /usr/lib /lib; do f=$d{library}{what} $f; done");
        one.check(&["sh", "-c", &script], SHORT)
    };
    over_it("mount --bind /dev/null")?;
    refused(exit::HOST_ERROR, "libibverbs.so.1 cannot be loaded")?;
    over_it("umount")?;
    refused(exit::HOST_ERROR, "no RDMA device")?;
    let short = |transport| {
        let mut guest = Guest::small(1, "true");
        guest.more.extend(["--transport", transport]);
        guest
    };
    let over = |kind: &str, text: &str| -> anyhow::Result<()> {
        let guest = short("auto").run(context)?;
        guest.expect_exit(exit::SHUTDOWN)?;
        ensure!(
            guest.report["transport"]["kind"] == kind,
            "{}",
            guest.report["transport"]
        );
        let said = &guest.output.stderr;
        ensure!(said.contains(text), "{text:?} is not in {said}");
        Ok(())
    };
    over("tcp", "transport tcp")?;
    add_rxe(one)?;
    refused(exit::DONOR_UNAVAILABLE, "no RDMA device")?;
    over("tcp", "refuses")?;
    add_rxe(two)?;
    // Slows TCP down: auto compares both paths, and on a busy host TCP may be faster by chance.
    one.check(
        &["sh", "-c", &on_the_way_to_2(DONOR_TCP, "delay 5ms")],
        SHORT,
    )?;
    over("rdma", "transport rdma")?;
    context.testbed.clear_netem()?;
    donor.stop(context)?;
    let silent = Donor::lending(context, "1G", &["--rdma-device", "none"])?;
    refused(exit::DONOR_UNAVAILABLE, "--rdma-device none")?;
    silent.stop(context)?;
    let wrong = two.run(
        &[
            "/share/ssi-hv",
            "node",
            "--insecure",
            "--listen",
            DONOR,
            "--memory",
            "64M",
            "--rdma-device",
            "mlx5_7",
        ],
        SHORT,
    )?;
    ensure!(
        wrong.status.code == exit::USAGE && wrong.stderr.contains("there are: rxe0"),
        "{wrong:?}"
    );
    remove_rxe(one)?;
    remove_rxe(two)?;
    Ok(Verdict::Pass)
}

fn by(transport: &'static str) -> Guest {
    let mut guest = Guest::remote(1, PROBE);
    guest.more.extend(["--transport", transport]);
    guest
}

/// RDMA counters of a report for one donor.
#[derive(Debug)]
pub(super) struct Rdma {
    pub pages_read: u64,
    pub pages_written: u64,
    pub connections: u64,
    pub failures: u64,
}

/// Reads the RDMA counters for the first donor.
pub(super) fn rdma_of(guest: &Finished) -> anyhow::Result<Rdma> {
    let node = &guest.report["nodes"][1]["rdma"];
    let number = |key: &str| {
        node[key]
            .as_u64()
            .with_context(|| format!("{key} in {node}"))
    };
    Ok(Rdma {
        pages_read: number("pages_read")?,
        pages_written: number("pages_written")?,
        connections: number("connections")?,
        failures: number("failures")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_behind_any_name() {
        let stat = "17 (a ) b) S 1 2 3 4 5 6 7 8 9 10 21 34 0 0 20 0";
        assert_eq!(ticks_of(stat), Some(55));
        assert_eq!(ticks_of("17 (a) S 1"), None);
    }

    #[test]
    fn waits_of_all_threads_are_added_and_those_of_none_are_an_error() {
        let thread = |waits| {
            format!("Name:\ta\nvoluntary_ctxt_switches:\t{waits}\nnonvoluntary_ctxt_switches:\t9\n")
        };
        assert_eq!(waits_of(&(thread(5) + &thread(7))), Some(12));
        assert_eq!(waits_of(""), None);
    }
}
