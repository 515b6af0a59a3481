//! `ssi-hv node`.

use std::time::Duration;

use anyhow::Context as _;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::SPIN_DEFAULT;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use ssi_hv::cli::node::NodeConfig;
use ssi_hv::exit::ExitCode;
use ssi_hv::report::ReportFile;
use ssi_hv::size::ByteSize;

use super::{Failure, print};

/// What a node counted since its start.
#[derive(Debug, Serialize)]
struct NodeReport {
    schema: u32,
    listen: String,
    memory_bytes: u64,
    lent_bytes: u64,
    leases: usize,
    leases_granted: u64,
    leases_expired: u64,
    pages_read: u64,
    pages_written: u64,
    pages_dropped: u64,
}

impl NodeReport {
    fn of(donor: &Donor) -> Self {
        let pool = donor.pool();
        let pages = pool.status();
        Self {
            schema: ssi_hv::report::SCHEMA,
            listen: donor.address().to_string(),
            memory_bytes: pool.bytes(),
            lent_bytes: pool.lent_bytes(),
            leases: pool.leases(),
            leases_granted: pool.granted.get(),
            leases_expired: pool.expired.get(),
            pages_read: pages.pages_read,
            pages_written: pages.pages_written,
            pages_dropped: pages.pages_dropped,
        }
    }
}

/// Lends memory until it is told to stop.
pub fn node(config: &NodeConfig) -> Result<ExitCode, Failure> {
    let listen = config.validate()?;
    let report = config
        .report
        .as_deref()
        .map(ReportFile::prepare)
        .transpose()?;
    warn_of_little_memory(config.memory);
    // Before anything is lent, so that no signal ends the process in between.
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1]).context("cannot watch for signals")?;
    let donor = Donor::start(&DonorConfig {
        listen,
        memory_bytes: config.memory.bytes(),
        lease_duration_max: Duration::from_secs(config.lease_seconds.into()),
        spin: SPIN_DEFAULT,
    })?;
    if !listen.ip().is_loopback() {
        tracing::warn!(
            "--insecure: whoever reaches {} can lease memory, and read and change what VMs keep \
             here on their way; use it on a network of your own",
            donor.address()
        );
    }
    print(&format!(
        "lending {} on {}\n",
        config.memory,
        donor.address()
    ))?;

    for signal in signals.forever() {
        match signal {
            // On demand, while it runs.
            SIGUSR1 => write(report.as_ref(), &donor),
            // To be told to stop is how a node ends: that is success.
            _ => break,
        }
    }
    let leases = donor.pool().leases();
    if leases > 0 {
        tracing::warn!(leases, "VMs still had memory here; they lose it");
    }
    if let Some(report) = &report {
        report.write(&NodeReport::of(&donor))?;
    }
    Ok(ExitCode::Success)
}

fn write(report: Option<&ReportFile>, donor: &Donor) {
    if let Some(report) = report
        && let Err(error) = report.write(&NodeReport::of(donor))
    {
        tracing::error!("{:#}", anyhow::anyhow!(error));
    }
}

/// Memory is taken when it is first written, so a host with too little of it is found out late.
fn warn_of_little_memory(memory: ByteSize) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = text.lines().find_map(|line| {
        let kib = line
            .strip_prefix("MemAvailable:")?
            .trim()
            .strip_suffix(" kB")?;
        kib.parse::<u64>().ok()
    });
    if let Some(available) = available.map(|kib| ByteSize::from_bytes(kib << 10))
        && available < memory
    {
        tracing::warn!(
            "--memory {memory} is more than the {available} that this host has available; \
             VMs that use all of it may drive the host out of memory"
        );
    }
}
