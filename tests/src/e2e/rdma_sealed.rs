//! The scenario of pages that travel by RDMA, which encrypts nothing itself: what passes between the
//! hosts is captured, sealed and not.

use anyhow::{Context as _, ensure};

use super::bed::{add_rxe, remove_rxe};
use super::donor::{DONOR, Donor};
use super::guest::{Finished, Guest, SHORT, exit};
use super::nodes::issue;
use super::rdma::rdma_of;
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::rdma_tool::capture::Seen;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "rdma_sealed",
    about: "captured packets of RDMA and TCP have neither pages nor tokens of a guest with certificates",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: captured,
}];

/// A line of which the guest's file consists: each packet of a page has it, whole.
const MARK: &str = "SSI-HV-mark-e79b04c";
/// Bytes of that file: with the guest's kernel more than is local.
const FILE_BYTES: u64 = 64_000_000;
/// Pages that have to travel either way, for the rest to mean something.
const PAGES_MIN: u64 = 1000;

/// Runs a guest that writes its file and reads it back, captured.
fn run(
    context: &Context<'_>,
    donor: &[&str],
    more: &[&'static str],
) -> anyhow::Result<(Finished, Seen)> {
    let one = context.testbed.host(1);
    let file = format!("yes {MARK} | head -c {FILE_BYTES}");
    let sum = one.check(&["sh", "-c", &format!("{file} | md5sum")], SHORT)?;
    let sum = sum.split_whitespace().next().unwrap_or_default().to_owned();
    let donor = Donor::lending(context, "512M", donor)?;
    let (_, port) = DONOR.split_once(':').context("a port")?;
    let capture = one.spawn(&["/share/rdma-faults", "capture", port, MARK])?;
    capture.wait_for_line("CAPTURING", SHORT)?;
    let work = format!("{file} >/tmp/x; m=$(md5sum </tmp/x); echo sum=$m");
    let mut guest = Guest {
        local_memory: None,
        ..Guest::small(1, &work)
    };
    guest
        .more
        .extend(["--local-memory", "96M", "--transport", "rdma"]);
    guest.more.extend(more);
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    ensure!(
        guest.output.stdout.contains(&format!("sum={sum}")),
        "the file is not what was written, {sum}: {}",
        guest.output.stdout
    );
    capture.kill(libc::SIGTERM)?;
    let output = capture.wait(SHORT)?;
    let line = output.stdout.lines().last().unwrap_or_default();
    let seen: Seen = serde_json::from_str(line).with_context(|| format!("{output:?}"))?;
    donor.stop(context)?;
    let rdma = rdma_of(&guest)?;
    ensure!(
        rdma.pages_read.min(rdma.pages_written) >= PAGES_MIN && rdma.failures == 0,
        "{rdma:?}"
    );
    let bytes = (rdma.pages_read + rdma.pages_written) * 4096;
    ensure!(
        seen.roce_bytes >= bytes,
        "{bytes} bytes of pages by RDMA, and not all were captured: {seen:?}"
    );
    Ok((guest, seen))
}

fn captured(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    issue(context)?;

    let (guest, seen) = run(context, &[], &["--donor", DONOR, "--seal", "off"])?;
    ensure!(
        guest.report["nodes"][1]["sealed"] == false,
        "{}",
        guest.report["nodes"][1]
    );
    ensure!(
        seen.roce_with_text >= PAGES_MIN && seen.tokens > 0,
        "the capture does not find what is there: {seen:?}"
    );
    ensure!(seen.roce_with_token == 0, "a token over RoCE: {seen:?}");
    context.note(format!(
        "not sealed: {} of {} packets have the mark, {} tokens over TCP",
        seen.roce_with_text, seen.roce_packets, seen.tokens
    ));

    let with_certificates = ["--credentials", "/tmp/alpha"];
    let guest_with = [
        "--donor",
        "10.77.0.2:7700,name=alpha",
        "--credentials",
        "/tmp/two",
    ];
    let (guest, seen) = run(context, &with_certificates, &guest_with)?;
    ensure!(
        guest.report["nodes"][1]["sealed"] == true,
        "{}",
        guest.report["nodes"][1]
    );
    ensure!(
        seen.roce_with_text == 0
            && seen.roce_with_token == 0
            && seen.tcp_with_text == 0
            && seen.tokens == 0
            && seen.tcp_packets > 0,
        "of a guest with certificates: {seen:?}"
    );
    let rdma = rdma_of(&guest)?;
    let count = |key: &str| -> anyhow::Result<u64> {
        let sealing = guest.report.pointer("/memory/sealing");
        let found = sealing.and_then(|sealing| sealing[key].as_u64());
        found.with_context(|| format!("{key} in {sealing:?}"))
    };
    let (sealed, opened) = (count("pages_sealed")?, count("pages_opened")?);
    ensure!(
        sealed >= rdma.pages_written && opened >= rdma.pages_read && count("pages_rejected")? == 0,
        "{sealed} pages sealed and {opened} opened: {rdma:?}"
    );
    context.note(format!(
        "sealed: none of {} packets has the mark; {sealed} pages sealed, {} written by RDMA; {opened} opened, {} read by RDMA",
        seen.roce_packets, rdma.pages_written, rdma.pages_read
    ));
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}
