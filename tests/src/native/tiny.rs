//! A guest of a few instructions, which runs even under a software KVM.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use serde_json::Value;

use super::succeed_within;
use crate::published::Published;

/// Output of the guest when each of its 46 MiB held what was written there.
const SAYS: &str = "rk";

/// Fails where VMs cannot be created.
pub fn kvm() -> std::io::Result<()> {
    let device = File::options().read(true).write(true).open("/dev/kvm");
    device
        .map(drop)
        .map_err(|error| std::io::Error::other(format!("/dev/kvm: {error}")))
}

/// Runs a guest of 64 MiB, a quarter of them local, with further flags. The guest increments a
/// counter in each page of 46 MiB, three times, and then verifies every one. Its report is written
/// to a file and returned.
pub fn run(
    product: &Path,
    more: &[&str],
    report: &Path,
    within: Duration,
) -> anyhow::Result<Value> {
    let dir = tempfile::tempdir()?;
    let kernel = dir.path().join("kernel");
    std::fs::write(
        &kernel,
        tiny_guests::elf(tiny_guests::walk_and_check::code()),
    )?;
    let mut run = Command::new(product);
    run.arg("run")
        .arg("--kernel")
        .arg(&kernel)
        .arg("--report")
        .arg(report);
    run.args(["--memory", "64M", "--local-memory", "16M"])
        .args(more);
    run.env("SSI_HV_RUNTIME_DIR", dir.path().join("sockets"));
    let said = succeed_within(&mut run, within)?;
    ensure!(said == SAYS, "the guest says {said:?}, {SAYS:?} is right");
    Published::Report.parse(&std::fs::read_to_string(report)?)
}
