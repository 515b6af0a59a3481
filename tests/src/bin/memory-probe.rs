//! `faultprobe` as a process without a guest, on memory of its own or on memory that a donor
//! lends: the bench runs both sides of its comparison with swap by it.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Parser;
use faultprobe::memory::{Memory, PAGE_BYTES};
use memory_fabric::fabric::{
    Compression, DonorAddress, Fabric, FabricConfig, FabricEvent, FabricObserver, LocalUse,
    SPIN_DEFAULT, TransportKind,
};
use memory_fabric::link::LinkEvent;
use memory_fabric::page::{PageIndex, PageRange};

/// How long a donor that cannot be reached is waited for.
const GRACE: Duration = Duration::from_secs(10);

/// Runs faultprobe's work in this process.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    probe: faultprobe::Args,
    /// Take the memory from this donor (`ssi-hv node`), and not from this host.
    #[arg(long, requires = "local")]
    donor: Option<SocketAddr>,
    /// How much of a donor's memory may be resident at once (suffixes K, M, G).
    #[arg(long, requires = "donor", value_parser = faultprobe::parse_bytes)]
    local: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let sound = match arguments.donor.zip(arguments.local) {
        Some((donor, local)) => on_fabric(&arguments.probe, donor, local),
        None => Memory::new(arguments.probe.bytes)
            .map_err(|error| anyhow::anyhow!("{error}"))
            .map(|mut memory| faultprobe::run_and_print(&mut memory, &arguments.probe)),
    };
    match sound {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("memory-probe: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn on_fabric(args: &faultprobe::Args, donor: SocketAddr, local: u64) -> anyhow::Result<bool> {
    let pages = u32::try_from(args.bytes / PAGE_BYTES as u64).context("--bytes")?;
    ensure!(
        local < args.bytes,
        "--local {local} is not less than --bytes {}: nothing would be remote",
        args.bytes
    );
    let observer: FabricObserver = Arc::new(|event| {
        if let FabricEvent::Failed(reason) | FabricEvent::Link(LinkEvent::Lost { reason, .. }) =
            event
        {
            // The probe waits for a page that never comes.
            eprintln!("memory-probe: {reason}");
            std::process::exit(2);
        }
    });
    let config = FabricConfig {
        vm: "memory-probe".to_owned(),
        ram: vec![PageRange::new(PageIndex::new(0), pages)],
        local_bytes: local,
        local_use: LocalUse::Cache,
        donors: vec![DonorAddress {
            fingerprint: None,
            address: donor,
            bytes: None,
        }],
        transport: TransportKind::Tcp,
        checksum: false,
        compression: Compression::Auto,
        grace: GRACE,
        prefetch: true,
        record: false,
        replay: Vec::new(),
        spin: SPIN_DEFAULT,
        huge_pages: false,
        without_continue_write_protected: false,
    };
    let fabric = Fabric::start(&config, &observer)?;
    let view = fabric.memory().guest_view();
    let base = NonNull::new(view.cast::<u64>()).context("the guest view")?;
    // SAFETY: the guest view is a shared, writable mapping of as many bytes, aligned to pages,
    // which lives as long as the fabric; and the pager keeps its contents, writing to it only
    // to put back what was there.
    let mut memory = unsafe { Memory::borrowed(base, fabric.memory().bytes()) };
    let sound = faultprobe::run_and_print(&mut memory, args);
    drop(memory);
    fabric.shutdown();
    Ok(sound)
}
