//! `ssi-hv bench start`: the cost of a guest with much memory.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{Compression, Sealing, TransportKind};
use memory_fabric::page::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use ssi_hv::exit::ExitCode;
use ssi_hv::host;
use ssi_hv::progress::Progress;
use ssi_hv::report::Host;
use ssi_hv::size::ByteSize;

use super::fault::{self, start_fabric};
use super::finish;
use super::usage::Memory;
use super::view::View;
use crate::cli::bench::{BenchFaultConfig, BenchStartConfig};
use crate::commands::Failure;

/// Local memory: more than is accessed, so that nothing is evicted.
const LOCAL: ByteSize = ByteSize::from_mib(256);
/// Pages accessed sequentially.
const DENSE_PAGES: usize = (64 << 20) / PAGE_SIZE;
/// Scattered pages.
const SPARSE_PAGES: usize = 256;

/// Pages between updates of the progress bar, so that it does not affect the measurement.
const PAGES_OF_STEP: u64 = 1024;

/// Connections of a fabric to a donor: that of the lease, and one for each class of traffic.
const CONNECTIONS: usize = 4;
/// Deadline for a closed connection to end at the donor.
const ENDED_TIME_MAX: Duration = Duration::from_secs(5);

/// The results.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Started {
    schema: u32,
    host: Host,
    pub(super) memory_bytes: u64,
    /// From running donors to accessible memory, leases included.
    pub(super) start_ms: f64,
    /// Growth of the process's memory by the start, page tables included.
    pub(super) started_bytes: u64,
    /// That, and the growth when scattered pages are accessed; without the guest's own pages.
    pub(super) touched_bytes: u64,
    /// Number of scattered pages accessed, and of guest pages that became resident.
    sparse_pages_touched: u64,
    sparse_pages_resident: u64,
    /// Memory per sequentially accessed page besides the page itself: the page map.
    pub(super) metadata_bytes_per_page: f64,
    /// The same for the process's page tables.
    pub(super) page_table_bytes_per_page: f64,
    pub(super) verified_bytes: u64,
    pub(super) corrupt_bytes: u64,
}

/// Measures the start of a guest's memory.
pub fn start(config: &BenchStartConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    let result = measure(config.memory)?;
    let wrong = (result.corrupt_bytes, "bytes");
    finish(&result, config.json, table, wrong)
}

fn measure(memory: ByteSize) -> Result<Started> {
    let donors = [Donor::start(&fault::donor(memory.bytes()))?];
    let config = BenchFaultConfig {
        memory,
        local_memory: LOCAL,
        threads: 1,
        donors: Some(1),
        replicas: 1,
        redundancy: None,
        transport: TransportKind::Tcp,
        tls: false,
        seal: false,
        checksum: false,
        compression: Compression::Auto,
        seconds: 1,
        faults: None,
        json: false,
    };
    // Pages accessed, and the same number compared.
    let pages = 2 * (DENSE_PAGES + SPARSE_PAGES);
    let progress = Progress::still("pages", pages as u64, "starts");
    let before = Memory::now()?;
    let started_at = Instant::now();
    let fabric = start_fabric(&config, &donors, None, Sealing::Off)?;
    let start_ms = started_at.elapsed().as_secs_f64() * 1e3;
    wait_until_measured(&donors[0])?;
    let started = Memory::now()?;
    let resident = || {
        let bytes = fabric.memory().resident_bytes();
        bytes.context("cannot see how much of the guest is here")
    };
    let beyond = |now: Memory, then: Memory, guest: u64| {
        (now.resident + now.page_tables)
            .saturating_sub(then.resident + then.page_tables)
            .saturating_sub(guest)
    };

    let view = View::of(&fabric);
    let dense = 0..DENSE_PAGES;
    let mut done = 0;
    let mut step = || {
        done += 1;
        if done % PAGES_OF_STEP == 0 {
            progress.reach(done);
        }
    };
    progress.say("touched one after another");
    for page in dense.clone() {
        view.fill_page(page);
        step();
    }
    let (filled, dense_bytes) = (Memory::now()?, resident()?);
    // Counts of bytes stay far below 2^52.
    #[allow(clippy::cast_precision_loss)]
    let per_page = |after: u64, before: u64| {
        let pages = dense_bytes / PAGE_SIZE as u64;
        after.saturating_sub(before) as f64 / pages.max(1) as f64
    };

    // In a small guest, some of them are among the sequential ones and already resident.
    let stride = view.pages / SPARSE_PAGES;
    let sparse = (0..SPARSE_PAGES).map(|index| index * stride + stride / 2);
    progress.say("touched far from each other");
    for page in sparse.clone() {
        view.fill_page(page);
        step();
    }
    let (touched, sparse_bytes) = (Memory::now()?, resident()? - dense_bytes);
    let started_bytes = beyond(started, before, 0);

    let pages = dense.chain(sparse);
    progress.say("compared");
    let compare = |page| {
        step();
        view.corrupt_bytes(page)
    };
    let corrupt_bytes = pages.clone().map(compare).sum();
    drop(progress);
    let result = Started {
        schema: ssi_hv::report::SCHEMA,
        host: host::detect(),
        memory_bytes: memory.bytes(),
        start_ms,
        started_bytes,
        touched_bytes: started_bytes + beyond(touched, filled, sparse_bytes),
        sparse_pages_touched: SPARSE_PAGES as u64,
        sparse_pages_resident: sparse_bytes / PAGE_SIZE as u64,
        metadata_bytes_per_page: per_page(filled.anonymous, started.anonymous),
        page_table_bytes_per_page: per_page(filled.page_tables, started.page_tables),
        verified_bytes: (pages.count() * PAGE_SIZE) as u64,
        corrupt_bytes,
    };
    fabric.shutdown();
    Ok(result)
}

/// Waits until the measuring connection of the start has ended at the donor as well: otherwise its
/// memory would be freed during the following measurements.
fn wait_until_measured(donor: &Donor) -> Result<()> {
    let deadline = Instant::now() + ENDED_TIME_MAX;
    while donor.connections() > CONNECTIONS {
        let open = donor.connections();
        ensure!(
            Instant::now() < deadline,
            "{open} connections of the donor are open {ENDED_TIME_MAX:?} after the start, \
             {CONNECTIONS} are in use"
        );
        std::thread::yield_now();
    }
    Ok(())
}

fn table(result: &Started) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{}: started in {:.1} ms, {} KiB more than before\n{} KiB with {} pages touched\n\
         {:.1} bytes a page of metadata, {:.1} of page tables\n{} bytes verified, {} wrong",
        ByteSize::from_bytes(result.memory_bytes),
        result.start_ms,
        result.started_bytes >> 10,
        result.touched_bytes >> 10,
        result.sparse_pages_touched,
        result.metadata_bytes_per_page,
        result.page_table_bytes_per_page,
        result.verified_bytes,
        result.corrupt_bytes,
    );
    text
}
