//! Scenarios in which a guest reports its free memory.

use anyhow::ensure;

use super::donor::Donor;
use super::guest::{Guest, exit, faultprobes};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "free_pages",
        about: "memory that a guest frees is dropped here and at the donor, and is good memory again",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: free_pages,
    },
    Scenario {
        name: "no_balloon",
        about: "a guest without a balloon keeps what it frees",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: no_balloon,
    },
];

/// Memory that the guest uses, frees, and uses again.
const PROBE_BYTES: u64 = 64 << 20;

/// Runs the probe after the initially free memory was reported, waits until the kernel has reported
/// what the probe freed, and runs it again. Each report ends with an interrupt of the device. The
/// guest has reported everything when the interrupt count has grown and then stays constant for
/// longer than the kernel's 2 s between reports. The kernel log also contains the command line,
/// which must not be counted.
const TWICE: &str = "irq() { grep virtio0 /proc/interrupts | tr -s ' ' | cut -d' ' -f3; }; \
    rests() { b=none; until [ x$b = x$(irq) ] || [ $i -ge 180 ]; do b=$(irq); sleep 5; i=$((i+5)); done; }; \
    i=0; rests; a=$(irq); faultprobe --bytes 64M; \
    i=0; until [ $(irq) -gt $a ] || [ $i -ge 90 ]; do sleep 1; i=$((i+1)); done; rests; \
    echo reports $a $b; echo enabled=$(dmesg | grep -c '[F]ree page reporting enabled'); faultprobe --bytes 64M";

fn free_pages(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let guest = Guest {
        local_memory: Some("96M"),
        ..Guest::remote(1, TWICE)
    };
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let console = &guest.output.stdout;
    ensure!(
        console.contains("enabled=1"),
        "the guest's kernel has not enabled free page reporting"
    );
    let probes = faultprobes(console)?;
    ensure!(probes.len() == 2, "{} probes ended", probes.len());
    for probe in &probes {
        ensure!(probe["corrupt_bytes"] == 0, "corrupt bytes: {probe}");
        let verified = probe["verified_bytes"].as_u64();
        ensure!(
            verified >= Some(PROBE_BYTES),
            "too little verified: {probe}"
        );
    }
    ensure!(console.contains("SSI-HV guest: exit status 0"));
    let number = |name: &str| guest.number(&format!("/free_pages/{name}"));
    let (reported, here, home) = (
        number("reported")?,
        number("dropped_here")?,
        number("dropped_at_home")?,
    );
    context.note(format!(
        "{reported} pages reported, {here} dropped here, {home} at the donor"
    ));
    // The first probe's pages, less those that the kernel keeps in its per-CPU and free lists.
    let probe_pages = (PROBE_BYTES / 4096) as f64;
    ensure!(reported >= probe_pages, "{reported} pages reported");
    ensure!(home >= probe_pages / 2.0, "{home} pages dropped at home");
    ensure!(here > 0.0, "no page was dropped here");
    let dropped = donor.end(context)?["pages_dropped"].as_f64();
    ensure!(
        dropped == Some(home),
        "the donor has dropped {dropped:?} pages, the guest's host counts {home}"
    );
    Ok(Verdict::Pass)
}

fn no_balloon(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let mut guest = Guest::remote(
        1,
        "faultprobe --bytes 64M; ls /sys/bus/virtio/devices | wc -l",
    );
    guest.more.extend(["--balloon", "off"]);
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(64 << 20)?;
    ensure!(guest.number("/free_pages/reported")? == 0.0);
    let dropped = donor.end(context)?["pages_dropped"].as_u64();
    ensure!(dropped == Some(0), "the donor dropped {dropped:?} pages");
    Ok(Verdict::Pass)
}
