//! Scenarios of the command line: each mistake gives one clear error line.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::guest::{GUEST_DEADLINE, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "doctor",
        about: "doctor finds a testbed host ready, and says so in JSON too",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: doctor,
    },
    Scenario {
        name: "bad_input",
        about: "what cannot be started ends with one line, the right exit code and no panic",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: bad_input,
    },
    Scenario {
        name: "report_on_full_disk",
        about: "a report that finds no room ends the run with an error that names it",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: report_on_full_disk,
    },
];

fn doctor(context: &Context<'_>) -> Result {
    let text = context
        .testbed
        .host(1)
        .check(&["ssi-hv", "doctor", "--json"], SHORT)?;
    let findings: Value = serde_json::from_str(&text).context("doctor --json")?;
    let findings = findings.as_array().context("a list of findings")?;
    for check in ["kvm", "dedicated CPUs", "userfaultfd", "locked memory"] {
        let status = findings
            .iter()
            .find(|f| f["check"] == check)
            .map(|f| &f["status"]);
        ensure!(status.is_some_and(|s| s == "ok"), "{check}: {status:?}");
    }
    Ok(Verdict::Pass)
}

/// Invalid arguments, the exit code, and a part of the error message.
const BAD: &[(&[&str], i32, &str)] = &[
    (&["run"], exit::USAGE, "--kernel"),
    (&["run", "--kernel", "/absent"], exit::USAGE, "/absent"),
    (
        &[
            "run",
            "--kernel",
            "/share/cloud-vmlinuz",
            "--memory",
            "1000000001",
        ],
        exit::USAGE,
        "1000000001",
    ),
    (
        &["run", "--kernel", "/share/cloud-vmlinuz", "--cpus", "255"],
        exit::USAGE,
        "254",
    ),
    (
        // Plain text beyond loopback requires an explicit flag.
        &[
            "run",
            "--kernel",
            "/share/cloud-vmlinuz",
            "--donor",
            "10.77.0.2:7700",
            "--local-memory",
            "256M",
        ],
        exit::USAGE,
        "--insecure",
    ),
    (
        &["node", "--listen", "10.77.0.1:7700", "--memory", "64M"],
        exit::USAGE,
        "--insecure",
    ),
    (
        &[
            "run",
            "--insecure",
            "--kernel",
            "/share/cloud-vmlinuz",
            "--donor",
            "10.77.0.2:7799",
            "--local-memory",
            "256M",
        ],
        exit::DONOR_UNAVAILABLE,
        "10.77.0.2:7799",
    ),
    (
        // A file that is not a kernel, and an initial RAM disk that does not fit.
        &["run", "--kernel", "/share/guest.cpio"],
        exit::HOST_ERROR,
        "/share/guest.cpio",
    ),
    (
        &[
            "run",
            "--kernel",
            "/share/cloud-vmlinuz",
            "--initrd",
            "/share/full-vmlinux",
            "--memory",
            "96M",
        ],
        exit::HOST_ERROR,
        "--memory",
    ),
];

/// A guest runs, but its report does not fit on the disk.
fn report_on_full_disk(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let full = "mkdir -p /tmp/full && mount -t tmpfs -o size=4k full /tmp/full && dd if=/dev/zero of=/tmp/full/fill bs=4k count=1";
    host.check(&["sh", "-c", full], SHORT)?;
    let argv = [
        "ssi-hv",
        "run",
        "--kernel",
        "/share/cloud-vmlinuz",
        "--initrd",
        "/share/guest.cpio",
        "--memory",
        "256M",
        "--cmdline",
        "quiet",
        "--report",
        "/tmp/full/report.json",
    ];
    let output = host.run(&argv, GUEST_DEADLINE)?;
    host.check(&["umount", "/tmp/full"], SHORT)?;
    let errors = output.stderr;
    ensure!(
        output.status.code == exit::HOST_ERROR,
        "exit code {}: {errors}",
        output.status
    );
    ensure!(
        errors.contains("ssi-hv: error:") && errors.contains("/tmp/full/report.json"),
        "{errors}"
    );
    Ok(Verdict::Pass)
}

fn bad_input(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    for (args, code, named) in BAD {
        let argv: Vec<&str> = ["ssi-hv"].iter().chain(*args).copied().collect();
        let what = argv.join(" ");
        let output = host.run(&argv, SHORT)?;
        let errors = output.stderr;
        ensure!(
            output.status.code == *code,
            "{what}: exit code {code} expected, got {}: {errors}",
            output.status
        );
        ensure!(
            errors.contains(named),
            "{what}: the error does not name {named}: {errors}"
        );
        ensure!(!errors.contains("panicked"), "{what}: {errors}");
        let lines = errors
            .lines()
            .filter(|l| l.starts_with("ssi-hv: error:"))
            .count();
        ensure!(lines == 1, "{what}: {lines} error lines: {errors}");
    }
    Ok(Verdict::Pass)
}
