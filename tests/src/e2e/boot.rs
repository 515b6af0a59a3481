//! Scenarios that boot stock kernels.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::donor::Donor;
use super::guest::{Finished, Guest, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

/// Workload of guests whose memory is verified: with the kernel it exceeds their local memory, and
/// emulated hosts can fetch it within a minute or two.
const PROBE: &str = "faultprobe --bytes 128M";
const PROBE_BYTES: u64 = 128 << 20;
/// Lower bound of remote faults for this many bytes in addition to the kernel's, with a budget of
/// the same size.
const REMOTE_FAULTS_MIN: f64 = 2000.0;

/// Pairs of boots that are compared. The boots of a pair follow each other, so that whatever slows
/// the machine for longer than a boot affects both, and the median of the pairs' ratios ignores
/// three pairs in which something shorter did not. Pairs that cannot move the median over the limit
/// any more are left out.
const BOOT_PAIRS: usize = 7;
/// Limit of the time to init with 3/4 of memory on a donor, as a multiple of that with all memory
/// local.
const BOOT_RATIO_MAX: f64 = 1.2;

/// Scenarios that compare times.
pub(super) const MEASURED: &[Scenario] = &[Scenario {
    name: "boot_local",
    about: "a guest with all memory local takes no remote fault; with most of it remote, init runs hardly later",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: boot_local,
}];

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "boot_remote_1cpu",
        about: "a guest with memory on two hosts boots, and no byte is lost",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| boot_remote(context, 1),
    },
    Scenario {
        name: "boot_remote_2cpu",
        about: "the same with two vCPUs",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| boot_remote(context, 2),
    },
    Scenario {
        name: "boot_exact_loan",
        about: "a donor that lends only what local memory leaves is enough",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: boot_exact_loan,
    },
    Scenario {
        name: "boot_elf",
        about: "an ELF vmlinux boots as a bzImage does",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: boot_elf,
    },
    Scenario {
        name: "boot_full_kernel",
        about: "the other stock kernel boots",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: boot_full_kernel,
    },
    Scenario {
        name: "reboot_exit_code",
        about: "a reboot ends the run with its own exit code",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: reboot_exit_code,
    },
    Scenario {
        name: "panic_exit_code",
        about: "a panic of the guest's kernel ends the run with its own exit code",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: panic_exit_code,
    },
    Scenario {
        name: "ctrl_c",
        about: "SIGINT ends a running guest in order, and the donor gets its memory back",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: ctrl_c,
    },
];

fn boot_remote(context: &Context<'_>, cpus: u32) -> Result {
    let donor = Donor::start(context)?;
    let guest = Guest::remote(cpus, PROBE).run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let probe = guest.faultprobe_over(PROBE_BYTES)?;
    let seen = probe["faults"].as_f64().context("faults")?;
    let remote = guest.number("/faults/remote/count")?;
    ensure!(
        seen >= REMOTE_FAULTS_MIN,
        "the guest saw {seen} faults, {REMOTE_FAULTS_MIN} at least are due"
    );
    ensure!(
        remote >= REMOTE_FAULTS_MIN,
        "the pager counted {remote} remote faults"
    );
    ensure!(
        guest.number("/guest/cpus")? == f64::from(cpus),
        "cpus in the report"
    );

    let (fetched, written_back) = donor_pages(&guest.report)?;
    let (read, written) = donor.stop(context)?;
    ensure!(
        fetched == read,
        "the report has {fetched} pages fetched, the donor {read} read"
    );
    ensure!(
        written_back == written,
        "the report has {written_back} pages written back, the donor {written} written"
    );

    let us = |value: &Value, key: &str| value[key].as_f64().unwrap_or(f64::NAN);
    let (inside, outside) = (
        &probe["latency_us"],
        &guest.report["faults"]["remote"]["latency_us"],
    );
    context.note(format!(
        "{cpus} vCPU: {remote} remote faults; p50 {:.0} us in the pager, and {:.0} us of all faults in the guest; init after {:.0} ms (emulated)",
        us(outside, "p50"),
        us(inside, "p50"),
        guest.number("/boot/to_init_ms")?,
    ));
    Ok(Verdict::Pass)
}

fn boot_exact_loan(context: &Context<'_>) -> Result {
    let donor = Donor::lending(context, "768M", &[])?;
    let guest = Guest {
        memory: "1G",
        local_memory: Some("256M"),
        ..Guest::remote(1, "faultprobe --bytes 64M")
    };
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(64 << 20)?;
    donor.stop(context)?;
    let nodes = guest.report["nodes"]
        .as_array()
        .context("nodes in the report")?;
    let memory: Vec<_> = nodes
        .iter()
        .map(|node| node["memory_bytes"].as_u64())
        .collect();
    ensure!(
        memory == [Some(256 << 20), Some(768 << 20)],
        "memory by node: {memory:?}"
    );
    context.note(format!(
        "{} remote faults, init after {:.0} ms (emulated)",
        guest.number("/faults/remote/count")?,
        guest.number("/boot/to_init_ms")?,
    ));
    Ok(Verdict::Pass)
}

/// Returns the pages fetched from donors and written back to them, according to the report.
fn donor_pages(report: &Value) -> anyhow::Result<(u64, u64)> {
    let nodes = report["nodes"].as_array().context("nodes in the report")?;
    let sum = |key: &str| -> u64 {
        nodes
            .iter()
            .filter(|n| n["role"] == "donor")
            .filter_map(|n| n[key].as_u64())
            .sum()
    };
    ensure!(
        nodes.iter().any(|n| n["role"] == "donor"),
        "the report has no donor: {nodes:?}"
    );
    Ok((sum("pages_fetched"), sum("pages_written_back")))
}

fn boot_local(context: &Context<'_>) -> Result {
    let local = Guest::local(1, PROBE).run(context)?;
    local.expect_exit(exit::SHUTDOWN)?;
    local.faultprobe_over(PROBE_BYTES)?;
    let remote_faults = local.number("/faults/remote/count")?;
    ensure!(
        remote_faults == 0.0,
        "{remote_faults} remote faults with all memory local"
    );

    let donor = Donor::start(context)?;
    let mut pairs = Vec::new();
    let mut ratios = Vec::new();
    let slow = loop {
        if let Some(slow) = median_exceeds(BOOT_RATIO_MAX, &ratios, BOOT_PAIRS) {
            break slow;
        }
        let (local, remote) = (Guest::local(1, "true"), Guest::remote(1, "true"));
        // Each goes first in turn.
        let (here, there) = if pairs.len() % 2 == 0 {
            let here = time_to_init(context, &local)?;
            (here, time_to_init(context, &remote)?)
        } else {
            let there = time_to_init(context, &remote)?;
            (time_to_init(context, &local)?, there)
        };
        pairs.push(format!("{here:.0} {there:.0}"));
        ratios.push(there / here);
    };
    donor.stop(context)?;
    let measured = format!(
        "{ratios:.2?} times the local one in {} of up to {BOOT_PAIRS} pairs; local and remote in ms: {}",
        pairs.len(),
        pairs.join(", ")
    );
    ensure!(
        !slow,
        "a boot with 3/4 of memory on a donor takes {measured}; {BOOT_RATIO_MAX} is the limit of the median"
    );
    context.note(format!(
        "a boot with 3/4 of memory on a donor takes {measured}"
    ));
    Ok(Verdict::Pass)
}

/// Returns whether the median of `count` values, an odd number, exceeds `limit`; `None` while the
/// values measured so far do not decide it.
pub(super) fn median_exceeds(limit: f64, values: &[f64], count: usize) -> Option<bool> {
    let within = values.iter().filter(|value| **value <= limit).count();
    let majority = count / 2 + 1;
    if within >= majority {
        Some(false)
    } else if values.len() - within >= majority {
        Some(true)
    } else {
        None
    }
}

/// Boots a guest and returns its time to init: from the start of the process, with all that it does
/// first, such as connecting to donors.
fn time_to_init(context: &Context<'_>, guest: &Guest) -> anyhow::Result<f64> {
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let time = guest.number("/boot/to_init_ms")?;
    ensure!(time > 0.0, "init after {time} ms");
    Ok(time)
}

fn boot_elf(context: &Context<'_>) -> Result {
    let guest = Guest {
        kernel: "cloud-vmlinux",
        ..Guest::local(1, "uname -r")
    };
    boots_as(context, &guest, &context.share.guest_kernel)
}

fn boot_full_kernel(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let kernel = ("full-vmlinuz", "guest-full.cpio");
    let guest = Guest {
        kernel: kernel.0,
        initrd: kernel.1,
        ..Guest::remote(1, "uname -r")
    };
    boots_as(context, &guest, &context.share.host_kernel)?;
    donor.stop(context)?;
    Ok(Verdict::Pass)
}

fn boots_as(context: &Context<'_>, guest: &Guest, release: &str) -> Result {
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let found = guest.output.stdout.lines().any(|l| l.trim() == release);
    ensure!(found, "the guest does not run {release}");
    Ok(Verdict::Pass)
}

fn reboot_exit_code(context: &Context<'_>) -> Result {
    let mut guest = Guest::local(1, "true");
    guest.cmdline.push_str(" ssi_end=reboot");
    let guest = guest.run(context)?;
    guest.expect_exit(exit::REBOOT)?;
    Ok(Verdict::Pass)
}

fn panic_exit_code(context: &Context<'_>) -> Result {
    let guest = Guest::local(1, "echo c >/proc/sysrq-trigger").run(context)?;
    guest.expect_exit(exit::CRASH)?;
    let (console, errors) = (&guest.output.stdout, &guest.output.stderr);
    ensure!(
        console.contains("Kernel panic - not syncing: sysrq triggered crash"),
        "the console does not say why"
    );
    let reason =
        "its kernel panicked; its console says: Kernel panic - not syncing: sysrq triggered crash";
    ensure!(errors.contains(reason), "{errors}");
    Ok(Verdict::Pass)
}

fn ctrl_c(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    let process = Guest::remote(2, "while :; do faultprobe --bytes 256M; done").boot(context)?;
    process.kill(libc::SIGINT)?;
    let output = process
        .wait(super::guest::SHORT)
        .context("the run does not end on SIGINT")?;
    Finished::read(context, output)?.expect_exit(exit::INTERRUPTED)?;

    // The lease ended with its VM, so the donor's whole memory is available again.
    let again = Guest::remote(1, "true").run(context)?;
    again.expect_exit(exit::SHUTDOWN)?;
    donor.stop(context)?;
    Ok(Verdict::Pass)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_measured_until_the_median_is_known() {
        let exceeds = |values: &[f64]| median_exceeds(1.2, values, 7);
        assert_eq!(exceeds(&[]), None);
        assert_eq!(exceeds(&[1.0, 1.1, 1.2]), None);
        assert_eq!(exceeds(&[1.0, 1.1, 1.2, 0.9]), Some(false));
        assert_eq!(exceeds(&[9.0, 1.1, 5.0, 0.2, 1.3, 0.3]), None);
        assert_eq!(exceeds(&[9.0, 1.1, 5.0, 0.2, 1.3, 0.3, 1.2]), Some(false));
        assert_eq!(exceeds(&[9.0, 1.1, 5.0, 1.3, 1.21]), Some(true));
    }
}
