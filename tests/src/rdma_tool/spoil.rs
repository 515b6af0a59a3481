//! RDMA connections with falsified parameters: `rdma` must fail in bounded time with an error that
//! names the cause, and `auto` must fall back to TCP.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{bail, ensure};
use clap::Args;
use memory_fabric::fabric::{Fabric, PathKind, TransportKind};
use memory_fabric::link::rdma::Reader;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::rdma::Settings;

use super::proxy::{self, Lie};
use super::{READ_TIME_MAX, lease, walk};

/// Accesses with `auto`: some pages leave, so that some return over TCP.
const TOUCHES: u64 = 200;
/// Memory of the VM. What exceeds the smallest cache is only on the donor.
const MEMORY_BYTES: u64 = 20 << 20;

/// Arguments of the test.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The donor
    donor: SocketAddr,
    /// The address of this host over which the donor is reached
    #[arg(long)]
    here: IpAddr,
    /// The parameter to falsify
    #[arg(long)]
    lie: Lie,
}

/// Runs the test and prints a line of JSON.
///
/// # Errors
/// Fails when a READ succeeds, or `auto` does not end with TCP and right bytes.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let donor = proxy::start(arguments.here, arguments.donor, arguments.lie)?;
    // The port is on another host than what the donor is taken for.
    let settings = Arc::new(Settings {
        peers: vec![arguments.donor.ip()],
        ..Settings::default()
    });
    let (error, after) = one_read(donor, &settings)?;

    let mut only = walk::config(donor, MEMORY_BYTES, TransportKind::Rdma);
    let Err(stranger) = Fabric::start(&only, &walk::deaf()) else {
        bail!("a VM has started with a port that is not the donor's");
    };
    let stranger = format!("{:#}", anyhow::Error::new(stranger));
    ensure!(stranger.contains("peers="), "{stranger}");
    only.rdma = Arc::clone(&settings);
    let started = Instant::now();
    let Err(refusal) = Fabric::start(&only, &walk::deaf()) else {
        bail!("a VM that wants RDMA alone has started");
    };
    let refused_after = started.elapsed();

    let started = Instant::now();
    let mut any = walk::config(donor, MEMORY_BYTES, TransportKind::Auto);
    any.rdma = settings;
    let fabric = Fabric::start(&any, &walk::deaf())?;
    let begun_after = started.elapsed();
    ensure!(
        fabric.path() == PathKind::Tcp,
        "auto goes by {:?}",
        fabric.path()
    );
    let why = fabric.rdma_refusals().join("; ");
    let corrupt = walk::fill_and_check(&fabric, TOUCHES);
    fabric.shutdown();
    println!(
        "{}",
        serde_json::json!({
            "error": error,
            "error_after_ms": after,
            "rdma": format!("{:#}", anyhow::Error::new(refusal)),
            "rdma_after_ms": refused_after.as_millis(),
            "auto": why,
            "auto_after_ms": begun_after.as_millis(),
            "corrupt_bytes": corrupt,
        })
    );
    ensure!(corrupt == 0, "{corrupt} bytes were wrong over TCP");
    Ok(())
}

/// Returns the error of one READ over such a connection, and its time in milliseconds.
fn one_read(donor: SocketAddr, settings: &Arc<Settings>) -> anyhow::Result<(String, u128)> {
    let leased = lease(donor, "spoiled", 4)?;
    let mut config = leased.rdma_config();
    config.settings = Arc::clone(settings);
    let mut reader = Reader::connect(&config)?;
    let started = Instant::now();
    let mut page = [0; PAGE_SIZE];
    let Err(error) = reader.read(0, READ_TIME_MAX, &mut page) else {
        bail!("a READ succeeded all the same");
    };
    Ok((error.to_string(), started.elapsed().as_millis()))
}
