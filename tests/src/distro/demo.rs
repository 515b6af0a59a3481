//! The demo of a whole distribution.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use serde_json::json;

use super::comparison::{Comparison, donor_flags, measure};
use super::work;
use crate::demo::{show, start_donor};
use crate::share::Share;
use crate::testbed::{HostImage, HostKernel, Testbed, TestbedConfig};

/// Runs the demo and writes `target/demo/distro.json`.
///
/// # Errors
/// Fails when the guest cannot be booted, or a step in it fails.
pub fn run(workspace: &Path) -> anyhow::Result<()> {
    let dir = workspace.join("target/demo");
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let file = dir.join("distro.json");
    // A report of an earlier run must not be mistaken for this one.
    let _ = std::fs::remove_file(&file);
    println!("Making the image of Debian, if it is not there yet...");
    let mut share = Share::prepare(workspace)?;
    ensure!(
        share.has_product(),
        "no ssi-hv in target/release: run scripts/demo"
    );
    let Some(disk) = share.add_distro(workspace) else {
        bail!("{}", share.distro_missing.unwrap_or_default());
    };
    let begin = Instant::now();
    println!("Two emulated hosts are used (their times are not representative).");
    let image = HostImage::prepare(workspace, HostKernel::Linux6_1)?;
    let mut config = TestbedConfig::two_hosts(&share.dir, workspace.join("target/testbed/distro"));
    config.disk = Some(disk);
    let testbed = Testbed::start(&config, &image)?;
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
    std::fs::write(&file, serde_json::to_string_pretty(&result)? + "\n")
        .with_context(|| file.display().to_string())?;
    println!(
        "The whole report: {}",
        file.strip_prefix(workspace).unwrap_or(&file).display()
    );
    Ok(())
}
