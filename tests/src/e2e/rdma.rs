//! Scenarios in which pages travel by RDMA, over SoftRoCE.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, bare_read_us, remove_rxe};
use super::guest::{
    BOOT_DEADLINE, DONOR, Donor, Finished, GUEST_DEADLINE, Guest, INIT_REACHED, SHORT, exit,
};
use super::prometheus::Prometheus;
use super::{Context, Result, Scenario, Verdict};
use crate::testbed::{Host, Output, RemoteProcess};

/// READs of one page that the probe makes.
const READS: u64 = 3000;
/// READs over a link that loses packets, and how many of them it loses.
const LOSSY_READS: u64 = 500;
/// How often 64 pages are written over it.
const LOSSY_ROUNDS: u64 = 8;
const LOSS_PERCENT: u8 = 5;
/// After so long the adapter sends a READ again, in microseconds.
const RETRY_US: f64 = 60_000.0;
/// Processor time that the donor's process may take during them, in clock ticks of 10 ms: for the
/// renewals of the lease, and its own ticking.
const TICKS_MAX: u64 = 10;
/// How long it may take until a READ has failed, in milliseconds: less than until a silent lane is
/// given up, so that it is the adapter which finds out.
const REFUSAL_MS_MAX: u64 = 3500;
/// What guests run: enough memory that pages leave and come back.
const PROBE: &str = "faultprobe --bytes 256M";
/// The fewest pages that such a guest reads from its donor.
const READ_PAGES_MIN: u64 = 1000;
/// Pages that are read over TCP to measure it at the start.
const MEASURING_READS_MAX: u64 = 64;
/// A second donor on the same host.
const OTHER_DONOR: &str = "10.77.0.2:7701";
/// Where the VM and the donor tell their metrics.
const VM_METRICS: &str = "10.77.0.1:9464";
const NODE_METRICS: &str = "10.77.0.2:9464";
/// Faults of each kind, fewer of which say nothing.
const COMPARED_FAULTS_MIN: u64 = 500;
/// How long a fault by RDMA may take at p50, compared with one by TCP of the same guest.
const RATIO_TO_TCP_MAX: f64 = 1.1;

/// Scenarios that compare times.
pub(super) const MEASURED: &[Scenario] = &[
    Scenario {
        name: "rdma_probe",
        about: "READs bring what WRITEs left, use no processor of the donor's, and end with the lease",
        needs_product: true,
        run: probe,
    },
    Scenario {
        name: "rdma_loss",
        about: "READs and WRITEs over a link that loses packets are sent again by the adapter, and come right",
        needs_product: true,
        run: loss,
    },
    Scenario {
        name: "rdma_boot",
        about: "a guest whose pages travel by RDMA and by TCP boots, no byte is lost, and RDMA is not slower",
        needs_product: true,
        run: boot,
    },
];

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "rdma_choice",
        about: "auto takes RDMA where both ends have it; rdma fails clearly where one has not",
        needs_product: true,
        run: choice,
    },
    Scenario {
        name: "rdma_removed",
        about: "removing the device under a running guest sends it to TCP, adding it brings it back",
        needs_product: true,
        run: |context| removed(context, 1),
    },
    Scenario {
        name: "rdma_removed_at_donor",
        about: "the same with the donor's device",
        needs_product: true,
        run: |context| removed(context, 2),
    },
];

fn probe(context: &Context<'_>) -> Result {
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    add_rxe(one)?;
    add_rxe(two)?;
    let donor = Donor::lending(context, "64M", &["--rdma-device", "rxe0"])?;
    let reads = READS.to_string();
    let process = one.spawn(&["/share/rdma-probe", DONOR, "--reads", &reads])?;
    process.wait_for_line("FILLED", SHORT)?;
    let before = processor_ticks(two, donor.pid())?;
    process.wait_for_line("READ", Duration::from_secs(60))?;
    let after = processor_ticks(two, donor.pid())?;
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
    let used = after.saturating_sub(before);
    ensure!(
        used <= TICKS_MAX,
        "{used} ticks of the donor's processor for {READS} READs"
    );
    let bare = bare_read_us(one, two, 1000)?;
    let ours = found["p50_us"].as_f64().unwrap_or(f64::NAN);
    context.note(format!(
        "READ of 4 KiB: p50 {ours:.0} us, ib_read_lat {bare:.0} us, ratio {:.2}; the donor used {used} ticks for {READS}; after the lease: {} ({} ms; emulated)",
        ours / bare,
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

/// The result of the probe, which must be so many READs without a wrong byte.
fn probed(output: &Output, reads: u64) -> anyhow::Result<Value> {
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

/// Processor time of a process, user and system, in clock ticks.
pub(crate) fn processor_ticks(host: &Host, pid: i32) -> anyhow::Result<u64> {
    let stat = host.check(&["cat", &format!("/proc/{pid}/stat")], SHORT)?;
    ticks_of(&stat).with_context(|| format!("no times in {stat:?}"))
}

/// Fields 14 and 15 of `/proc/PID/stat`, counted behind the name, which may hold anything.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Two donors on one host, one that can be reached by RDMA and one that cannot: so the same guest
/// has faults of both kinds at the same time.
fn boot(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let donor = Donor::lending(context, "256M", &["--rdma-device", "rxe0"])?;
    let other = donor_without_rdma(context)?;
    let mut guest = Guest {
        memory: "512M",
        local_memory: Some("192M"),
        ..Guest::remote(1, "faultprobe --bytes 192M")
    };
    guest
        .more
        .extend(["--transport", "auto", "--donor", OTHER_DONOR]);
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(192 << 20)?;
    ensure!(
        guest.report["transport"]["kind"] == "mixed",
        "transport {}, path {}: {}",
        guest.report["transport"],
        guest.report["nodes"][1]["path"],
        guest.output.stderr
    );
    let rdma = rdma_of(&guest)?;
    ensure!(
        rdma.pages_read >= READ_PAGES_MIN && rdma.failures == 0,
        "{rdma:?}"
    );
    // What was measured decides whether write-backs go by RDMA too.
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
    other.kill(libc::SIGTERM)?;
    other.wait(SHORT)?;
    let (read, written) = donor.stop(context)?;
    // What is fetched ahead goes as write-backs do. The READs that the connections were tried out
    // with are not counted.
    let ahead_by_tcp = fetched.saturating_sub(rdma.pages_read);
    ensure!(
        ahead_by_tcp == 0 || !bulk_by_rdma,
        "{fetched} pages fetched: {rdma:?}"
    );
    ensure!(
        (ahead_by_tcp..=ahead_by_tcp + MEASURING_READS_MAX).contains(&read),
        "the donor's process served {read} reads of pages, {ahead_by_tcp} are due: {rdma:?}"
    );
    // Behind drops of free pages, pages go by TCP.
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

/// A donor beside the other one, without RDMA.
fn donor_without_rdma(context: &Context<'_>) -> anyhow::Result<RemoteProcess> {
    let host = context.testbed.host(2);
    let process = host.spawn(&[
        "/share/ssi-hv",
        "node",
        "--insecure",
        "--listen",
        OTHER_DONOR,
        "--memory",
        "256M",
        "--rdma-device",
        "none",
    ])?;
    let listening = "i=0; until ss -Hltn | grep -q :7701; do i=$((i+1)); [ $i -lt 200 ] || exit 1; sleep 0.1; done";
    host.check(&["sh", "-c", listening], SHORT)
        .context("the second donor does not listen")?;
    Ok(process)
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
    // A file that is no library in its place.
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
        let mut guest = Guest::remote(1, "true");
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
    over("rdma", "transport rdma")?;
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
        wrong.status.code == exit::HOST_ERROR && wrong.stderr.contains("there are: rxe0"),
        "{wrong:?}"
    );
    remove_rxe(one)?;
    remove_rxe(two)?;
    Ok(Verdict::Pass)
}

/// Removes the device of one host while pages are written all the time, and adds it again; gives
/// what the probe found.
fn removed_while_writing(context: &Context<'_>, host: &Host) -> anyhow::Result<Value> {
    let donor = Donor::lending(context, "64M", &[])?;
    let argv = ["/share/rdma-probe", DONOR, "--until-back", "--reads", "0"];
    let process = context.testbed.host(1).spawn(&argv)?;
    process.wait_for_line("WRITING", SHORT)?;
    remove_rxe(host)?;
    add_rxe(host)?;
    let found = probed(&process.wait(Duration::from_secs(120))?, 0)?;
    let by_tcp = found["pages_written_by_donor"].as_u64();
    ensure!(
        found["failures"] == 1 && by_tcp.is_some_and(|pages| pages > 0),
        "RDMA did not fail once while pages were written: {found}"
    );
    donor.stop(context)?;
    Ok(found)
}

/// Removes the device of one host under a running guest, and adds it again.
fn removed(context: &Context<'_>, number: usize) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let host = context.testbed.host(number);
    let written = removed_while_writing(context, host)?;
    // Once is enough, as it takes its time.
    let prometheus = if number == 1 {
        Some(Prometheus::start(context, &[VM_METRICS, NODE_METRICS])?)
    } else {
        None
    };
    let donor = Donor::lending(context, "1G", &["--metrics", NODE_METRICS])?;
    let mut guest = Guest {
        local_memory: Some("128M"),
        ..Guest::remote(1, "faultprobe --bytes 128M && faultprobe --bytes 128M")
    };
    guest
        .more
        .extend(["--transport", "rdma", "--metrics", VM_METRICS]);
    let process = guest.start(context)?;
    process.wait_for_line(INIT_REACHED, BOOT_DEADLINE)?;
    remove_rxe(host)?;
    // By now pages travel by TCP, or will when the READs that are outstanding have failed.
    process.wait_for_line("pages go on over TCP", SHORT)?;
    let by_tcp = "i=0; until ssi-hv status --json | grep -Eq '\"pages_read\": ?[1-9]'; do \
                  i=$((i+1)); [ $i -lt 60 ] || exit 1; sleep 0.5; done";
    let two = context.testbed.host(2);
    two.check(&["sh", "-c", by_tcp], Duration::from_secs(90))
        .context("no page comes by TCP")?;
    add_rxe(host)?;
    process.wait_for_line("back on RDMA", Duration::from_secs(90))?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(128 << 20)?;
    let rdma = rdma_of(&guest)?;
    ensure!(
        rdma.failures >= 1 && rdma.connections > rdma.failures && rdma.pages_written > 0,
        "{rdma:?}"
    );
    let (read, _) = donor.stop(context)?;
    ensure!(read > 0, "no page came by TCP meanwhile");
    if let Some(prometheus) = prometheus {
        let moved = prometheus.saw_move("_rdma")?;
        context.note(format!("Prometheus saw {moved} metrics of RDMA move"));
    }
    context.note(format!(
        "{} pages by READ, {read} by TCP; {} connections, {} of them failed; written in {} rounds meanwhile: {} pages by WRITE, {} by TCP",
        rdma.pages_read,
        rdma.connections,
        rdma.failures,
        written["rounds"],
        written["pages_written"],
        written["pages_written_by_donor"],
    ));
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}

fn by(transport: &'static str) -> Guest {
    let mut guest = Guest::remote(1, PROBE);
    guest.more.extend(["--transport", transport]);
    guest
}

#[derive(Debug)]
struct Rdma {
    pages_read: u64,
    pages_written: u64,
    connections: u64,
    failures: u64,
}

/// What the report has of RDMA with the donor.
fn rdma_of(guest: &Finished) -> anyhow::Result<Rdma> {
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
}
