//! Scenarios in which pages are read by RDMA, over SoftRoCE.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, bare_read_us, remove_rxe};
use super::guest::{
    BOOT_DEADLINE, DONOR, Donor, Finished, GUEST_DEADLINE, Guest, INIT_REACHED, SHORT, exit,
};
use super::{Context, Result, Scenario, Verdict};
use crate::testbed::{Host, Output};

/// READs of one page that the probe makes.
const READS: u64 = 3000;
/// READs over a link that loses packets, and how many of them it loses.
const LOSSY_READS: u64 = 500;
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
const READ_PAGES_MIN: u64 = 2000;

/// Scenarios that compare times.
pub(super) const MEASURED: &[Scenario] = &[
    Scenario {
        name: "rdma_probe",
        about: "READs bring what was written, use no processor of the donor's, and end with the lease",
        needs_product: true,
        run: probe,
    },
    Scenario {
        name: "rdma_loss",
        about: "READs over a link that loses packets are sent again by the adapter, and come right",
        needs_product: true,
        run: loss,
    },
    Scenario {
        name: "rdma_boot",
        about: "a guest whose pages are read by RDMA boots, and no byte is lost",
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
    let before = ticks(two, donor.pid())?;
    let output = process.wait(Duration::from_secs(60))?;
    let after = ticks(two, donor.pid())?;
    let found = probed(&output, READS)?;
    ensure!(
        found["pages_read_by_donor"] == 0,
        "the donor's process served reads: {found}"
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
    let argv = [
        "/share/rdma-probe",
        DONOR,
        "--pages",
        "64",
        "--reads",
        &reads,
    ];
    let output = context.testbed.host(1).run(&argv, Duration::from_secs(90));
    context.testbed.clear_netem()?;
    let output = output?;
    let found = probed(&output, LOSSY_READS)?;
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
fn ticks(host: &Host, pid: i32) -> anyhow::Result<u64> {
    let stat = host.check(&["cat", &format!("/proc/{pid}/stat")], SHORT)?;
    ticks_of(&stat).with_context(|| format!("no times in {stat:?}"))
}

/// Fields 14 and 15 of `/proc/PID/stat`, counted behind the name, which may hold anything.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

fn boot(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let donor = Donor::lending(context, "1G", &["--rdma-device", "rxe0"])?;
    let guest = by("rdma").run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe()?;
    ensure!(
        guest.report["transport"]["kind"] == "rdma",
        "transport {}",
        guest.report["transport"]
    );
    let rdma = rdma_of(&guest)?;
    ensure!(
        rdma.pages_read >= READ_PAGES_MIN && rdma.failures == 0,
        "{rdma:?}"
    );
    let fetched = guest.number("/nodes/1/pages_fetched")?;
    let (read, written) = donor.stop(context)?;
    ensure!(
        read == 0,
        "the donor's process served {read} reads of pages, none is due"
    );
    ensure!(written > 0, "nothing was written back");
    // The READs that the connections were tried out with are not counted.
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let by_read = rdma.pages_read as f64;
    ensure!(
        fetched == by_read,
        "{fetched} pages fetched, {by_read} came by READ"
    );
    context.note(format!(
        "{} pages by READ; remote faults p50 {:.0} us, init after {:.0} ms (emulated)",
        rdma.pages_read,
        guest.number("/faults/remote/latency_us/p50")?,
        guest.number("/boot/to_init_ms")?,
    ));
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

/// Removes the device of one host under a running guest, and adds it again.
fn removed(context: &Context<'_>, number: usize) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let donor = Donor::lending(context, "1G", &[])?;
    let mut guest = Guest::remote(1, "faultprobe --bytes 256M && faultprobe --bytes 256M");
    guest.more.extend(["--transport", "rdma"]);
    let process = guest.start(context)?;
    process.wait_for_line(INIT_REACHED, BOOT_DEADLINE)?;
    let host = context.testbed.host(number);
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
    guest.faultprobe()?;
    let rdma = rdma_of(&guest)?;
    ensure!(
        rdma.failures >= 1 && rdma.connections > rdma.failures,
        "{rdma:?}"
    );
    let (read, _) = donor.stop(context)?;
    ensure!(read > 0, "no page came by TCP meanwhile");
    context.note(format!(
        "{} pages by READ, {read} by TCP; {} connections, {} of them failed",
        rdma.pages_read, rdma.connections, rdma.failures
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
