//! `ssi-hv bench clients`: what many VMs cost a node that do no more than keep their leases.

mod limits;
mod load;
mod node;

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use fabric_transport::stream::Carrier;
use memory_fabric::page::PAGE_SIZE;
use serde::Serialize;
use ssi_hv::exit::ExitCode;
use ssi_hv::host;
use ssi_hv::instance::percentiles;
use ssi_hv::report::{Host, Percentiles};
use ssi_hv::size::ByteSize;

use self::load::Load;
use self::node::Node;
use super::finish;
use super::members::Members;
use crate::cli::bench::BenchClientsConfig;
use crate::commands::Failure;

/// Memory that each client leases.
const LEASE: u64 = PAGE_SIZE as u64;
/// Memory that the node lends at least.
const LENT_MIN: u64 = 64 << 20;

/// The results.
#[derive(Debug, Serialize)]
struct Clients {
    schema: u32,
    host: Host,
    clients: u32,
    tls: bool,
    /// From connecting to the granted lease, while those before renew theirs.
    setup_us: Percentiles,
    /// All set-ups together.
    setups_seconds: f64,
    /// Growth of the node's resident memory by all clients, divided by their number.
    node_bytes_per_client: u64,
    /// Its growth by all, and the growth of its page tables.
    node_bytes: u64,
    node_page_table_bytes: u64,
    /// Threads of the node before the first client, and while all renew.
    node_threads_idle: u64,
    node_threads: u64,
    /// While all clients are connected.
    seconds: u32,
    renewals: u64,
    renewals_per_second: f64,
    /// From the request to the answer.
    renewal_us: Percentiles,
    /// Processor time of the node for one renewal; `null` if there was none.
    node_cpu_us_per_renewal: Option<f64>,
    failed: u64,
}

/// Measures clients.
pub fn clients(config: &BenchClientsConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    limits::check(config.clients)?;
    let result = measure(config)?;
    let wrong = (result.failed, "renewals");
    finish(&result, config.json, table, wrong)
}

fn measure(config: &BenchClientsConfig) -> Result<Clients> {
    let files = tempfile::tempdir().context("cannot create a directory for certificates")?;
    let members = config.tls.then(|| Members::create_at(files.path()));
    let members = members.transpose()?;
    let carrier = members.as_ref().map_or(Carrier::Tcp, Members::carrier);
    let credentials = members.as_ref().map(|_| files.path().join(Members::NODE));
    let lent = (u64::from(config.clients) * LEASE).max(LENT_MIN);
    // Whole MiB.
    let lent = ByteSize::from_mib(lent.div_ceil(1 << 20));
    let node = Node::start(lent, credentials.as_deref())?;
    let idle = node.usage()?;
    let mut load = Load::connect(node.address(), &carrier, config.clients)?;
    let setups_seconds = load.setups_time().as_secs_f64();
    let before = node.usage()?;
    let lasting = Duration::from_secs(config.seconds.into());
    let renewed = load.renew_for(lasting);
    let busy = node.usage()?;
    let failed = renewed.failed + load.release();
    node.end()?;
    let renewals = renewed.times.summary().count;
    // Far below 2^52.
    #[allow(clippy::cast_precision_loss)]
    let (count, clients) = (renewals as f64, u64::from(config.clients));
    let node_bytes = busy.memory.resident.saturating_sub(idle.memory.resident);
    let cpu = busy.processor_time.saturating_sub(before.processor_time);
    Ok(Clients {
        schema: ssi_hv::report::SCHEMA,
        host: host::detect(),
        clients: config.clients,
        tls: config.tls,
        setup_us: percentiles(&load.setups().summary()),
        setups_seconds,
        node_bytes_per_client: node_bytes / clients,
        node_bytes,
        node_page_table_bytes: busy
            .memory
            .page_tables
            .saturating_sub(idle.memory.page_tables),
        node_threads_idle: idle.threads,
        node_threads: busy.threads,
        seconds: config.seconds,
        renewals,
        renewals_per_second: count / renewed.time.as_secs_f64(),
        renewal_us: percentiles(&renewed.times.summary()),
        node_cpu_us_per_renewal: (renewals > 0).then(|| cpu.as_secs_f64() * 1e6 / count),
        failed,
    })
}

fn table(result: &Clients) -> String {
    let mut text = String::new();
    let tls = if result.tls { " over TLS" } else { "" };
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{} clients{tls}, each with a lease that it renews\n\n{:<12}{:>10}{:>10}{:>10}{:>10}{:>11}",
        result.clients, "us", "p50", "p90", "p99", "p99.9", "max"
    );
    for (name, row) in [
        ("set-up", &result.setup_us),
        ("renewal", &result.renewal_us),
    ] {
        let _ = writeln!(
            text,
            "{name:<12}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>11.1}",
            row.p50, row.p90, row.p99, row.p999, row.max
        );
    }
    let cpu = result
        .node_cpu_us_per_renewal
        .map_or_else(|| "?".to_owned(), |cpu| format!("{cpu:.1}"));
    let _ = writeln!(
        text,
        "\nall were set up in {:.1} s; {} renewals in {} s, {:.0} a second, {} failed, {cpu} us of CPU \
         time of the node each\nthe node has {:.1} KiB for each client, and {} threads ({} without \
         clients)",
        result.setups_seconds,
        result.renewals,
        result.seconds,
        result.renewals_per_second,
        result.failed,
        kib(result.node_bytes_per_client),
        result.node_threads,
        result.node_threads_idle,
    );
    text
}

// Memory of a client is far below 2^52 bytes.
#[allow(clippy::cast_precision_loss)]
fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}
