//! The demo of a whole distribution.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use serde_json::json;

use super::comparison::{Comparison, donor_flags, measure};
use super::{ssi, work};
use crate::demo::{show, start_donor, start_node};
use crate::share::Share;
use crate::testbed::{HostImage, HostKernel, Testbed, TestbedConfig};

/// Makes the image of Debian, and starts two hosts of which the first has it as its disk.
fn start(workspace: &Path, kernel: HostKernel) -> anyhow::Result<Testbed> {
    println!("Making the image of Debian, if it is not there yet...");
    let mut share = Share::prepare(workspace)?;
    ensure!(
        share.has_product(),
        "no ssi-hv in target/release: run scripts/demo"
    );
    let Some(disk) = share.add_distro(workspace) else {
        bail!("{}", share.distro_missing.unwrap_or_default());
    };
    println!("Two emulated hosts are used (their times are not representative).");
    let image = HostImage::prepare(workspace, kernel)?;
    let mut config = TestbedConfig::two_hosts(&share.dir, workspace.join("target/testbed/distro"));
    config.disk = Some(disk);
    Ok(Testbed::start(&config, &image)?)
}

/// Writes `target/demo/NAME`.
fn write(workspace: &Path, name: &str, result: &serde_json::Value) -> anyhow::Result<()> {
    let file = workspace.join("target/demo").join(name);
    std::fs::write(&file, serde_json::to_string_pretty(result)? + "\n")
        .with_context(|| file.display().to_string())?;
    println!("The whole report: target/demo/{name}");
    Ok(())
}

/// Prepares `target/demo` for a file of this name. A report of an earlier run must not be mistaken
/// for this one.
fn directory(workspace: &Path, name: &str) -> anyhow::Result<std::path::PathBuf> {
    let dir = workspace.join("target/demo");
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let _ = std::fs::remove_file(dir.join(name));
    Ok(dir)
}

/// Runs the demo of a Debian with a CPU on each of two hosts, and writes
/// `target/demo/distro-ssi.json`.
///
/// # Errors
/// Fails when the guest cannot be booted, or a step in it fails.
pub fn run_on_two_hosts(workspace: &Path) -> anyhow::Result<()> {
    const FILE: &str = "distro-ssi.json";
    let dir = directory(workspace, FILE)?;
    let begin = Instant::now();
    let testbed = start(workspace, HostKernel::Linux6_12)?;
    let (primary, lender) = (testbed.host(1), testbed.host(2));
    let address = format!("{}:7700", lender.address());
    println!(
        "Host 2 lends a CPU: ssi-hv node --listen {address} --insecure {}",
        ssi::LENDS.join(" ")
    );
    let _node = start_node(lender, &address, ssi::LENDS)?;
    println!(
        "Host 1 boots Debian, whose console follows, with {}; commands go over ssh.\n",
        ssi::FLAGS.join(" ")
    );
    let worked = ssi::work_on_two_hosts(primary, &dir, Box::new(show))?;
    let transfers = &worked.report["nodes"][1]["transfers"];
    println!("\n{}\nno wrong byte; host 2: {transfers}", worked.table());
    let result = json!({
        "steps": worked.json(),
        "report": worked.report,
        "seconds": begin.elapsed().as_secs(),
    });
    write(workspace, FILE, &result)
}

/// Runs the demo and writes `target/demo/distro.json`.
///
/// # Errors
/// Fails when the guest cannot be booted, or a step in it fails.
pub fn run(workspace: &Path) -> anyhow::Result<()> {
    const FILE: &str = "distro.json";
    let dir = directory(workspace, FILE)?;
    let begin = Instant::now();
    let testbed = start(workspace, HostKernel::Linux6_1)?;
    let (compute, lender) = (testbed.host(1), testbed.host(2));
    let address = format!("{}:7700", lender.address());
    println!("Host 2 lends memory: ssi-hv node --listen {address} --memory 1G --insecure");
    let _donor = start_donor(lender, &address)?;
    println!("Host 1 boots Debian, whose console follows; commands go over ssh.\n");
    let console = Box::new(show);
    let (there, report) = measure(
        compute,
        &dir,
        &donor_flags("256M"),
        console,
        work::ALL,
        true,
    )?;
    println!("\nThe same guest with all its memory local, for comparison...");
    let silent = Box::new(|_: &[u8]| {});
    let (here, _) = measure(compute, &dir, &[], silent, work::ALL, false)?;

    let comparison = Comparison { here, there };
    println!("\n{}", comparison.table());
    println!(
        "no wrong byte, and nothing in the kernel's log; {} remote faults, {}",
        report["faults"]["remote"]["count"],
        report["transport"]["kind"].as_str().unwrap_or("?"),
    );
    let result = json!({
        "comparison": comparison.json(),
        "report": report,
        "seconds": begin.elapsed().as_secs(),
    });
    write(workspace, FILE, &result)
}
