//! A scenario on a narrow link, over which pages travel compressed.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "narrow_link",
    about: "on a link of 8 Mbit/s pages are compressed by themselves, and every byte is right",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: narrow_link,
}];

/// Rate of the link in both directions. A page takes 4 ms, far longer than compressing it on an
/// emulated host, even a slowed-down one.
const MBIT_A_SECOND: u32 = 8;

/// Boot deadline of the guest: its remote memory travels over the narrow link.
const BOOT_DEADLINE_NARROW: Duration = Duration::from_secs(240);

/// Number of files that the guest writes, each of about 2 MB.
const FILES: u32 = 12;

/// Maximum number of guest runs until its write-backs end up compressed.
const TRIALS_MAX: usize = 3;

/// Returns a script that copies a program in memory and compares each copy with it.
fn copies() -> String {
    format!(
        "now() {{ cut -d' ' -f1 /proc/uptime; }}; cd /tmp; a=$(now); \
         for i in $(seq {FILES}); do cat /bin/busybox >f$i; done; \
         n=$(for f in f*; do cmp $f /bin/busybox && echo same; done | wc -l); \
         echo COPIES $n $a $(now)"
    )
}

/// Duration of the work, and bytes on the network, of one run.
struct Outcome {
    seconds: f64,
    plain_mib: f64,
    wire_mib: f64,
    compressed: f64,
    compressing: bool,
}

fn narrow_link(context: &Context<'_>) -> Result {
    let off = run(context, "off")?;
    let auto = tried(context)?;
    ensure!(
        off.wire_mib == off.plain_mib && off.compressed == 0.0,
        "pages were compressed with --compression off"
    );
    ensure!(
        auto.compressing,
        "on a link of {MBIT_A_SECOND} Mbit/s {TRIALS_MAX} trials found that compressing does not pay"
    );
    // Trial blocks, and pages sent before the decision, are included.
    ensure!(
        auto.wire_mib < auto.plain_mib * 0.85,
        "{} of {} MiB were sent",
        auto.wire_mib,
        auto.plain_mib
    );
    context.note(format!(
        "off: {:.0} MiB in {:.0} s; auto: {:.0} MiB as {:.0} MiB in {:.0} s, {:.2} times as fast",
        off.plain_mib,
        off.seconds,
        auto.plain_mib,
        auto.wire_mib,
        auto.seconds,
        off.seconds / auto.seconds,
    ));
    Ok(Verdict::Pass)
}

/// Returns a run in which compression of write-backs is on at the end. Each connection tries it
/// when it starts, with 8 pairs of blocks of which it has to win 7, and does not retry before it
/// has carried more than this guest writes. A host that stalls during the trial can therefore turn
/// it off.
fn tried(context: &Context<'_>) -> anyhow::Result<Outcome> {
    let mut last = run(context, "auto")?;
    for _ in 1..TRIALS_MAX {
        if last.compressing {
            break;
        }
        context.note(format!(
            "a trial found that compressing does not pay: {:.0} of {:.0} MiB were sent",
            last.wire_mib, last.plain_mib
        ));
        last = run(context, "auto")?;
    }
    Ok(last)
}

fn run(context: &Context<'_>, compression: &'static str) -> anyhow::Result<Outcome> {
    let donor = Donor::start(context)?;
    let guest = Guest {
        local_memory: Some("64M"),
        // Sealed pages do not shrink.
        more: vec!["--compression", compression, "--seal", "off"],
        ..Guest::small(1, &copies())
    };
    context.testbed.limit_rate(1, 2, MBIT_A_SECOND)?;
    let finished = guest
        .boot_within(context, BOOT_DEADLINE_NARROW)
        .and_then(|process| Ok(process.wait(GUEST_DEADLINE)?))
        .and_then(|output| Finished::read(context, output));
    context.testbed.clear_netem()?;
    let finished = finished?;
    finished.expect_exit(exit::SHUTDOWN)?;
    donor.stop(context)?;
    outcome(&finished)
}

fn outcome(guest: &Finished) -> anyhow::Result<Outcome> {
    let console = &guest.output.stdout;
    // The last match, since the kernel also prints the command.
    let mut lines = console.lines().rev();
    let line = lines.find_map(|line| line.split_once("COPIES "));
    let (_, line) = line.context("the guest did not finish its copies")?;
    let numbers: Vec<f64> = line
        .split_whitespace()
        .map(str::parse)
        .collect::<std::result::Result<_, _>>()?;
    let [same, from, to] = numbers[..] else {
        anyhow::bail!("{line} are not three numbers");
    };
    ensure!(
        same == f64::from(FILES),
        "{same} of {FILES} copies are right"
    );
    let sum = |field: &str| -> anyhow::Result<f64> {
        ["urgent", "prefetch", "write_back"]
            .iter()
            .map(|class| guest.number(&format!("/nodes/1/traffic/{class}/{field}")))
            .sum()
    };
    Ok(Outcome {
        seconds: to - from,
        plain_mib: sum("plain_bytes")? / f64::from(1 << 20),
        wire_mib: sum("wire_bytes")? / f64::from(1 << 20),
        compressed: sum("pages_compressed")?,
        compressing: guest.report["nodes"][1]["traffic"]["write_back"]["compressing"]
            .as_bool()
            .context("the report does not say whether write-backs are compressed")?,
    })
}
