//! Scenarios of measuring transports and choosing among them.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, perftest, remove_rxe};
use super::donor::{DONOR, Donor};
use super::guest::{Finished, Guest, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// Deadline of the bench.
const BENCH_DEADLINE: Duration = Duration::from_secs(180);
/// Workload of the guest with the hybrid transport: enough that pages leave and return.
const PROBE: &str = "faultprobe --bytes 64M";
const PROBE_BYTES: u64 = 64 << 20;

/// Scenarios that compare times.
pub(super) const MEASURED: &[Scenario] = &[Scenario {
    name: "bench_transport",
    about: "transports are measured beside perftest, and auto chooses by what it measures",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: |context| {
        by_rdma(context, |context| {
            bench(context)?;
            chosen(context)
        })
    },
}];

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "hybrid",
    about: "faults go by RDMA and what is fetched ahead by TCP, and no byte is lost",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: |context| by_rdma(context, hybrid),
}];

/// Calls `does` while a donor lends by RDMA.
fn by_rdma(context: &Context<'_>, does: impl FnOnce(&Context<'_>) -> anyhow::Result<()>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let donor = Donor::lending(context, "1G", &["--rdma-device", "rxe0"])?;
    does(context)?;
    donor.stop(context)?;
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}

/// Runs a guest with this transport to its end.
fn run(context: &Context<'_>, transport: &'static str, exec: &str) -> anyhow::Result<Finished> {
    let mut guest = Guest::small(1, exec);
    guest.more.extend(["--transport", transport]);
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    Ok(guest)
}

fn bench(context: &Context<'_>) -> anyhow::Result<()> {
    let (one, two) = (context.testbed.host(1), context.testbed.host(2));
    let argv = [
        "/share/ssi-hv",
        "bench",
        "transport",
        "--insecure",
        "--donor",
        DONOR,
        "--seconds",
        "1",
        "--json",
    ];
    let text = one.check(&argv, BENCH_DEADLINE)?;
    let result: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    ensure!(
        result["corrupt_bytes"] == 0 && result["verified_bytes"].as_u64() > Some(1 << 20),
        "{text}"
    );
    let read_64 = perftest(one, two, "ib_read_lat", 64)?;
    let read_4k = perftest(one, two, "ib_read_lat", 4096)?;
    let read_bw = perftest(one, two, "ib_read_bw", 65_536)?;
    let write_bw = perftest(one, two, "ib_write_bw", 65_536)?;
    for kind in ["rdma", "tcp", "udp"] {
        let of = of_kind(&result, kind).with_context(|| format!("no {kind} in {text}"))?;
        let (small, page) = (
            number(of, 64, "/latency_us/p50")?,
            number(of, 4096, "/latency_us/p50")?,
        );
        let stream = number(of, 65_536, "/stream_bytes_per_second")? / 1e6;
        ensure!(small > 0.0 && page > 0.0 && stream > 0.0, "{of}");
        context.note(format!(
            "{kind}: p50 of 64 B {small:.0} us, of 4 KiB {page:.0} us; stream of 64 KiB {stream:.1} MB/s; connection {:.1} ms",
            of["connections"]["others_ms"].as_f64().unwrap_or(f64::NAN),
        ));
        let writes = |pointer: &str| of.pointer(pointer).and_then(Value::as_f64);
        let (one_by_one, carried) = (
            writes("/writes/latency_us/p50"),
            writes("/write_bytes_per_second"),
        );
        ensure!(one_by_one > Some(0.0) && carried > Some(0.0), "{of}");
        context.note(format!(
            "{kind}: p50 of a page written {:.0} us, with 64 outstanding {:.1} MB/s",
            one_by_one.unwrap_or(f64::NAN),
            carried.unwrap_or(f64::NAN) / 1e6
        ));
        if kind == "rdma" {
            context.note(format!("p50 of 4 KiB / ib_read_lat: {:.2}", page / read_4k));
        }
    }
    let registered = result
        .pointer("/registration/memory")
        .and_then(Value::as_array);
    ensure!(
        registered.is_some_and(|sizes| sizes.len() >= 3),
        "{}",
        result["registration"]
    );
    context.note(format!(
        "perftest: ib_read_lat 64 B {read_64:.0} us, 4 KiB {read_4k:.0} us; 64 KiB: ib_read_bw {read_bw:.1}, ib_write_bw {write_bw:.1} MB/s (emulated)"
    ));
    Ok(())
}

fn of_kind<'a>(result: &'a Value, kind: &str) -> Option<&'a Value> {
    let transports = result["transports"].as_array()?;
    transports.iter().find(|one| one["kind"] == kind)
}

fn number(of: &Value, bytes: u64, pointer: &str) -> anyhow::Result<f64> {
    let sizes = of["sizes"].as_array().context("no sizes")?;
    let size = sizes.iter().find(|size| size["bytes"] == bytes);
    let number = size.and_then(|size| size.pointer(pointer)?.as_f64());
    number.with_context(|| format!("no {pointer} of {bytes} in {of}"))
}

/// Checks that auto chooses the transport that it measured to be best.
fn chosen(context: &Context<'_>) -> anyhow::Result<()> {
    let auto = run(context, "auto", "true")?;
    let path = &auto.report["nodes"][1]["path"];
    let measured = |pointer: &str| {
        let number = path.pointer(pointer).and_then(Value::as_f64);
        number.with_context(|| format!("no {pointer} in {path}"))
    };
    let (tcp, rdma) = (measured("/tcp/page_us")?, measured("/rdma/page_us")?);
    let by_tcp = tcp * 4.0 <= rdma * 3.0;
    ensure!(
        path["faults"] == if by_tcp { "tcp" } else { "rdma" },
        "{path}"
    );
    let (carried, read) = (
        measured("/tcp/stream_bytes_per_second")?,
        measured("/rdma/stream_bytes_per_second")?,
    );
    let bulk_by_tcp = by_tcp || carried >= read * 4.0 / 3.0;
    ensure!(
        path["bulk"] == if bulk_by_tcp { "tcp" } else { "rdma" },
        "{path}"
    );
    let said = &auto.output.stderr;
    let slow = auto.report["transport"]["tier"] == "slow";
    ensure!(
        !slow || said.contains("which is slow") && said.contains("docs/hardware.md"),
        "no warning in {said}"
    );
    context.note(format!("auto: {path}"));
    Ok(())
}

fn hybrid(context: &Context<'_>) -> anyhow::Result<()> {
    let hybrid = run(context, "hybrid", PROBE)?;
    hybrid.faultprobe_over(PROBE_BYTES)?;
    let transport = &hybrid.report["transport"];
    ensure!(
        transport["kind"] == "rdma" && transport["bulk"] == "tcp",
        "{transport}"
    );
    let text = "transport rdma with tcp for what is fetched ahead";
    ensure!(
        hybrid.output.stderr.contains(text),
        "{}",
        hybrid.output.stderr
    );
    let ahead = hybrid
        .report
        .pointer("/nodes/1/traffic/prefetch/plain_bytes");
    let ahead = ahead.and_then(Value::as_u64).context("no traffic")?;
    let read = hybrid.report.pointer("/nodes/1/rdma/pages_read");
    let read = read.and_then(Value::as_u64).context("no READs")?;
    ensure!(read > 0, "no page was read by RDMA");
    context.note(format!(
        "hybrid: {read} pages by READ, {} fetched ahead by TCP",
        ahead / 4096
    ));
    Ok(())
}
